"""The global norm of gradients in stored form, with one collective of one number.

Each device adds up the squares of its shards; replicated leaves count once. Small leaves are joined first: a kernel
or two for many of them, where one by one they would be a third of all operations of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.gradients.outputs import wide_dtype
from zerojax.layout.layout import Layout

Tree = Any
# Elements up to which reading and writing a leaf once more costs less than kernels of its own.
_SMALL = 2**18
_MOST_JOINED = 2**22


def global_norm(grads: Tree, layout: Layout) -> jax.Array:
    """The 2-norm over all elements of all gradients, in float32 or wider, the same on every device.

    Args:
        grads: as `value_and_grad` returns them: shards from stage 1 on, None for leaves that are not trained.
        layout: their layout.

    >>> import zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> layout = zerojax.partition({"w": jnp.ones((16, 4)), "b": jnp.ones(2)}, mesh, zerojax.ZeroConfig())
    >>> float(jax.jit(lambda g: global_norm(g, layout))({"w": jnp.ones((16, 4)), "b": jnp.zeros(2)}))
    8.0
    """
    pairs = [(x, p) for x, p in zip(layout.leaves_of(grads), layout.leaves, strict=True) if x is not None]
    sharded = [p.is_sharded and layout.stage >= 1 for _, p in pairs]
    specs = [p.data_spec if s else PartitionSpec() for (_, p), s in zip(pairs, sharded, strict=True)]
    joins = [all(entry is None for entry in p.spec) for _, p in pairs]

    def local(parts: list[jax.Array]) -> jax.Array:
        def squares(of_sharded: bool) -> jax.Array:
            chosen = [i for i, s in enumerate(sharded) if s is of_sharded]
            return _sum_of_squares([parts[i] for i in chosen], [joins[i] for i in chosen])

        of_shards = squares(True)
        return jnp.sqrt((lax.psum(of_shards, layout.config.axes) if any(sharded) else of_shards) + squares(False))

    return jax.shard_map(
        local, mesh=layout.mesh, in_specs=(specs,), out_specs=PartitionSpec(), axis_names=set(layout.config.axes),
        check_vma=False,
    )([x for x, _ in pairs])  # fmt: skip


def _sum_of_squares(parts: Sequence[jax.Array], joins: Sequence[bool]) -> jax.Array:
    """The sum over all elements; `joins`: which of the parts may be joined with others."""
    total, joined, held = jnp.zeros((), jnp.float32), {}, {}

    def add(x: jax.Array) -> None:
        nonlocal total
        wide = x.astype(wide_dtype(x.dtype))
        squares = jnp.real(wide) ** 2 + jnp.imag(wide) ** 2 if jnp.iscomplexobj(wide) else wide * wide
        total = total + jnp.sum(squares)

    for x, can_join in zip(parts, joins, strict=True):
        size = math.prod(x.shape)
        if not can_join or size > _SMALL:
            add(x)
            continue
        group = joined.setdefault(x.dtype, [])
        if held.get(x.dtype, 0) + size > _MOST_JOINED:
            add(lax.concatenate(lax.optimization_barrier(group), 0))
            group.clear()
            held[x.dtype] = 0
        group.append(x.reshape(-1))
        held[x.dtype] = held.get(x.dtype, 0) + size
    for group in joined.values():
        add(lax.concatenate(lax.optimization_barrier(group), 0))
    return total
