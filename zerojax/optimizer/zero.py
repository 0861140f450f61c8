"""`zero`: any optax transformation with its state sharded over the data axes, as a drop-in replacement.

The wrapped transformation runs under `jit` on global arrays of *logical* shape, each constrained to its shards, so that
norms, factored means and trust ratios are those of the full parameter whatever the padding; the compiler keeps uneven
slices local. Gradients may come full (the user's own `jax.grad`: the constraint makes the compiler reduce-scatter them
where they arise) or sharded (`zerojax.value_and_grad`). Parameters stored in a narrow dtype get a master copy in the
state (arXiv 1910.02054, section 3.1). A transformation that does more than map gradients to updates (expects
per-example gradients, grows its state in the first update) is refused by its shapes before anything is computed.
Every transformation of optax and optax.contrib 0.2.8 is tried in tests/optimizer/test_optimizer_battery.py; refused are
those that take per-example gradients, `measure_with_ema` alone, and `monitor`.
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
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.layout.facts import check_replicas
from zerojax.layout.layout import Layout
from zerojax.layout.mesh import with_auto_axes
from zerojax.layout.placement import Placement
from zerojax.optimizer.masters import current_masters, finish_update, masters_of, optimizer_view
from zerojax.optimizer.matrices import with_full_matrices
from zerojax.optimizer.stored import (
    enter_state,
    has_master,
    logical_arguments,
    master_dtype,
    state_placements,
    state_sharding_of,
    to_logical,
    to_stored,
    trained_tree,
)

Tree = Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["inner", "master"], meta_fields=["layout_id"])
@dataclasses.dataclass(frozen=True)
class ZeroState:
    """State of `zero`, in stored form.

    Attributes:
        inner: state of the wrapped transformation, every large leaf sharded.
        master: wider copies of the parameters that have one, None for the others; sharded.
        layout_id: fingerprint of the layout the state belongs to, part of the tree's structure.

    >>> import jax.numpy as jnp
    >>> import zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> layout = zerojax.partition({"w": jnp.ones((16, 4), jnp.bfloat16)}, mesh, zerojax.ZeroConfig(min_shard_size=0))
    >>> zero(optax.sgd(0.1), layout).init(layout.param_shapes()).master["w"].dtype.name
    'float32'
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
        tx: any optax transformation. Matrix products in it (Muon, GaLore) work on full matrices: see
            `zerojax.optimizer.matrices`.
        layout: the layout of the parameters.

    Returns:
        A transformation. `init(params)` takes parameters in stored form and creates the state in sharded form, no
        device ever holding a full leaf of it; from `jax.ShapeDtypeStruct`s (`layout.param_shapes()`) it makes those of
        the state, with their shardings. `update(grads, state, params, **extra)` takes full or sharded gradients
        and returns updates in the form of the parameters, for `optax.apply_updates`. At stages 1 and 2 the updates are
        all-gathered, in the dtype of the parameters where there is a master copy. At stage 0 nothing is sharded.

        A parameter that has a master copy is its master, rounded. Elements that are not were edited (loaded, pruned,
        averaged, reset) and win: the update starts from them. Apply updates with `optax.apply_updates`.

        Functions among `extra` (SAM's `grad_fn`, a line search's `value_fn`) are called with parameters as the
        optimizer sees them, of logical shape and in the master dtype; `value_and_grad` and `apply` take these there.

    Raises:
        ValueError: parameters, gradients or a state that are not of this layout; a transformation that does not map
            gradients to updates, or whose state changes its shapes.

    >>> import jax.numpy as jnp
    >>> import zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> layout = zerojax.partition({"w": jnp.ones((16, 4))}, mesh, zerojax.ZeroConfig(stage=1, min_shard_size=0))
    >>> params = layout.shard({"w": jnp.ones((16, 4))})
    >>> state = zero(optax.adam(1e-3), layout).init(params)
    >>> state.inner[0].mu["w"].addressable_shards[0].data.shape
    (2, 4)
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"zero(tx, layout): layout must come from zerojax.partition, got {type(layout).__name__}")
    wrapped = optax.with_extra_args_support(tx)
    layout_id = _fingerprint(layout)

    @functools.cache
    def placements() -> Tree:
        return state_placements(wrapped.init, layout)

    def init(params: Tree) -> ZeroState:
        _check_outermost(params, layout)
        layout.check(params, stored=True)
        of_state = placements()
        leaves = jax.tree.leaves(params)
        check_replicas(params, layout, "zero(tx, layout).init")
        if leaves and all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            return _abstract_state(of_state, layout, layout_id)

        def build(leaves: list[jax.Array]) -> tuple[list[jax.Array], list[Any]]:
            params = layout.treedef.unflatten(leaves)
            masters = masters_of(params, layout)
            inner = wrapped.init(trained_tree(layout, optimizer_view(params, masters, layout)))
            return enter_state(inner, of_state, layout), held(masters)

        build = with_auto_axes(build, layout.mesh, shardings())
        return state_of(*jax.jit(build, out_shardings=shardings())(leaves))

    def held(masters: list[Any]) -> list[Any]:
        return [None if m is None else to_stored(m, p, layout) for m, p in zip(masters, layout.leaves, strict=True)]

    def shardings() -> tuple[list[Any], list[Any]]:
        """Of the leaves of the state: the inner one's, and one master, or None, for each parameter."""
        of_masters = [state_sharding_of(p, layout) if has_master(p, layout) else None for p in layout.leaves]
        return [state_sharding_of(p, layout) for p in jax.tree.leaves(placements())], of_masters

    def state_of(inner: list[Any], masters: list[Any]) -> ZeroState:
        inner = jax.tree.unflatten(jax.tree.structure(placements()), inner)
        return ZeroState(inner, layout.treedef.unflatten(masters), layout_id)

    def compute(static: dict[str, Any]) -> Callable[..., Any]:
        """The update on lists of leaves in stored form; `static` are the extra arguments that are no arrays."""
        of_state = placements()

        def step(grad_leaves: list[Any], state: ZeroState, param_leaves: Any, extra: Any) -> tuple[list[Any], ...]:
            grads = layout.treedef.unflatten([
                None if not p.trainable else to_logical(g, p, layout).astype(master_dtype(p, layout))
                for g, p in zip(grad_leaves, layout.leaves, strict=True)
            ])  # fmt: skip
            masters = [
                None if m is None else to_logical(m, p, layout, held=True)
                for m, p in zip(layout.leaves_of(state.master), layout.leaves, strict=True)
            ]
            old = seen = None
            if param_leaves is not None:
                masters = current_masters(masters, param_leaves, layout)
                old = layout.treedef.unflatten(param_leaves)
                seen = trained_tree(layout, optimizer_view(old, masters, layout))
            inner = jax.tree.map(lambda x, p: to_logical(x, p, layout, held=True), state.inner, of_state)
            logical, called = logical_arguments(extra, old, layout), logical_arguments(static, old, layout)
            if static or layout.stage == 0 or layout.num_shards == 1:
                updates, new_inner = wrapped.update(grads, inner, seen, **logical, **called)
            else:  # a function among the arguments may hold the model's own matrix products
                args = (grads, inner, seen, logical)
                moved = with_full_matrices(lambda g, s, p, e: wrapped.update(g, s, p, **e), layout)
                updates, new_inner = moved(_specs_of(args, of_state, layout), *args)
            check_updates(updates, layout)
            check_new_state(new_inner, of_state)
            updates, new_masters = finish_update(updates, masters, param_leaves, layout)
            return updates, enter_state(new_inner, of_state, layout), held(new_masters)

        of_updates = [
            layout.param_sharding(p) if p.trainable else NamedSharding(layout.mesh, PartitionSpec())
            for p in layout.leaves
        ]
        return with_auto_axes(step, layout.mesh, (of_updates, *shardings()))

    @functools.cache
    def jitted() -> Callable[..., Any]:
        return jax.jit(compute({}))

    def update(grads: Tree, state: ZeroState, params: Tree | None = None, **extra: Any) -> tuple[Tree, ZeroState]:
        _check_state(state, layout_id, layout)
        of_state = placements()
        check_same_optimizer(state.inner, of_state)
        if params is None and any(has_master(p, layout) for p in layout.leaves):
            raise ValueError("zero(...).update needs params (third argument) when there are master weights")
        if params is not None:
            layout.check(params, stored=True)
        layout.check(like_params(grads, layout), stored=None, what="grads")
        param_leaves = None if params is None else jax.tree.leaves(params)

        grad_leaves = layout.leaves_of(grads)
        arrays = {k: v for k, v in extra.items() if not any(callable(x) for x in jax.tree.leaves(v))}
        static = {k: v for k, v in extra.items() if k not in arrays}
        step = jitted() if not static else jax.jit(compute(static))
        updates, inner, masters = step(grad_leaves, state, param_leaves, arrays)
        return layout.treedef.unflatten(updates), state_of(inner, masters)

    def placements_of_state() -> ZeroState:
        masters = [p.with_dtype(master_dtype(p, layout)) if has_master(p, layout) else None for p in layout.leaves]
        return ZeroState(placements(), layout.treedef.unflatten(masters), layout_id)

    out = ShardedTransformation(init, update)  # type: ignore[arg-type]
    out.state_placements = placements_of_state
    return out


def check_sharded(tx: Any, call: str) -> None:
    """Refuses an optimizer that `zero` has not wrapped, or that has been wrapped again.

    Raises:
        ValueError: with the call that was meant.
    """
    if not isinstance(tx, ShardedTransformation):
        raise ValueError(
            f"{call}: the optimizer must be made by zerojax.zero(tx, layout), outermost: "
            f"zero(optax.chain(...), layout), zero(optax.masked(tx, mask), layout), not the other way round; got "
            f"{type(tx).__name__}"
        )


def placements_of_state(tx: optax.GradientTransformation, layout: Layout) -> ZeroState:
    """A `Placement` for each leaf of an optimizer's state, for readers: of a `zero(...)`, or of what it would wrap.

    Raises:
        ValueError: `tx` was made by `zero` for another layout, or holds a `zero` inside a chain.

    >>> import jax.numpy as jnp
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


def _specs_of(args: tuple[Any, ...], of_state: Tree, layout: Layout) -> list[PartitionSpec | None]:
    """The specs of the leaves of an update's arguments that are split: gradients, state and parameters, no others."""
    _, _, params, extra = args

    def specs(placements: list[Placement]) -> list[PartitionSpec | None]:
        return [p.full_spec if p.is_sharded else None for p in placements]

    trained = specs([p for p in layout.leaves if p.trainable])
    others = [None] * len(jax.tree.leaves(extra))
    return [*trained, *specs(jax.tree.leaves(of_state)), *(trained if params is not None else ()), *others]


def _abstract_state(of_state: Tree, layout: Layout, layout_id: str) -> ZeroState:
    def shape(p: Placement, dtype: Any) -> jax.ShapeDtypeStruct:
        held = p.padded_shape if layout.stage else p.shape
        return jax.ShapeDtypeStruct(held, dtype, sharding=state_sharding_of(p, layout))

    inner = jax.tree.map(lambda p: shape(p, p.dtype), of_state)
    masters = [shape(p, master_dtype(p, layout)) if has_master(p, layout) else None for p in layout.leaves]
    return ZeroState(inner, layout.treedef.unflatten(masters), layout_id)


def _check_state(state: Any, layout_id: str, layout: Layout) -> None:
    if not isinstance(state, ZeroState):
        raise ValueError(
            f"zero(...).update got a state of type {type(state).__name__}, not the ZeroState that zero(...).init gives"
        )
    if state.layout_id != layout_id:
        raise ValueError(
            f"the optimizer state belongs to another layout than {dict(layout.mesh.shape)}, stage {layout.stage} "
            "(other mesh shape, stage, thresholds or model); create it with zero(tx, layout).init(params) here"
        )


def _fingerprint(layout: Layout) -> str:
    """A short hash of what fixes the stored form: mesh shape, stage, dtypes and every placement."""
    placed = [(p.path, p.shape, p.dtype.name, p.dim, p.axes, p.padding, p.spec, p.trainable) for p in layout.leaves]
    facts = (tuple(layout.mesh.shape.items()), layout.stage, layout.config.master_dtype, placed)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]



def like_params(grads: Tree, layout: Layout) -> Tree:
    """Gradients with a stand-in for each leaf that is not trained, whose gradient may be absent."""
    try:
        leaves = layout.leaves_of(grads)
    except ValueError:
        return grads  # the structure check names the difference
    full = [jax.ShapeDtypeStruct(p.shape, p.dtype) if not p.trainable else g
            for g, p in zip(leaves, layout.leaves, strict=True)]  # fmt: skip
    return layout.treedef.unflatten(full)


def _check_outermost(params: Tree, layout: Layout) -> None:
    """Refuses parameters that another transformation has changed (masked, flattened) before `zero` sees them."""
    if jax.tree.structure(params) == layout.treedef:
        return
    try:
        layout.check(params, stored=True)
    except ValueError as error:
        raise ValueError(
            f"{error}. If zero(tx, layout) is inside another transformation (optax.masked, optax.partition, "
            "optax.flatten), put it outermost: zero(optax.masked(tx, mask), layout)"
        ) from None


def check_same_optimizer(inner: Tree, of_state: Tree) -> None:
    """Refuses a state of another optimizer than the one that is wrapped."""
    if jax.tree.structure(inner) != jax.tree.structure(of_state):
        raise ValueError(
            "the optimizer state is of another optimizer than the one wrapped here (the structures of their states "
            "differ); create it with zero(tx, layout).init(params) of this optimizer"
        )


def check_updates(updates: Tree, layout: Layout) -> None:
    """Refuses what is not one update of the parameter's own shape for each parameter that is trained."""
    wanted = trained_tree(layout, layout.logical_shapes())
    why = (
        "zerojax.zero wraps transformations that map the mean gradient to an update of each parameter; one that "
        "measures (optax.measure_with_ema, for optax.snapshot) or takes per-example gradients "
        "(optax.contrib.differentially_private_aggregate) goes before or beside it"
    )
    if jax.tree.structure(updates) != jax.tree.structure(wanted):
        raise ValueError(
            f"the transformation returned updates of structure {jax.tree.structure(updates)}, not that of the "
            f"parameters, {jax.tree.structure(wanted)}: {why}"
        )
    for (path, want), got in zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(updates), strict=True):
        if jnp.shape(got) != want.shape:
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"the transformation returned an update of shape {jnp.shape(got)} for params{name} of shape "
                f"{want.shape}: {why}"
            )


def check_new_state(new: Tree, of_state: Tree) -> None:
    """Refuses a state whose leaves are others after an update than after `init`."""
    if jax.tree.structure(new) != jax.tree.structure(of_state):
        raise ValueError(
            "the state of the transformation has another structure after update than after init, so that it has no "
            f"fixed placement and every step would be compiled twice (optax.monitor does so: use optax.snapshot): "
            f"{jax.tree.structure(jax.tree.map(lambda p: 0, of_state))} became {jax.tree.structure(new)}"
        )
    for placement, got in zip(jax.tree.leaves(of_state), jax.tree.leaves(new), strict=True):
        if jnp.shape(got) != placement.shape:
            raise ValueError(
                f"the state of the transformation has shape {jnp.shape(got)} at {placement.path} after update, but "
                f"{placement.shape} after init: it has no fixed placement"
            )
