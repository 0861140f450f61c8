"""Equations that hold programs of their own, entered so that parameters are gathered inside, around each use.

Loops, branches, checkpointed functions and custom rules are rebuilt around a body that takes parameters in stored form.
What enters them is decided by the table and by `Loop` in `zerojax.gather.uses`, which the prediction reads too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import _compat
from zerojax.gather.changes import LayerChanges
from zerojax.gather.checkpointed import ordered_checkpoint
from zerojax.gather.deferred import Deferred, is_held, params_of, plain, without_gradient
from zerojax.gather.equation import Equation, GatherWarning, disassemble, warn_if_gathered_early
from zerojax.gather.scanned import gathered_ahead, scan_with_ahead
from zerojax.gather.shards import is_stack, rearranged
from zerojax.gather.stored import Scope, Stored
from zerojax.gather.uses import LeafUse, Loop, cast_target, is_layered, uses_in
from zerojax.gather.views import Cast
from zerojax.layout.placement import Placement


def call_rule(e: Equation) -> list[Any]:
    """A called jaxpr is run in place."""
    return e.evaluate(_compat.called_jaxpr(e.eqn), e.inputs, e.scope, e.replicated)


def checkpoint_rule(e: Equation) -> list[Any]:
    """Rebuilds `jax.checkpoint` with the user's policy around the body in stored form."""
    jaxpr, params, evaluate, flags = _compat.called_jaxpr(e.eqn), e.eqn.params, e.evaluate_plain, e.replicated
    flat, rebuild = disassemble(hoist_secondaries(jaxpr, e.inputs, flags, e.scope))

    def body(arrays: Sequence[Any], inner: Scope) -> list[jax.Array]:  # outlives the trace, and holds no input
        return evaluate(jaxpr, rebuild(arrays, inner), inner, flags)

    if e.scope.order is not None:
        return ordered_checkpoint(body, flat, e.scope, policy=params["policy"])
    nested = e.scope.nested

    def unordered(*arrays: Any) -> list[jax.Array]:
        return body(arrays, nested())

    return list(jax.checkpoint(unordered, policy=params["policy"], prevent_cse=params["prevent_cse"])(*flat))


def hoist_secondaries(jaxpr: Any, inputs: Sequence[Any], replicated: Sequence[bool], scope: Scope) -> list[Any]:
    """The inputs of a region, each stored parameter held as its secondary partition, so that what the region repeats
    stays inside the node (arXiv 2306.10209, section 3.2): its recomputation, or all microbatches of a step.

    A parameter that every use in the region casts to the same narrower dtype is cast first; one that the region takes
    apart layer by layer is kept so. Without a secondary partition the inputs stay as they are.
    """
    if scope.collectives.secondary is None:
        return list(inputs)

    def hoisted(x: Any, uses: Sequence[LeafUse], stacked: bool) -> Any:
        if isinstance(x, Deferred):
            stacks = zip(x.leaves, x.stacked, strict=True)
            parts = iter([hoisted(leaf, (), along and x.length is not None and stacked) for leaf, along in stacks])
            return x.map_leaves(lambda _: next(parts))
        if not isinstance(x, Stored) or x.is_secondary:
            return x
        if uses and (dtype := cast_target(uses, x.placement.dtype)) != x.placement.dtype:
            x = scope.cast(x, dtype)
        return scope.secondary(x, stack=int(stacked))

    uses = uses_in(jaxpr, [is_held(x) for x in inputs], replicated)
    return [hoisted(x, of_input, is_layered(of_input)) for x, of_input in zip(inputs, uses, strict=True)]


def cond_rule(e: Equation) -> list[Any]:
    """Enters the branches: every device takes the same one, so each can gather what it uses."""
    index, *inputs = e.inputs
    flat, rebuild = disassemble(inputs)

    def branch(jaxpr: Any) -> Callable[..., list[jax.Array]]:
        def run(*arrays: Any) -> list[jax.Array]:
            inner = e.scope.nested()
            return e.evaluate_plain(jaxpr, rebuild(arrays, inner), inner, e.replicated[1:])

        return run

    return list(lax.switch(plain(index), [branch(jaxpr) for jaxpr in e.eqn.params["branches"]], *flat))


def scan_rule(e: Equation) -> list[Any]:
    """Enters the loop: stacked parameters stay stored, one layer is gathered in each iteration."""
    loop, params = Loop.of(e.eqn), e.eqn.params
    inputs, flags = _of_body(e, loop), loop.flags(e.replicated)
    consts, carry, xs = inputs[: loop.consts], inputs[loop.consts : loop.first_xs], inputs[loop.first_xs :]
    moving = [not is_held(x) for x in carry]
    kept = [x for x, m in zip(carry, moving, strict=True) if not m]
    outer, layered, join = _apart(xs)
    first, order = [x for x, m in zip(carry, moving, strict=True) if m], e.scope.order
    if order is not None:
        first = order.through(first)
    ahead = gathered_ahead(e, loop, inputs, flags)
    if any(a is not None for a in ahead):
        last, ys = scan_with_ahead(e, loop, ahead, consts, carry, outer, layered, join, first, flags)
    else:
        flat, rebuild = disassemble([*consts, *kept, *outer])
        changes = LayerChanges(layered, params["length"], reverse=params["reverse"])
        flat_xs, rebuild_xs = disassemble(changes.stacks(layered), layer=True)

        def body(state: tuple[list[Any], list[Any]], part: tuple[list[Any], Any]) -> tuple[Any, Any]:
            inner, (carried, current), (sliced, index) = e.scope.nested(), state, part
            following = changes.after(index)  # travels while this layer is computed
            layers = rebuild_xs(changes.filled(sliced, current), inner)
            fixed, now = iter(rebuild(flat, inner)), iter(carried)
            args = [*(next(fixed) for _ in consts), *(next(now) if m else next(fixed) for m in moving)]
            out = e.evaluate(params["jaxpr"], [*args, *join(fixed, layers)], inner, flags)
            new = [plain(x) for x, m in zip(out, moving, strict=False) if m]
            return (new, following), ([plain(x) for x in out[loop.carried :]], current)

        (last, _), (ys, changed) = lax.scan(
            body, (first, changes.first), (flat_xs, changes.indices), length=params["length"],
            reverse=params["reverse"], unroll=params["unroll"],
        )  # fmt: skip
        e.scope.changed.update(zip(changes.paths(), changed, strict=True))
    results = iter(last if order is None else order.through(last))
    return [*(next(results) if m else x for x, m in zip(carry, moving, strict=True)), *ys]


def while_rule(e: Equation) -> list[Any]:
    """Enters the loop. Where devices would stop apart, they run until the last one stops, and the others keep theirs.

    That is how JAX itself runs a `while_loop` under `vmap`: gathers in the body need every device.
    """
    loop, params = Loop.of(e.eqn), e.eqn.params
    of_cond = [plain(x) for x in e.inputs[: loop.outside]]
    inputs, flags = _of_body(e, loop), loop.flags(e.replicated)
    if not any(map(is_held, inputs)):
        return _compat.bind_equation(e.eqn, [*of_cond, *inputs])
    held = [without_gradient(x) if is_held(x) else x for x in inputs]
    carry = held[loop.consts :]
    moving = [not is_held(x) for x in carry]
    flat, rebuild = disassemble([*held[: loop.consts], *(x for x, m in zip(carry, moving, strict=True) if not m)])
    axes = next(p.placement.axes for x in held for p in params_of(x))

    accumulators = [p.gradient_holder() for x in inputs for p in params_of(x)]
    # `run` outlives the trace in a custom_vjp, and holds no input.
    nested, evaluate, evaluate_plain, every_flag = e.scope.nested, e.evaluate, e.evaluate_plain, list(e.replicated)

    def run(first: list[Any], flat: list[Any], of_cond: list[Any], accumulators: list[Any]) -> list[Any]:
        def goes_on(carried: list[Any], scope: Scope) -> jax.Array:
            fixed, now = iter(rebuild(flat, scope)[loop.consts :]), iter(carried)
            every = [next(now) if m else next(fixed) for m in moving]
            of_flags = [*every_flag[: loop.outside], *flags[loop.consts :]]
            return evaluate_plain(params["cond_jaxpr"], [*of_cond, *every], scope, of_flags)[0]

        def step(carried: list[Any], scope: Scope) -> list[Any]:
            values = rebuild(flat, scope)
            fixed, now = iter(values[loop.consts :]), iter(carried)
            args = [*values[: loop.consts], *(next(now) if m else next(fixed) for m in moving)]
            out = evaluate(params["body_jaxpr"], args, scope, flags)
            return [plain(x) for x, m in zip(out, moving, strict=True) if m]

        def anywhere(going: jax.Array) -> jax.Array:
            return lax.pmax(going.astype(jnp.int32), axes) > 0

        def together(state: tuple[Any, Any, list[Any]]) -> tuple[Any, Any, list[Any]]:
            _, going, carried = state
            scope = nested()
            new = [jnp.where(going, a, b) for a, b in zip(step(carried, scope), carried, strict=True)]
            going = jnp.logical_and(going, goes_on(new, scope))
            return anywhere(going), going, new

        going = goes_on(first, nested())
        return lax.while_loop(lambda state: state[0], together, (anywhere(going), going, first))[2]

    looped = run if e.scope.forward_only else _forward_only(run)
    results = iter(looped([x for x, m in zip(carry, moving, strict=True) if m], flat, of_cond, accumulators))
    return [next(results) if m else x for x, m in zip(inputs[loop.consts :], moving, strict=True)]


def _forward_only(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """A loop of unknown length is not differentiated in reverse, here as in JAX: not by its last argument either."""

    def refuse(residuals: None, cotangents: list[Any]) -> Any:
        raise ValueError(
            "Reverse-mode differentiation does not work for lax.while_loop, or lax.fori_loop with dynamic start or "
            "stop values. Use lax.scan, or lax.fori_loop with static ones"
        )

    op = jax.custom_vjp(run)
    op.defvjp(lambda *args: (run(*args), None), refuse)
    return op


def _of_body(e: Equation, loop: Loop) -> list[Any]:
    """The inputs of a loop's body: parameters that it takes layer by layer in stored form, others gathered."""
    flags, inputs = loop.flags(e.replicated), e.inputs[loop.outside :]
    followed = [is_held(x) for x in inputs]
    stored, uses = loop.stored(followed, flags), loop.uses(followed, flags)
    out, before = [], []
    _warn_of_returned(inputs, loop.returned(stored, flags), e.scope)
    for i, (x, enters, used) in enumerate(zip(inputs, stored, uses, strict=True)):
        if i < loop.first_xs and isinstance(x, Stored) and x.is_secondary and not is_layered(used):
            enters = False  # parts of it cannot be taken
        if enters and (entering := _entering(x, e.scope)) is not None:
            out.append(entering)
        elif isinstance(x, Stored):
            out.append(_gathered_before(x, used, e.scope))
        else:
            out.append(plain(x))
        if is_held(x) and used and not enters:
            before += [(p, any(use.by_layer for use in used)) for p in params_of(x)]
    warn_if_gathered_early(
        [x for x, _ in before], [by_layer for _, by_layer in before], e.scope,
        "a loop uses them in every iteration, and gathers in each would multiply the traffic; scan over a stack of "
        "layers inside the loop, and use it in no other way",
    )  # fmt: skip
    return out


def _warn_of_returned(inputs: Sequence[Any], returned: Sequence[Sequence[int]], scope: Scope) -> None:
    """Says so where a loop hands on weights: what an iteration returns is an array, and all of them are kept."""
    found = sorted({i for numbers in returned for i in numbers})
    params = [p for i in found for p in params_of(inputs[i]) if len(p.placement.shape) > 1]
    warn_if_gathered_early(
        params, [True] * len(params), scope,
        "a loop returns or carries what it takes from them as arrays, which are kept for the backward pass; look each "
        "weight up in the iteration that uses it, and return none",
    )  # fmt: skip


def _apart(xs: Sequence[Any]) -> tuple[list[Any], list[Any], Callable[[Iterator[Any], Sequence[Any]], list[Any]]]:
    """What a loop scans over, apart into values that are the same for all layers, stacks, and how to join one layer."""
    fixed = [leaf for x in xs if isinstance(x, Deferred)
             for leaf, along in zip(x.leaves, x.stacked, strict=True) if not along]  # fmt: skip
    stacks = [
        leaf for x in xs
        for leaf, along in (zip(x.leaves, x.stacked, strict=True) if isinstance(x, Deferred) else ((x, True),)) if along
    ]  # fmt: skip

    # Rules close over `join`: it holds on to no array.
    forms = [x.map_leaves(lambda _: None) if isinstance(x, Deferred) else None for x in xs]

    def join(fixed: Iterator[Any], layers: Sequence[Any]) -> list[Any]:
        own = iter(layers)

        def layer_of(form: Deferred | None) -> Any:
            if form is None:
                return next(own)
            parts = iter([next(own) if along else next(fixed) for along in form.stacked])
            return form.map_leaves(lambda _: next(parts)).map_layers(lambda leaf: leaf, 0)

        return [layer_of(form) for form in forms]

    return fixed, stacks, join


def _entering(x: Any, scope: Scope) -> Any:
    """What a loop takes layer by layer: a stack in stored form, or gathered if it is small; None if it cannot."""
    if isinstance(x, Stored):
        x = rearranged(x)
        if _is_small_stack(x, scope):
            return plain(_unquantized(x, scope))
        return x if _can_scan(x) else None
    if x.length is None or not x.has_all_layers or any(isinstance(leaf, Deferred) for leaf in x.leaves):
        _warn_of_reshaped(x.params[0].placement)
        return None

    def entering(leaf: Any) -> Any:
        no_more = isinstance(leaf, Stored) and math.prod(leaf.aval.shape) <= math.prod(x.aval.shape[1:])
        return plain(leaf) if no_more else _entering(leaf, scope) if isinstance(leaf, Stored) else leaf

    # A factor for each layer is gathered before the loop: all of them are no more than one layer.
    leaves = [entering(leaf) if along else leaf for leaf, along in zip(x.leaves, x.stacked, strict=True)]
    if any(leaf is None for leaf in leaves):
        return None
    parts = iter(leaves)
    return x.map_leaves(lambda _: next(parts))


def enters_by_layer(x: Any, scope: Scope) -> bool:
    """Whether a loop over a held value would take it apart without a warning, and gather a layer at a time."""
    if isinstance(x, Deferred):
        stacks = [leaf for leaf, along in zip(x.leaves, x.stacked, strict=True) if along]
        layered = x.length is not None and x.has_all_layers and len(x.aval.shape) > 2
        return layered and all(not is_held(leaf) or enters_by_layer(leaf, scope) for leaf in stacks)
    return is_stack(x := rearranged(x)) and len(x.aval.shape) > 2 and not _is_small_stack(x, scope)


def _gathered_before(param: Stored, uses: Sequence[LeafUse], scope: Scope) -> jax.Array:
    """A parameter gathered before a loop, in the dtype that all uses in the loop cast it to."""
    target = cast_target(uses, param.aval.dtype)
    if target == param.aval.dtype or param.view or param.is_secondary or param.placement.dtype != param.aval.dtype:
        return plain(param)
    return plain(scope.cast(param, target).viewed(Cast(param.aval.dtype)))


def _is_small_stack(param: Stored, scope: Scope) -> bool:
    """Whether one gather before the loop is better than a tiny one in each iteration."""
    return math.prod(param.placement.shape[1:]) < max(scope.min_loop_size, 2)


def _unquantized(param: Stored, scope: Scope) -> Stored:
    """A stack of norm scales or biases is no matrix, whatever its number of dims: both ways in full precision."""
    root = param.root
    placement = root.placement.unquantized()
    entered = scope.enter(
        root.shard, root.grad_input, placement, feedback=root.feedback, secondary_stack=root.secondary_stack
    )  # anew, since the reduction of its gradient belongs to the grad_accumulator
    return entered.under(param.view)


def _can_scan(param: Stored) -> bool:
    """Whether a stacked parameter can enter a loop in stored form, one layer in each iteration."""
    placement = param.placement
    if param.secondary_stack == 0 or not placement.is_sharded:
        return False
    if not all(isinstance(op, Cast) for op in param.view):  # a cast is the same for each layer
        _warn_of_reshaped(placement)
        return False
    if placement.dim == 0:
        warnings.warn(
            f"params{placement.path} {placement.shape} is sharded along dim 0, which is scanned over, and therefore "
            f"gathered in full before the loop; no other dim was better for {placement.num_shards} shards",
            GatherWarning,
            stacklevel=2,
        )
        return False
    return True


def _warn_of_reshaped(placement: Placement) -> None:
    warnings.warn(
        f"params{placement.path} {placement.shape} is reshaped before it is scanned over and therefore gathered in "
        "full before the loop; scan over it in the shape in which it is stored",
        GatherWarning,
        stacklevel=2,
    )
