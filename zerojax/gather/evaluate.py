"""Evaluates a jaxpr with parameters in stored form, gathering each where it is used.

This is how an unmodified model runs under ZeRO stage 3: the loss is traced to a jaxpr, and each equation that consumes
a stored parameter is run by a rule. Casts and slices act on the shards, other shape-only operations are applied after
the gather, `scan`, `jit` and `checkpoint` are entered, so that in a scanned model one layer is gathered at a time, and
everything else goes through `zerojax.gather.stored.apply_with_gather`. A primitive that is not known here is therefore
always correct.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import _compat
from zerojax.gather.secondaries import VIEWS, hoist_secondaries, is_scanned_over
from zerojax.gather.stored import Cast, Scope, Stored, apply_with_gather

Rule = Callable[[Any, list[Any], Scope], list[Any]]


class GatherWarning(UserWarning):
    """A parameter is gathered earlier or longer than its use needs; the message names it and the way out.

    >>> import warnings
    >>> warnings.simplefilter("error", GatherWarning)  # a test of one's own that no parameter is gathered too early
    """


def evaluate(jaxpr: Any, args: Sequence[Any], scope: Scope) -> list[Any]:
    """Runs a jaxpr on local arrays and `Stored` parameters of `scope`.

    Args:
        jaxpr: a jaxpr, closed or open, traced with the logical shapes of the parameters.
        args: its inputs.
        scope: the scope of the stored inputs.

    Returns:
        Its outputs; a parameter returned as it came stays `Stored`.
    """
    inner, consts = _compat.open_jaxpr(jaxpr)
    env: dict[Any, Any] = dict(zip(inner.constvars, consts, strict=True))
    env.update(zip(inner.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _compat.Literal) else env[atom]

    for eqn in inner.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        if any(isinstance(x, Stored) for x in inputs):
            inputs = _whole_for_effects(eqn, inputs)
        if any(isinstance(x, Stored) for x in inputs):
            with _compat.name_stack_of(eqn):
                outputs = _RULES.get(eqn.primitive.name, _apply_rule)(eqn, inputs, scope)
        else:
            outputs = _compat.bind_equation(eqn, inputs)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in inner.outvars]


def evaluate_plain(jaxpr: Any, args: Sequence[Any], scope: Scope) -> list[jax.Array]:
    """`evaluate` with every output gathered to an ordinary array."""
    return [_plain(x) for x in evaluate(jaxpr, args, scope)]


def _whole_for_effects(eqn: Any, inputs: list[Any]) -> list[Any]:
    """What an effect sees is whole, so that it runs once and is differentiated as in plain JAX."""
    if eqn.primitive.name in _ENTERED_WITH_EFFECTS or not _compat.acts_on_the_world(eqn):
        return inputs
    return [_plain(x) for x in inputs]


def _plain(x: Any) -> Any:
    return x.full() if isinstance(x, Stored) else x


def _apply_rule(eqn: Any, inputs: list[Any], scope: Scope) -> list[Any]:
    if scope.keeps_values and eqn.primitive.name == "mul":
        for x in inputs:
            if isinstance(x, Stored) and x.view and jnp.issubdtype(x.placement.dtype, jnp.integer):
                _warn_of_dequantised(x)
    return apply_with_gather(functools.partial(_compat.bind_equation, eqn), inputs)


def _warn_of_dequantised(param: Stored) -> None:
    warnings.warn(
        f"params{param.placement.path} {param.placement.shape} {param.placement.dtype.name} is dequantised before its "
        "use, and the whole result waits for the backward pass; scale after the product, (x @ q) * scale, or put both "
        "into jax.checkpoint",
        GatherWarning,
        stacklevel=2,
    )


def _view_rule(eqn: Any, inputs: list[Any], scope: Scope) -> list[Any]:
    (param,) = inputs if len(inputs) == 1 else (None,)
    if not isinstance(param, Stored):  # a shape given by an operand: let the general rule see all of them
        return _apply_rule(eqn, inputs, scope)
    return [param.viewed(lambda x: _compat.bind_equation(eqn, [x])[0])]


def _cast_rule(eqn: Any, inputs: list[Any], scope: Scope) -> list[Any]:
    (param,) = inputs
    new = jnp.dtype(eqn.params["new_dtype"])
    if jnp.issubdtype(param.aval.dtype, jnp.integer) and jnp.issubdtype(new, jnp.floating):
        return [param.viewed(Cast(new))]  # a frozen quantised weight: gathered as it is, also in the backward pass
    if not jnp.issubdtype(new, jnp.inexact) or not jnp.issubdtype(param.aval.dtype, jnp.inexact):
        return _apply_rule(eqn, inputs, scope)
    held = jnp.dtype(param.placement.dtype)
    if new == param.aval.dtype:  # already cast, where a secondary partition was made ahead of the region
        return [param]
    widens = new.itemsize > held.itemsize  # done before the gather, it would widen the wire
    if widens or param.is_secondary or param.aval.dtype != held:
        return [param.viewed(Cast(new))]
    return [scope.cast(param, new)]


def _slice_rule(eqn: Any, inputs: list[Any], scope: Scope) -> list[Any]:
    """A slice along whole dims is taken from the shards: only the part that is used travels.

    Not where its place is computed: it may follow from the batch and then differ between the devices, each of which
    would send the others a part they did not ask for.
    """
    param, *indices = inputs
    plain = isinstance(param, Stored) and not any(isinstance(i, Stored) for i in indices)
    out_shape = tuple(eqn.outvars[0].aval.shape)
    if not plain or param.view or param.is_secondary or not param.placement.is_sharded:
        return (_apply_rule if indices or not plain else _view_rule)(eqn, inputs, scope)
    dim, placement = param.placement.dim, param.placement
    assert dim is not None
    strides = eqn.params.get("strides") or (1,) * len(out_shape)
    computed = any(_compat.is_traced(i) for i in indices)
    if computed or out_shape[dim] != placement.shape[dim] or strides[dim] != 1:
        return (_apply_rule if indices else _view_rule)(eqn, inputs, scope)

    def cut(x: jax.Array) -> jax.Array:
        # The grad_input is sliced along with the shard; both keep their own extent along the sharded dim.
        if indices:
            return lax.dynamic_slice(x, indices, (*out_shape[:dim], x.shape[dim], *out_shape[dim + 1 :]))
        start, limit = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
        limit[dim] = x.shape[dim]
        return lax.slice(x, start, limit, strides)

    shard, grad_input, feedback = param.map_shards(cut)
    return [scope.enter(shard, grad_input, placement.with_shape(out_shape), feedback=feedback)]


def _squeeze_rule(eqn: Any, inputs: list[Any], scope: Scope) -> list[Any]:
    """Dropping leading dims of size 1 (after a slice) is done on the shards, so that what follows can be too."""
    (param,) = inputs
    dims = tuple(eqn.params["dimensions"])
    sharded = param.placement.dim
    if param.view or param.is_secondary or sharded is None or dims != (0,) or sharded == 0:
        return _view_rule(eqn, inputs, scope)
    shard, grad_input, feedback = param.map_shards(lambda x: lax.squeeze(x, (0,)))
    return [scope.enter(shard, grad_input, param.placement.without_leading_dim(), feedback=feedback)]


def _stop_gradient_rule(eqn: Any, inputs: list[Any], scope: Scope) -> list[Any]:
    return [inputs[0].without_gradient()]


def _inline_rule(eqn: Any, inputs: list[Any], scope: Scope) -> list[Any]:
    jaxpr = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return evaluate(jaxpr, inputs, scope)


def _checkpoint_rule(eqn: Any, inputs: list[Any], scope: Scope) -> list[Any]:
    """Rebuilds `jax.checkpoint` with the user's policy around the body in stored form."""
    if eqn.params["differentiated"]:
        return _apply_rule(eqn, inputs, scope)
    inner = scope.nested(checkpointed=True)
    inputs = hoist_secondaries(eqn.params["jaxpr"], inputs, scope)
    flat, rebuild = _disassemble(inputs, inner)

    def body(*arrays: jax.Array) -> list[jax.Array]:
        return evaluate_plain(eqn.params["jaxpr"], rebuild(arrays), inner)

    checkpointed = jax.checkpoint(body, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"])
    return list(checkpointed(*flat))


def _scan_rule(eqn: Any, inputs: list[Any], scope: Scope) -> list[Any]:
    """Enters the loop: stacked parameters stay stored, one layer is gathered in each iteration.

    A parameter that the loop only closes over is gathered once, before it, since gathering it in each iteration would
    multiply the traffic; unless the body scans over it in turn, as with microbatches around layers.
    """
    num_consts, num_carry = _compat.scan_arity(eqn.params)
    body_jaxpr, length = eqn.params["jaxpr"], eqn.params["length"]
    inner_jaxpr, _ = _compat.open_jaxpr(body_jaxpr)
    first_xs = num_consts + num_carry
    consts, carry, xs = inputs[:num_consts], inputs[num_consts:first_xs], inputs[first_xs:]
    consts = [
        x if isinstance(x, Stored) and is_scanned_over(inner_jaxpr, inner_jaxpr.invars[i]) else _plain(x)
        for i, x in enumerate(consts)
    ]
    carry = [_plain(x) for x in carry]
    xs = [_unquantized(x, scope) if isinstance(x, Stored) and _is_small_stack(x, scope) else x for x in xs]
    xs = [x if not isinstance(x, Stored) or _can_scan(x, scope) else _plain(x) for x in xs]
    inner = scope.nested()
    flat_consts, rebuild_consts = _disassemble(consts, inner)
    flat_xs, rebuild_xs = _disassemble(xs, inner, layer=True)

    def body(carried: list[Any], sliced: list[Any]) -> tuple[list[Any], list[Any]]:
        args = [*rebuild_consts(flat_consts), *carried, *rebuild_xs(sliced)]
        out = evaluate_plain(body_jaxpr, args, inner)
        return out[:num_carry], out[num_carry:]

    last, ys = lax.scan(body, carry, flat_xs, length=length, reverse=eqn.params["reverse"], unroll=eqn.params["unroll"])
    return [*last, *ys]


def _is_small_stack(param: Stored, scope: Scope) -> bool:
    """Whether one gather before the loop is better than a tiny one in each iteration."""
    return math.prod(param.placement.shape[1:]) < scope.min_loop_size


def _unquantized(param: Stored, scope: Scope) -> Stored:
    """A stack of norm scales or biases is no matrix, whatever its number of dims: both ways in full precision."""
    root = param.root
    placement = root.placement.unquantized()
    entered = scope.enter(
        root.shard, root.grad_input, placement, feedback=root.feedback, secondary_stack=root.secondary_stack
    )  # anew, since the reduction of its gradient belongs to the grad_accumulator
    return entered.with_view_of(param)


def _can_scan(param: Stored, scope: Scope) -> bool:
    """Whether a stacked parameter can enter a loop in stored form, one layer in each iteration."""
    placement = param.placement
    if _is_small_stack(param, scope) or param.secondary_stack == 0:
        return False
    reshaped = not all(isinstance(op, Cast) for op in param.view)  # a cast is the same for each layer
    if reshaped or not placement.is_sharded:
        if reshaped:
            warnings.warn(
                f"params{placement.path} {placement.shape} is reshaped before it is scanned over and therefore "
                "gathered whole before the loop; scan over it in the shape in which it is stored",
                GatherWarning,
                stacklevel=2,
            )
        return False
    if placement.dim == 0:
        warnings.warn(
            f"params{placement.path} {placement.shape} is sharded along dim 0, which is scanned over, and therefore "
            f"gathered whole before the loop; no other dim was better for {placement.num_shards} shards",
            GatherWarning,
            stacklevel=2,
        )
        return False
    return True


def _disassemble(
    values: Sequence[Any], inner: Scope, *, layer: bool = False
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Takes stored parameters apart into arrays that can cross a function boundary, and says how to rebuild them.

    With `layer`, the rebuilt parameters are one layer of the stacked ones.
    """
    flat: list[Any] = []
    recipe: list[Callable[[Sequence[Any]], Any]] = []
    for value in values:
        start = len(flat)
        if not isinstance(value, Stored):
            flat.append(value)
            recipe.append(lambda arrays, i=start: arrays[i])
            continue
        # Often one array is both: it crosses once.
        grad_input = None if value.grad_input is value.shard else value.grad_input
        flat.append((value.shard, grad_input, value.feedback))
        recipe.append(functools.partial(_rebuild, value, inner, layer, start))
    return flat, lambda arrays: [make(arrays) for make in recipe]


def _rebuild(value: Stored, inner: Scope, layer: bool, start: int, arrays: Sequence[Any]) -> Stored:
    shard, grad_input, feedback = arrays[start]
    if value.grad_input is value.shard:
        grad_input = shard
    placement, stack = value.placement, value.secondary_stack
    if layer:
        placement, stack = placement.without_leading_dim(), None if stack is None else stack - 1
    return inner.enter(shard, grad_input, placement, feedback=feedback, secondary_stack=stack).with_view_of(value)


_CALLS = ("jit", "pjit", "closed_call", "core_call")
_CHECKPOINTS = ("remat2", "checkpoint", "remat")
# Regions whose equations are looked at one by one, so that only those with an effect gather first.
_ENTERED_WITH_EFFECTS = frozenset({"scan", *_CALLS, *_CHECKPOINTS})

_RULES: dict[str, Rule] = {
    **dict.fromkeys(VIEWS, _view_rule),
    "convert_element_type": _cast_rule,
    "slice": _slice_rule,
    "dynamic_slice": _slice_rule,
    "squeeze": _squeeze_rule,
    "stop_gradient": _stop_gradient_rule,
    "scan": _scan_rule,
    **dict.fromkeys(_CALLS, _inline_rule),
    **dict.fromkeys(_CHECKPOINTS, _checkpoint_rule),
}
