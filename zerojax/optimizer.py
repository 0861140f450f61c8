"""`zero`: any optax transformation with its state sharded over the data axes, as a drop-in replacement.

The wrapped transformation runs under `jit` on global arrays of *logical* shape, each constrained to its shards, so that
norms, factored means and trust ratios are those of the whole parameter whatever the padding; the compiler keeps uneven
slices local. Gradients may come whole (the user's own `jax.grad`: the constraint makes the compiler reduce-scatter them
where they arise) or sharded (`zerojax.value_and_grad`). Parameters stored in a narrow dtype get a master copy in the
state (arXiv 1910.02054, section 3.1). Knows nothing of losses or of collectives.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax.layout import Layout
from zerojax.mesh import automatic
from zerojax.placement import Placement, pad, unpad
from zerojax.state_sharding import has_master, master_dtype, state_placements, trained_tree

Tree = Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["inner", "master"], meta_fields=["layout_id"])
@dataclasses.dataclass(frozen=True)
class ZeroState:
    """State of `zero`, in stored form.

    Attributes:
        inner: state of the wrapped transformation, every large leaf sharded.
        master: wider copies of the parameters that have one, None for the others; sharded.
        layout_id: fingerprint of the layout the state belongs to, part of the tree's structure.
    """

    inner: Tree
    master: Tree
    layout_id: str


class ShardedTransformation(optax.GradientTransformationExtraArgs):
    """What `zero` returns: an optax transformation that also tells where the leaves of its state live.

    Attributes:
        state_placements: () -> the `ZeroState` of this transformation with a `Placement` for each leaf.
    """

    state_placements: Callable[[], ZeroState]


def zero(tx: optax.GradientTransformation, layout: Layout) -> ShardedTransformation:
    """Shards the state of an optax transformation according to a layout (ZeRO stages 1 to 3).

    Args:
        tx: any optax transformation.
        layout: the layout of the parameters.

    Returns:
        A transformation. `init(params)` takes parameters in stored form and creates the state in sharded form, no
        device ever holding a whole leaf of it; from `jax.ShapeDtypeStruct`s (`layout.param_shapes()`) it makes those of the
        state, with their shardings. `update(grads, state, params, **extra)` takes whole or sharded gradients
        and returns updates in the form of the parameters, for `optax.apply_updates`. At stages 1 and 2 the updates are
        all-gathered, in the dtype of the parameters where there is a master copy. At stage 0 nothing is sharded.

    Raises:
        ValueError: parameters, gradients or a state that are not of this layout.

    >>> import zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> layout = zerojax.partition({"w": jnp.ones((16, 4))}, mesh, zerojax.ZeroConfig(stage=1, min_shard_size=0))
    >>> params = layout.shard({"w": jnp.ones((16, 4))})
    >>> state = zero(optax.adam(1e-3), layout).init(params)
    >>> state.inner[0].mu["w"].addressable_shards[0].data.shape
    (2, 4)
    """
    wrapped = optax.with_extra_args_support(tx)
    layout_id = _fingerprint(layout)

    @functools.cache
    def placements() -> Tree:
        return state_placements(wrapped.init, layout)

    def init(params: Tree) -> ZeroState:
        layout.check(params, stored=True)
        of_state = placements()
        if all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
            return _abstract_state(of_state, layout, layout_id)

        def build(leaves: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            params = layout.treedef.unflatten(leaves)
            masters = _masters(params, layout)
            inner = wrapped.init(trained_tree(layout, _optimized(params, masters, layout)))
            return _enter(inner, of_state, layout), [_hold(x, p, layout) for x, p in _master_pairs(masters, layout)]

        shardings = (
            [_sharding(p, layout) for p in jax.tree.leaves(of_state)],
            [_sharding(p, layout) for p in layout.leaves if has_master(p, layout)],
        )
        build = automatic(build, layout.mesh, shardings)
        inner, masters = jax.jit(build, out_shardings=shardings)(jax.tree.leaves(params))
        return ZeroState(jax.tree.unflatten(jax.tree.structure(of_state), inner), _spread(masters, layout), layout_id)

    def compute(static: dict[str, Any]) -> Callable[..., Any]:
        """The update on lists of leaves in stored form; `static` are the extra arguments that are no arrays."""
        of_state = placements()

        def step(grad_leaves: list[Any], state: ZeroState, param_leaves: Any, extra: Any) -> tuple[list[Any], ...]:
            grads = layout.treedef.unflatten([
                None if not p.trainable else _leave(g, p, layout).astype(master_dtype(p, layout))
                for g, p in zip(grad_leaves, layout.leaves, strict=True)
            ])  # fmt: skip
            masters = [None if m is None else _leave(m, p, layout) for m, p in _all_masters(state.master, layout)]
            old = None if param_leaves is None else layout.treedef.unflatten(param_leaves)
            seen = None if old is None else trained_tree(layout, _optimized(old, masters, layout))
            inner = jax.tree.map(lambda x, p: _leave(x, p, layout), state.inner, of_state)
            updates, new_inner = wrapped.update(grads, inner, seen, **extra, **static)
            updates, new_masters = _finish(updates, masters, param_leaves, layout)
            return (
                updates,
                _enter(new_inner, of_state, layout),
                [_hold(m, p, layout) for m, p in _master_pairs(new_masters, layout)],
            )

        shardings = (
            [layout.param_sharding(p) if p.trainable else NamedSharding(layout.mesh, PartitionSpec())
             for p in layout.leaves],
            [_sharding(p, layout) for p in jax.tree.leaves(of_state)],
            [_sharding(p, layout) for p in layout.leaves if has_master(p, layout)],
        )  # fmt: skip
        return automatic(step, layout.mesh, shardings)

    @functools.cache
    def jitted() -> Callable[..., Any]:
        return jax.jit(compute({}))

    def update(
        grads: Tree, state: ZeroState, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, ZeroState]:
        _check_state(state, layout_id, layout)
        of_state = placements()
        if jax.tree.structure(state.inner) != jax.tree.structure(of_state):
            raise ValueError(
                "the optimizer state is of another optimizer than the one wrapped here (the structures of their states "
                "differ); create it with zero(tx, layout).init(params) of this optimizer"
            )
        if params is None and state.master is not None and any(has_master(p, layout) for p in layout.leaves):
            raise ValueError("zero(...).update needs params (third argument) when there are master weights")
        if params is not None:
            layout.check(params, stored=True)
        layout.check(_like_params(grads, layout), stored=None, what="grads")
        param_leaves = None if params is None else jax.tree.leaves(params)

        grad_leaves = jax.tree.leaves(grads, is_leaf=lambda x: x is None)
        arrays = {k: v for k, v in extra.items() if not any(callable(x) for x in jax.tree.leaves(v))}
        static = {k: v for k, v in extra.items() if k not in arrays}
        step = jitted() if not static else jax.jit(compute(static))
        updates, inner, masters = step(grad_leaves, state, param_leaves, arrays)
        return (
            layout.treedef.unflatten(updates),
            ZeroState(jax.tree.unflatten(jax.tree.structure(of_state), inner), _spread(masters, layout), layout_id),
        )

    def placements_of_state() -> ZeroState:
        masters = [p.with_dtype(master_dtype(p, layout)) for p in layout.leaves if has_master(p, layout)]
        return ZeroState(placements(), _spread(masters, layout), layout_id)

    out = ShardedTransformation(init, update)
    out.state_placements = placements_of_state
    return out


def placements_of_state(tx: optax.GradientTransformation, layout: Layout) -> ZeroState:
    """A `Placement` for each leaf of an optimizer's state, for readers: of a `zero(...)`, or of what it would wrap.

    Raises:
        ValueError: `tx` was made by `zero` for another layout, or holds a `zero` inside a chain.

    >>> import zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> layout = zerojax.partition({"w": jnp.ones((16, 4))}, mesh, zerojax.ZeroConfig(min_shard_size=0))
    >>> placements_of_state(optax.adam(1e-3), layout).inner[0].mu["w"].shard_shape
    (2, 4)
    """
    if isinstance(tx, ShardedTransformation):
        found = tx.state_placements()
        if found.layout_id != _fingerprint(layout):
            raise ValueError(
                f"the optimizer was made by zerojax.zero for another layout than {dict(layout.mesh.shape)}, stage "
                f"{layout.stage}: pass zero(tx, layout) of this layout"
            )
        return found
    inside = jax.eval_shape(tx.init, trained_tree(layout, layout.param_shapes()))
    if any(isinstance(x, ZeroState) for x in jax.tree.leaves(inside, is_leaf=lambda x: isinstance(x, ZeroState))):
        raise ValueError("zerojax.zero must be outermost: zero(optax.chain(...), layout), not zero inside a chain")
    return zero(tx, layout).state_placements()


def _abstract_state(of_state: Tree, layout: Layout, layout_id: str) -> ZeroState:
    def shape(p: Placement, dtype: Any) -> jax.ShapeDtypeStruct:
        held = p.padded_shape if layout.stage else p.shape
        return jax.ShapeDtypeStruct(held, dtype, sharding=_sharding(p, layout))

    inner = jax.tree.map(lambda p: shape(p, p.dtype), of_state)
    masters = [shape(p, master_dtype(p, layout)) for p in layout.leaves if has_master(p, layout)]
    return ZeroState(inner, _spread(masters, layout), layout_id)


def _finish(
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
    return jax.lax.with_sharding_constraint(x, _automatic_sharding(layout.full_sharding(p))) if layout.stage else x


def _optimized(params: Tree, masters: list[Any], layout: Layout) -> Tree:
    """What the optimizer works on, logical and constrained to shards: the master copy where there is one."""
    leaves = jax.tree.leaves(params)
    return layout.treedef.unflatten([
        _leave(x, p, layout) if m is None else m for x, m, p in zip(leaves, masters, layout.leaves, strict=True)
    ])  # fmt: skip


def _masters(params: Tree, layout: Layout) -> list[Any]:
    return [
        _leave(x, p, layout).astype(master_dtype(p, layout)) if has_master(p, layout) else None
        for x, p in zip(jax.tree.leaves(params), layout.leaves, strict=True)
    ]


def _master_pairs(masters: list[Any], layout: Layout) -> list[tuple[Any, Placement]]:
    return [(m, p) for m, p in zip(masters, layout.leaves, strict=True) if m is not None]


def _all_masters(master: Tree, layout: Layout) -> list[tuple[Any, Placement]]:
    leaves = jax.tree.leaves(master, is_leaf=lambda x: x is None) if master is not None else [None] * len(layout.leaves)
    return list(zip(leaves, layout.leaves, strict=True))


def _spread(masters: list[Any], layout: Layout) -> Tree:
    if not masters:
        return None
    pending = iter(masters)
    return layout.treedef.unflatten([next(pending) if has_master(p, layout) else None for p in layout.leaves])


def _leave(x: jax.Array, p: Placement, layout: Layout) -> jax.Array:
    """From stored or whole form to the logical shape, constrained to the shards."""
    return _constrain(unpad(x, p), p, layout)


def _enter(state: Tree, of_state: Tree, layout: Layout) -> list[jax.Array]:
    leaves = jax.tree.leaves(state)
    return [_hold(x, p, layout) for x, p in zip(leaves, jax.tree.leaves(of_state), strict=True)]


def _hold(x: jax.Array, p: Placement, layout: Layout) -> jax.Array:
    """From logical to stored form, sharded from stage 1 on."""
    return _constrain(pad(x, p) if layout.stage else x, p, layout)


def _constrain(x: jax.Array, p: Placement, layout: Layout) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, _automatic_sharding(_sharding(p, layout)))


def _sharding(p: Placement, layout: Layout) -> NamedSharding:
    return layout.shard_sharding(p) if layout.stage >= 1 else layout.full_sharding(p)


def _automatic_sharding(sharding: NamedSharding) -> NamedSharding:
    """The sharding as a constraint inside `automatic`, which may name only axes that the compiler manages."""
    if not _compat.has_explicit_axes(sharding.mesh):
        return sharding
    return NamedSharding(Mesh(sharding.mesh.devices, sharding.mesh.axis_names), sharding.spec)


def _like_params(grads: Tree, layout: Layout) -> Tree:
    """Gradients with a stand-in for each leaf that is not trained, whose gradient may be absent."""
    leaves = jax.tree.leaves(grads, is_leaf=lambda x: x is None)
    if len(leaves) != len(layout.leaves):
        return grads  # the structure check names the difference
    full = [jax.ShapeDtypeStruct(p.shape, p.dtype) if not p.trainable else g
            for g, p in zip(leaves, layout.leaves, strict=True)]  # fmt: skip
    return layout.treedef.unflatten(full)


def _check_state(state: Any, layout_id: str, layout: Layout) -> None:
    if not isinstance(state, ZeroState):
        raise ValueError(
            f"zero(...).update got a state of type {type(state).__name__}, not the ZeroState that zero(...).init gives"
        )
    if state.layout_id != layout_id:
        raise ValueError(
            f"the optimizer state belongs to another layout than {dict(layout.mesh.shape)}, stage {layout.stage} "
            "(other mesh shape, stage, thresholds or model); create it with zero(tx, layout).init(params) of this layout"
        )


def _fingerprint(layout: Layout) -> str:
    """A short hash of what fixes the stored form: mesh shape, stage, dtypes and every placement."""
    facts = (tuple(layout.mesh.shape.items()), layout.stage, layout.config.master_dtype, layout.leaves)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
