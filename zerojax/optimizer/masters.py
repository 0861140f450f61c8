"""Master weights: parameters in a narrow dtype have a wider copy, from which they are rounded after each update.

The state keeps the copies sharded (arXiv 1910.02054, section 3.1). Between updates a parameter is its master, rounded,
bit for bit; one that is not was edited by somebody, and then the parameter is what counts. Lists here have one entry
for each parameter leaf, None where there is no master.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.collectives.packed import gather_together
from zerojax.collectives.plain import plain_collectives
from zerojax.layout.layout import Layout
from zerojax.layout.mesh import other_axes, with_auto_mesh
from zerojax.layout.placement import pad
from zerojax.optimizer.stored import constrain, has_master, master_dtype, to_logical

Tree = Any


def masters_of(params: Tree, layout: Layout) -> list[Any]:
    """Wider copies of the parameters that need one, logical and constrained to shards; None for the others."""
    return [
        to_logical(x, p, layout).astype(master_dtype(p, layout)) if has_master(p, layout) else None
        for x, p in zip(jax.tree.leaves(params), layout.leaves, strict=True)
    ]


def optimizer_view(params: Tree, masters: list[Any], layout: Layout) -> Tree:
    """What the optimizer works on, logical and constrained to shards: the master copy where there is one."""
    leaves = jax.tree.leaves(params)
    return layout.treedef.unflatten([
        to_logical(x, p, layout, held=layout.stage >= 3) if m is None else m
        for x, m, p in zip(leaves, masters, layout.leaves, strict=True)
    ])  # fmt: skip


def current_masters(masters: list[Any], params: list[jax.Array], layout: Layout) -> list[Any]:
    """The master copies, with the parameter in place of those elements that were edited since the last update.

    A parameter is its master, rounded. Where it is not, somebody has loaded, pruned, averaged or reset it, and the next
    update starts from what he set. Decided for each element, on the shards: an edit of some leaves an element's
    neighbours their full precision, and no device has to ask another.
    """
    out = []
    for m, x, p in zip(masters, params, layout.leaves, strict=True):
        if m is not None:
            wide = to_logical(x, p, layout).astype(m.dtype)
            m = jnp.where(rounded(m, p.dtype).astype(m.dtype) != wide, wide, m)
        out.append(m)
    return out


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """`x.astype(dtype)` that stays so: the compiler likes to cancel a cast against one back, and to keep the excess."""
    if dtype == jnp.bfloat16 and x.dtype == jnp.float32:
        return lax.reduce_precision(x, 8, 7).astype(dtype)  # not for float16: it would flush what is subnormal there
    return lax.optimization_barrier(x.astype(dtype))


def finish_update(
    updates: Tree, masters: list[Any], params: list[jax.Array] | None, layout: Layout
) -> tuple[list[Any], list[Any]]:
    """Updates in the form of the parameters, and the new master copies; one entry for each parameter leaf.

    The parameter becomes its master, rounded. The difference is taken after the gather, so that the wire carries the
    narrow dtype and rounding never accumulates: the next step starts from the master again. Where float32 cannot
    express the difference (an update that takes a weight to a 2^16th of itself), the master follows the parameter, by
    less than the float32 spacing of the old weight: what differs from its master later was edited.
    """
    out: list[Any] = []
    new_masters: list[Any] = [None] * len(masters)
    pending = iter(jax.tree.leaves(updates))
    for i, (p, master) in enumerate(zip(layout.leaves, masters, strict=True)):
        if not p.trainable:
            out.append(None)
            continue
        u = next(pending)
        if master is None:
            out.append(constrain(u, p, layout) if p.padding or not p.is_sharded else u)  # else below
            continue
        assert params is not None
        wide = master.dtype
        new = constrain(optax.apply_updates(master, u), p, layout)
        narrow, old = rounded(new, p.dtype), to_logical(params[i], p, layout).astype(wide)
        # As integers: a cast cannot be moved across them, so that the wire carries the narrow dtype.
        out.append(lax.bitcast_convert_type(narrow, f"uint{8 * p.dtype.itemsize}"))
        applied = rounded(old + (narrow.astype(wide) - old), p.dtype).astype(wide)
        new_masters[i] = constrain(jnp.where(applied == narrow.astype(wide), new, applied), p, layout)
    moved = _in_param_form(out, layout)
    for i, (p, master) in enumerate(zip(layout.leaves, masters, strict=True)):
        if not p.trainable:
            moved[i] = jnp.zeros((), p.dtype)  # added to a frozen leaf, changes nothing and holds no memory
        elif master is not None:
            assert params is not None
            moved[i] = lax.bitcast_convert_type(moved[i], p.dtype).astype(master.dtype) - params[i].astype(master.dtype)
    return moved, new_masters


def _in_param_form(values: list[Any], layout: Layout) -> list[Any]:
    """Values of the parameters' logical shapes on their shards (None: none) in the form of the parameters."""
    if not layout.stage:
        return values
    pairs = list(zip(values, layout.leaves, strict=True))
    on_shards: list[Any] = [x if x is None else constrain(pad(x, p), p, layout) for x, p in pairs]
    if layout.stage >= 3:
        return on_shards
    moving = [i for i, (x, p) in enumerate(pairs) if x is not None and p.is_sharded]
    others = other_axes(layout.mesh, layout.config.axes)
    if moving:
        # Over "node" first, then inside the node: every byte enters a node once. The compiler's own gather is one ring
        # over all devices, whose neighbours are of different nodes.
        placed = [layout.leaves[i].with_dtype(on_shards[i].dtype) for i in moving]
        plain = plain_collectives(others)
        gathered = jax.shard_map(
            lambda shards: gather_together(shards, placed, plain, layout.config.listed_pack_bytes),
            mesh=with_auto_mesh(layout.full_sharding(placed[0])).mesh, in_specs=([p.data_spec for p in placed],),
            out_specs=PartitionSpec(), axis_names=set(layout.config.axes), check_vma=False,
        )([on_shards[i] for i in moving])  # fmt: skip
        for i, x in zip(moving, gathered, strict=True):
            on_shards[i] = x
    return [  # what has been gathered is full on each device already
        x if x is None or (p.is_sharded and not others)
        else jax.lax.with_sharding_constraint(x, with_auto_mesh(layout.full_sharding(p)))
        for x, p in zip(on_shards, layout.leaves, strict=True)
    ]  # fmt: skip
