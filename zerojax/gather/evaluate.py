"""Evaluates a jaxpr with parameters in stored form, gathering each where it is used.

This is how an unmodified model runs under ZeRO stage 3: the loss is traced to a jaxpr, and each equation that consumes
a stored parameter is run by the rule of its kind (`zerojax.gather.primitives`). Casts and slices act on the shards,
other shape-only operations are applied after the gather, loops, branches and calls are entered, so that in a scanned
model one layer is gathered at a time, and everything else goes through `zerojax.gather.stored.apply_with_gather`. A
primitive that is not known is therefore always correct.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import _compat
from zerojax.gather import regions, shards
from zerojax.gather.deferred import apply_held, defer, is_held, params_of, plain
from zerojax.gather.derivatives import custom_rule
from zerojax.gather.equation import Equation, warn_if_gathered_early, warn_if_stack_is_gathered
from zerojax.gather.primitives import PRIMITIVES, Kind, holds_loop, kind_of
from zerojax.gather.region_packs import plan_packs
from zerojax.gather.replicated import Flags
from zerojax.gather.rewritten import rewritten, sums_over_layers
from zerojax.gather.stored import Scope, Stored
from zerojax.gather.uses import is_layered, uses_inside


def evaluate(jaxpr: Any, args: Sequence[Any], scope: Scope, replicated: Sequence[bool] | None = None) -> list[Any]:
    """Runs a jaxpr on local arrays and `Stored` parameters of `scope`.

    Args:
        jaxpr: a jaxpr, closed or open, traced with the logical shapes of the parameters.
        args: its inputs.
        scope: the scope of the stored inputs.
        replicated: for each input, whether its value is the same on every device; None: stored ones alone.

    Returns:
        Its outputs; a parameter returned as it came stays `Stored`, and what is computed later `Deferred`.
    """
    inner, consts = _compat.open_jaxpr(jaxpr)
    env: dict[Any, Any] = dict(zip(inner.constvars, consts, strict=True))
    env.update(zip(inner.invars, args, strict=True))
    same_everywhere = [isinstance(x, Stored) for x in args] if replicated is None else replicated
    flags = Flags(inner, same_everywhere)
    if not scope.is_planned:
        scope.is_planned = True
        window = scope.pack_bytes if scope.order is None else min(scope.pack_bytes, scope.order.window)
        plan_packs(inner, args, same_everywhere, scope, window)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _compat.Literal) else env[atom]

    for eqn in inner.eqns:
        inputs, same = [read(atom) for atom in eqn.invars], flags.step(eqn)
        if any(map(is_held, inputs)):
            with _compat.name_stack_of(eqn):
                outputs = _RULES[kind_of(eqn, same)](Equation(eqn, inputs, same, scope, evaluate))
        else:
            outputs = _compat.bind_equation(eqn, inputs)
            if eqn.primitive.name == "broadcast_in_dim" and same == [True] and outputs[0].size > jnp.size(inputs[0]):
                scope.broadcasts[id(outputs[0])] = (outputs[0], eqn, inputs[0])
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in inner.outvars]


def evaluate_plain(
    jaxpr: Any, args: Sequence[Any], scope: Scope, replicated: Sequence[bool] | None = None
) -> list[jax.Array]:
    """`evaluate` of a whole program, with every output gathered to an ordinary array."""
    scope.total = sum(math.prod(x.placement.shape) for x in args if isinstance(x, Stored))
    return [plain(x) for x in evaluate(jaxpr, args, scope, replicated)]


def _gather_rule(e: Equation) -> list[Any]:
    """The parameters are gathered and the equation is applied."""
    _warn_of_region(e)
    _warn_of_stack(e)
    return apply_held(e.bound(), e.inputs)


def _effect_rule(e: Equation) -> list[Any]:
    """What an effect sees is an ordinary array, so that it runs once and is differentiated as in plain JAX."""
    _warn_of_region(e)
    return e.bound()([plain(x) for x in e.inputs])


def _rewrite_rule(e: Equation) -> list[Any]:
    """An equivalent program is run in place of the equation."""
    return e.evaluate(rewritten(e.eqn), e.inputs, e.scope, e.replicated)


def _defer_rule(e: Equation) -> list[Any]:
    """The equation waits for the use of its result; a sum over a stack of layers is taken one by one."""
    if sums_over_layers(e.eqn) and regions.enters_by_layer(e.inputs[0], e.scope):
        return _rewrite_rule(e)
    deferred = defer(e.eqn, e.inputs, e.scope.broadcasts)
    return _gather_rule(e) if deferred is None else [deferred]


def _warn_of_stack(e: Equation) -> None:
    """Says so where the entries of dim 0 of a large array, experts or layers, are used all at once."""
    name = e.eqn.primitive.name
    for x, atom in zip(e.inputs, e.eqn.invars, strict=True):
        if not is_held(x) or len(atom.aval.shape) < 3 or name == "conv_general_dilated":
            continue
        if name == "dot_general":
            contracted, _ = e.eqn.params["dimension_numbers"]
            if 0 in contracted[0 if atom is e.eqn.invars[0] else 1]:
                continue
        warn_if_stack_is_gathered(params_of(x), e.scope, f"{name} uses all of its dim 0 at once")


def _warn_of_region(e: Equation) -> None:
    kind, name = PRIMITIVES.get(e.eqn.primitive.name, Kind.GATHER), e.eqn.primitive.name
    if not any(True for _ in _compat.sub_jaxprs(e.eqn)):
        return
    if kind is Kind.GATHER:  # nothing is known of what it does with them
        loops = any(holds_loop(jaxpr) for jaxpr in _compat.sub_jaxprs(e.eqn))
        by_layer = [loops and len(v.aval.shape) > 2 for v in e.eqn.invars]
    else:
        by_layer = [is_layered(uses) for uses in uses_inside(e.eqn, e.held, e.replicated)]
    params, layered = [], []
    for x, flag in zip(e.inputs, by_layer, strict=True):
        params += params_of(x)
        layered += [flag] * len(params_of(x))
    kind = Kind.EFFECT if _compat.acts_on_the_world(e.eqn) else kind
    warn_if_gathered_early(params, layered, e.scope, _WHY.get(kind, f"{name} is not entered"))


_WHY = {
    Kind.EFFECT: "what has a side effect (a reference, a call to the host) in it is not entered; put that outside",
    Kind.COND: "the condition of a lax.cond or lax.switch may differ between devices, and a gather inside needs all of "
    "them; take one that all share, for instance lax.pmax of it over the data axes",
    Kind.CUSTOM: "a custom derivative with symbolic_zeros is not entered; put it around one layer",
}


_RULES: dict[Kind, Callable[[Equation], list[Any]]] = {
    Kind.VIEW: shards.view_rule,
    Kind.CAST: shards.cast_rule,
    Kind.SLICE: shards.slice_rule,
    Kind.SQUEEZE: shards.squeeze_rule,
    Kind.STOP: shards.stop_rule,
    Kind.STACK: shards.stack_rule,
    Kind.REWRITE: _rewrite_rule,
    Kind.DEFER: _defer_rule,
    Kind.CALL: regions.call_rule,
    Kind.CHECKPOINT: regions.checkpoint_rule,
    Kind.SCAN: regions.scan_rule,
    Kind.WHILE: regions.while_rule,
    Kind.COND: regions.cond_rule,
    Kind.CUSTOM: custom_rule,
    Kind.EFFECT: _effect_rule,
    Kind.GATHER: _gather_rule,
}
