"""Unquantised collectives: the leaf itself in every dtype, through one hop, two hops or a secondary, and its sum."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from zerojax.collectives.plain import plain_collectives

DTYPES = ("float32", "bfloat16", "float16", "int8", "int16", "uint16", "int32", "complex64")


@pytest.mark.parametrize("mesh", ["2x4", "1x7"])
def test_every_dtype_is_gathered_and_summed_as_it_is_and_in_order(mesh):
    # 13 rows need padding everywhere; up to 4 on each of 8 devices is exact in every dtype.
    leaves = {name: (jnp.arange(39).reshape(13, 3) % 5).astype(name) for name in DTYPES}
    layout = models.make_layout(leaves, mesh, 3, trainable=lambda path, leaf: jnp.issubdtype(leaf.dtype, jnp.inexact))
    collectives = plain_collectives(secondary=True)
    n = layout.mesh.size

    def moved(*shards):
        out = []
        for shard, p in zip(shards, layout.leaves, strict=True):
            full = collectives.gather(shard, p)
            assert collectives.secondary is not None
            again = collectives.gather_secondary(collectives.secondary(shard, p, 0), p)
            out.append((full, again, collectives.gather(collectives.reduce(full, p), p)))
        return out

    specs = tuple(p.data_spec for p in layout.leaves)
    everywhere = jax.shard_map(moved, mesh=layout.mesh, in_specs=specs, out_specs=P(), check_vma=False)
    stored = jax.tree.leaves(layout.shard(leaves))
    assert all(p.is_sharded for p in layout.leaves)
    for want, results in zip(jax.tree.leaves(leaves), jax.jit(everywhere)(*stored), strict=True):
        for got, factor in zip(results, (1, 1, n), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want) * np.asarray(factor).astype(want.dtype))
