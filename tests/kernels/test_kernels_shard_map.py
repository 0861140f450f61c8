"""The Mosaic kernels in interpret mode equal the reference bit for bit inside shard_map, with real collectives."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from kernel_formats import INT8, ROTATED_TILED, assert_same_bits, quick

import pallas_kernels as pk
from pallas_kernels import _compat

pytestmark = pytest.mark.skipif(
    not _compat.MOSAIC_INTERPRETS, reason="JAX 0.10 cannot interpret Mosaic GPU kernels, and here is no GPU"
)

KERNEL = {"implementation": "mosaic_gpu", "interpret": True}


def two_hops(x, axis, count, **how):
    """The quantised reduction over one axis, one byte message per destination."""
    q = pk.quantize_slices(x, INT8, dim=0, num_slices=count, **how)
    received = jax.lax.all_to_all(pk.pack_bytes(q), axis, 0, 0, tiled=True)
    total = pk.dequantize_sum_quantize(pk.unpack_bytes(received, q), ROTATED_TILED, mean=True, **how)
    return pk.dequantize_sum(jax.tree.map(lambda a: jax.lax.all_gather(a, axis), total), dtype=x.dtype, **how)


@pytest.mark.parametrize(("count", "check_vma"), [(1, True), (3, False), (8, True)])
def test_kernels_run_inside_shard_map_with_real_collectives(count, check_vma, rng):
    mesh = jax.make_mesh((count,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:count])
    x = jnp.asarray(rng.standard_normal((count, count * 4, 1024)), jnp.float32)

    def program(how):
        body = lambda x: two_hops(x[0], "d", count, **how)[None]  # noqa: E731
        return quick(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check_vma))(x)

    assert_same_bits(program({"implementation": "xla"}), program(KERNEL))


def test_kernels_run_in_a_shard_map_nested_in_a_partly_manual_one(rng):
    mesh = jax.make_mesh((4, 2), ("d", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jnp.asarray(rng.standard_normal((4, 16, 2048)), jnp.float32)

    def program(how):
        def outer(x):
            inner = lambda x: two_hops(x[0], "d", 4, **how)[None]  # noqa: E731
            spec = P(None, None, "model")
            return jax.shard_map(inner, in_specs=spec, out_specs=spec, axis_names={"model"}, check_vma=False)(x)

        mapped = jax.shard_map(outer, mesh=mesh, in_specs=P("d"), out_specs=P("d"), axis_names={"d"}, check_vma=False)
        return quick(mapped)(x)

    assert_same_bits(program({"implementation": "xla"}), program(KERNEL))
