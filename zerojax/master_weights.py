"""Between the stored form of parameters and optimizer state and the logical form in which the optimizer works.

An optimizer sees leaves of logical shape, constrained to their shards, in the master dtype (arXiv 1910.02054, section
3.1: parameters in a narrow dtype have a wider master copy, from which they are rounded after each update). Runs inside
`jit` on global arrays; knows nothing of any particular optimizer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from zerojax import _compat
from zerojax.layout import Layout, strong
from zerojax.placement import Placement, pad, unpad
from zerojax.state_sharding import has_master, master_dtype

Tree = Any


def finish_update(
    updates: Tree, masters: list[Any], param_leaves: list[jax.Array] | None, layout: Layout
) -> tuple[list[Any], list[Any]]:
    """Updates in the form of the parameters, and the new master copies."""
    out: list[Any] = []
    new_masters: list[Any] = []
    pending = iter(jax.tree.leaves(updates))
    for i, (p, master) in enumerate(zip(layout.leaves, masters, strict=True)):
        if not p.trainable:
            out.append(jnp.zeros((), p.dtype))  # added to a frozen leaf, changes nothing and holds no memory
            new_masters.append(None)
            continue
        u = next(pending)
        if master is None:
            new_masters.append(None)
            out.append(_to_param_form(_constrain(u, p, layout), p, layout))
            continue
        assert param_leaves is not None
        new = _constrain(optax.apply_updates(master, u), p, layout)
        new_masters.append(new)
        # The parameter becomes its master, rounded. The difference is taken after the gather, so that the wire carries
        # the narrow dtype and rounding never accumulates: the next step starts from the master again.
        narrow = _to_param_form(new.astype(p.dtype), p, layout)
        wide = jnp.dtype(layout.config.master_dtype)
        out.append(narrow.astype(wide) - param_leaves[i].astype(wide))
    return out, new_masters


def _to_param_form(x: jax.Array, p: Placement, layout: Layout) -> jax.Array:
    if layout.stage >= 3:
        return _constrain(pad(x, p), p, layout)
    return jax.lax.with_sharding_constraint(x, automatic_sharding(layout.full_sharding(p))) if layout.stage else x


def optimized(params: Tree, masters: list[Any], layout: Layout) -> Tree:
    """What the optimizer works on, logical and constrained to shards: the master copy where there is one."""
    leaves = jax.tree.leaves(params)
    return layout.treedef.unflatten([
        leave(x, p, layout) if m is None else m for x, m, p in zip(leaves, masters, layout.leaves, strict=True)
    ])  # fmt: skip


def masters_of(params: Tree, layout: Layout) -> list[Any]:
    """Wider copies of the parameters that need one, logical and constrained to shards; None for the others."""
    return [
        leave(x, p, layout).astype(master_dtype(p, layout)) if has_master(p, layout) else None
        for x, p in zip(jax.tree.leaves(params), layout.leaves, strict=True)
    ]


def master_pairs(masters: list[Any], layout: Layout) -> list[tuple[Any, Placement]]:
    """The master copies that exist, each with its placement."""
    return [(m, p) for m, p in zip(masters, layout.leaves, strict=True) if m is not None]


def all_masters(master: Tree, layout: Layout) -> list[tuple[Any, Placement]]:
    """One entry per parameter leaf of a tree of master copies, None where there is none."""
    leaves = layout.leaves_of(master) if master is not None else [None] * len(layout.leaves)
    return list(zip(leaves, layout.leaves, strict=True))


def spread_masters(masters: list[Any], layout: Layout) -> Tree:
    """The master copies that exist as a tree of the parameters' structure; None when there are none at all."""
    if not masters:
        return None
    pending = iter(masters)
    return layout.treedef.unflatten([next(pending) if has_master(p, layout) else None for p in layout.leaves])


def leave(x: jax.Array, p: Placement, layout: Layout) -> jax.Array:
    """From stored or whole form to the logical shape, constrained to the shards."""
    return _constrain(unpad(x, p), p, layout)


def logical_arguments(extra: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Further arguments of an update; those of the parameters' structure and shapes become logical, like gradients."""

    def logical(value: Any) -> Any:
        if jax.tree.structure(value) != layout.treedef:
            return value
        pairs = list(zip(jax.tree.leaves(value), layout.leaves, strict=True))
        if any(jnp.shape(x) not in (p.shape, p.padded_shape) for x, p in pairs):
            return value
        return layout.treedef.unflatten([leave(x, p, layout) for x, p in pairs])

    return {name: logical(value) for name, value in extra.items()}


def enter_state(state: Tree, of_state: Tree, layout: Layout) -> list[jax.Array]:
    """The leaves of a state of logical shapes in stored form."""
    leaves = jax.tree.leaves(state)
    return [hold(strong(x), p, layout) for x, p in zip(leaves, jax.tree.leaves(of_state), strict=True)]


def hold(x: jax.Array, p: Placement, layout: Layout) -> jax.Array:
    """From logical to stored form, sharded from stage 1 on."""
    return _constrain(pad(x, p) if layout.stage else x, p, layout)


def _constrain(x: Any, p: Placement, layout: Layout) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, automatic_sharding(state_sharding_of(p, layout)))


def state_sharding_of(p: Placement, layout: Layout) -> NamedSharding:
    """Sharding of a leaf of the state or of a gradient: over the data axes from stage 1 on."""
    return layout.shard_sharding(p) if layout.stage >= 1 else layout.full_sharding(p)


def automatic_sharding(sharding: NamedSharding) -> NamedSharding:
    """The sharding as a constraint inside `automatic`, which may name only axes that the compiler manages."""
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh), "a layout's shardings name real devices"
    if not _compat.has_explicit_axes(mesh):
        return sharding
    return NamedSharding(Mesh(mesh.devices, mesh.axis_names), sharding.spec)
