"""Where the leaves of an optimizer's state live, and between their stored form and the one the optimizer works on.

Any optax transformation is asked only for the *shapes* of its state. Each state leaf finds the parameter it belongs to
by key path (the longest suffix of its path that is a parameter's path); a leaf of the parameter's own shape is placed
like the parameter, any other by its own shape, because the rows of a factored second moment or a history of updates
have other dims than their parameter. Moments in blocks (`zerojax.optimizer.moments`) go with their parameter's shards.

The optimizer sees leaves of logical shape, constrained to their shards, in the master dtype (see
`zerojax.optimizer.masters`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from zerojax import _compat
from zerojax.layout.layout import Layout, drop_weak_type
from zerojax.layout.mesh import data_size, nontrivial_axes, with_auto_mesh
from zerojax.layout.notices import ZeroNotice
from zerojax.layout.optimizer_form import in_optimizer
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


def to_logical(x: jax.Array, p: Placement, layout: Layout, *, held: bool = False) -> jax.Array:
    """From stored or full form to the logical shape, constrained to the shards.

    Args:
        x: the leaf.
        p: its placement.
        layout: the layout of the parameters.
        held: it is on its shards already, as the last update left it: without padding to cut off, nothing has to be
            said again to the compiler, which reads every constraint of every leaf several times.
    """
    logical = unpad(x, p)
    return x if held and logical is x else constrain(logical, p, layout)


def logical_arguments(extra: dict[str, Any], params: Tree, layout: Layout) -> dict[str, Any]:
    """Further arguments of an update as the optimizer takes them.

    Those of the parameters' structure and shapes become logical, like gradients. Functions (a gradient or a value that
    the optimizer asks for again, as SAM and line searches do) are called with what the optimizer works on, parameters
    of logical shape, and with those that are not trained in their places; what they return becomes logical too. In them
    `value_and_grad` and `apply` take and return that form.

    Args:
        extra: the arguments by name.
        params: the parameters in stored form, or None.
        layout: the layout.
    """

    def logical(value: Any) -> Any:
        if jax.tree.structure(value) not in (layout.treedef, trained):
            return value
        pairs = list(zip(layout.leaves_of(value), layout.leaves, strict=True))
        if any(x is not None and jnp.shape(x) not in (p.shape, p.padded_shape) for x, p in pairs):
            return value
        return layout.treedef.unflatten([
            None if x is None else _in_master_dtype(to_logical(x, p, layout), p, layout) for x, p in pairs
        ])  # fmt: skip

    def completed(value: Any) -> Any:
        if params is None or jax.tree.structure(value) != trained:
            return value
        pairs = zip(layout.leaves_of(value), jax.tree.leaves(params), layout.leaves, strict=True)
        return layout.treedef.unflatten([x if p.trainable else unpad(kept, p) for x, kept, p in pairs])

    def called(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            with in_optimizer(layout):
                out = fn(*map(completed, args), **{name: completed(x) for name, x in kwargs.items()})
            return jax.tree.map(logical, out, is_leaf=lambda x: jax.tree.structure(x) in (layout.treedef, trained))

        return run

    trained = jax.tree.structure(trained_tree(layout, layout.placements))
    return {name: called(value) if callable(value) else logical(value) for name, value in extra.items()}


def _in_master_dtype(x: jax.Array, p: Placement, layout: Layout) -> jax.Array:
    return x.astype(master_dtype(p, layout)) if x.dtype == p.dtype else x


def enter_state(state: Tree, of_state: Tree, layout: Layout) -> list[jax.Array]:
    """The leaves of a state of logical shapes in stored form."""
    leaves = jax.tree.leaves(state)
    return [to_stored(drop_weak_type(x), p, layout) for x, p in zip(leaves, jax.tree.leaves(of_state), strict=True)]


def to_stored(x: jax.Array, p: Placement, layout: Layout) -> jax.Array:
    """From logical to stored form, sharded from stage 1 on."""
    return constrain(pad(x, p) if layout.stage else x, p, layout)


def constrain(x: Any, p: Placement, layout: Layout) -> jax.Array:
    """Keeps a leaf of the state or of an update, logical or padded, on its shards."""
    return jax.lax.with_sharding_constraint(x, with_auto_mesh(state_sharding_of(p, layout)))


def state_sharding_of(p: Placement, layout: Layout) -> NamedSharding:
    """Sharding of a leaf of the state or of a gradient: over the data axes from stage 1 on."""
    return layout.shard_sharding(p) if layout.stage >= 1 else layout.full_sharding(p)
