"""Where the leaves of an optimizer's state live, and between their stored form and the one the optimizer works on.

Any optax transformation is asked only for the *shapes* of its state. Each state leaf finds the parameter it belongs to
by key path (the longest suffix of its path that is a parameter's path); a leaf of the parameter's own shape is placed
like the parameter, any other by its own shape, because the rows of a factored second moment or a history of updates
have other dims than their parameter. Moments in blocks (`zerojax.optimizer.moments`) go with their parameter's shards.

The optimizer sees leaves of logical shape, constrained to their shards, in the master dtype (arXiv 1910.02054, section
3.1: parameters in a narrow dtype have a wider master copy, from which they are rounded after each update).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from zerojax import _compat
from zerojax.layout.layout import Layout, drop_weak_type
from zerojax.layout.mesh import data_size, nontrivial_axes
from zerojax.layout.notices import ZeroNotice
from zerojax.layout.placement import Placement, pad, place, unpad
from zerojax.optimizer.moments import BlockMoment

Tree = Any


def state_placements(init: Callable[[Tree], Tree], layout: Layout) -> Tree:
    """One Placement per leaf of `init(params)`, as a pytree of the state's structure.

    Args:
        init: the `init` of an optax transformation; called on shapes only.
        layout: the layout of the parameters.

    >>> import optax, zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> layout = zerojax.partition({"w": jnp.ones((16, 4))}, mesh, zerojax.ZeroConfig(min_shard_size=0))
    >>> placements = state_placements(optax.adam(1e-3).init, layout)
    >>> placements[0].mu["w"].dim, placements[0].count.reason
    (0, 'scalar')
    """
    shapes = jax.eval_shape(init, trained_tree(layout, master_shapes(layout)))
    paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(
        shapes, is_leaf=lambda x: isinstance(x, BlockMoment)
    )
    owners = _owners(layout)

    def placed(path: tuple[Any, ...], leaf: Any) -> Any:
        if isinstance(leaf, BlockMoment):
            return _place_blocks(path, leaf, _owner(path, owners), layout)
        return _place_leaf(path, leaf, owners, layout)

    return treedef.unflatten([placed(path, leaf) for path, leaf in paths_and_leaves])


def master_shapes(layout: Layout) -> Tree:
    """Shapes of what the optimizer works on: the parameters, in the master dtype where that is wider."""
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, master_dtype(p, layout)), layout.placements)


def master_dtype(placement: Placement, layout: Layout) -> Any:
    """The dtype in which the optimizer sees a parameter."""
    master = layout.config.master_dtype
    if master is None or not has_master(placement, layout):
        return placement.dtype
    return jnp.dtype(master)


def has_master(placement: Placement, layout: Layout) -> bool:
    """Whether the optimizer state keeps a wider copy of a parameter."""
    master = layout.config.master_dtype
    floating = jnp.issubdtype(placement.dtype, jnp.floating)
    return bool(master and placement.trainable and floating and placement.dtype.itemsize < jnp.dtype(master).itemsize)


def trained_tree(layout: Layout, tree: Tree) -> Tree:
    """The tree with None in place of every leaf that is not trained: what the optimizer gets to see."""
    leaves = [x if p.trainable else None for x, p in zip(jax.tree.leaves(tree), layout.leaves, strict=True)]
    return layout.treedef.unflatten(leaves)


def _owners(layout: Layout) -> dict[tuple[Any, ...], Placement]:
    paths, _ = jax.tree_util.tree_flatten_with_path(layout.placements)
    return {tuple(path): placement for path, placement in paths if placement.trainable}


def _place_leaf(
    path: tuple[Any, ...], leaf: Any, owners: dict[tuple[Any, ...], Placement], layout: Layout
) -> Placement:
    name = jax.tree_util.keystr(path)
    if _compat.is_prng_key(leaf):  # noise of the optimizer: the same draws on every device, each keeping its part
        shape = tuple(leaf.shape)
        axes = nontrivial_axes(layout.mesh, layout.config.axes)
        return Placement(name, shape, leaf.dtype, None, axes, layout.num_shards, 0, "PRNG keys", (None,) * len(shape))
    for start in range(len(path) + 1):
        owner = owners.get(tuple(path[start:]))
        if owner is not None and owner.shape == tuple(leaf.shape):
            return Placement(
                name, owner.shape, jnp.dtype(leaf.dtype), owner.dim, owner.axes, owner.num_shards, owner.padding,
                f"like params{owner.path}" if owner.is_sharded else owner.reason, owner.spec,
            )  # fmt: skip
    return _place_by_shape(name, leaf, layout)


def _place_by_shape(name: str, leaf: Any, layout: Layout) -> Placement:
    return place(
        name,
        tuple(leaf.shape),
        leaf.dtype,
        axes=nontrivial_axes(layout.mesh, layout.config.axes),
        num_shards=layout.num_shards,
        min_shard_size=max(layout.config.min_shard_size, 2),
    )


def _owner(path: tuple[Any, ...], owners: dict[tuple[Any, ...], Placement]) -> Placement:
    found = [owners[tuple(path[start:])] for start in range(len(path) + 1) if tuple(path[start:]) in owners]
    assert found, f"{jax.tree_util.keystr(path)} is a moment of no parameter"
    return found[0]


def _place_blocks(path: tuple[Any, ...], moment: BlockMoment, owner: Placement, layout: Layout) -> BlockMoment:
    """Levels and scales with the shard of the parameter that they belong to."""
    name, size = jax.tree_util.keystr(path), moment.qvalue.shape[-1]
    others = tuple(d for d in range(len(owner.shape)) if d != moment.dim)
    along, split = owner.spec[moment.dim], owner.dim == moment.dim
    names = () if along is None else (along,) if isinstance(along, str) else tuple(along)
    parts = data_size(layout.mesh, names) * (owner.num_shards if split else 1)
    aligned = moment.extent % (size * parts) == 0
    if parts > 1 and not aligned:
        warnings.warn(
            f"{name}: blocks of {size} lie along dim {moment.dim} of params{owner.path} {owner.shape}, whose {parts} "
            "parts do not hold whole blocks: each update moves these moments. Another block_size, or another dim that "
            "divides by the number of devices, avoids it",
            ZeroNotice,
            stacklevel=2,
        )
        if split:
            return BlockMoment(
                _place_by_shape(f"{name}.qvalue", moment.qvalue, layout),
                _place_by_shape(f"{name}.scale", moment.scale, layout),
                moment.dim, moment.extent,
            )  # fmt: skip
    spec, dim, padding = (*(owner.spec[d] for d in others), along if aligned else None), None, 0
    if owner.dim is not None:
        dim, padding = (len(others), 0) if split else (others.index(owner.dim), owner.padding)

    def like_owner(part: str, leaf: Any, more: tuple[None, ...]) -> Placement:
        reason = f"like params{owner.path}" if owner.is_sharded else owner.reason
        return Placement(
            f"{name}.{part}", tuple(leaf.shape), jnp.dtype(leaf.dtype), dim, owner.axes, owner.num_shards, padding,
            reason, (*spec, *more),
        )  # fmt: skip

    return BlockMoment(
        like_owner("qvalue", moment.qvalue, (None,)), like_owner("scale", moment.scale, ()), moment.dim, moment.extent
    )



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
    return jax.lax.with_sharding_constraint(x, auto_sharding(layout.full_sharding(p))) if layout.stage else x


def optimizer_view(params: Tree, masters: list[Any], layout: Layout) -> Tree:
    """What the optimizer works on, logical and constrained to shards: the master copy where there is one."""
    leaves = jax.tree.leaves(params)
    return layout.treedef.unflatten([
        to_logical(x, p, layout) if m is None else m for x, m, p in zip(leaves, masters, layout.leaves, strict=True)
    ])  # fmt: skip


def masters_of(params: Tree, layout: Layout) -> list[Any]:
    """Wider copies of the parameters that need one, logical and constrained to shards; None for the others."""
    return [
        to_logical(x, p, layout).astype(master_dtype(p, layout)) if has_master(p, layout) else None
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


def to_logical(x: jax.Array, p: Placement, layout: Layout) -> jax.Array:
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
        return layout.treedef.unflatten([to_logical(x, p, layout) for x, p in pairs])

    return {name: logical(value) for name, value in extra.items()}


def enter_state(state: Tree, of_state: Tree, layout: Layout) -> list[jax.Array]:
    """The leaves of a state of logical shapes in stored form."""
    leaves = jax.tree.leaves(state)
    return [to_stored(drop_weak_type(x), p, layout) for x, p in zip(leaves, jax.tree.leaves(of_state), strict=True)]


def to_stored(x: jax.Array, p: Placement, layout: Layout) -> jax.Array:
    """From logical to stored form, sharded from stage 1 on."""
    return _constrain(pad(x, p) if layout.stage else x, p, layout)


def _constrain(x: Any, p: Placement, layout: Layout) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, auto_sharding(state_sharding_of(p, layout)))


def state_sharding_of(p: Placement, layout: Layout) -> NamedSharding:
    """Sharding of a leaf of the state or of a gradient: over the data axes from stage 1 on."""
    return layout.shard_sharding(p) if layout.stage >= 1 else layout.full_sharding(p)


def auto_sharding(sharding: NamedSharding) -> NamedSharding:
    """The sharding as a constraint inside `with_auto_axes`, which may name only axes that the compiler manages."""
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh), "a layout's shardings name real devices"
    if not _compat.has_explicit_axes(mesh):
        return sharding
    return NamedSharding(Mesh(mesh.devices, mesh.axis_names), sharding.spec)
