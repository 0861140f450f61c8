"""Functions with a derivative of the user's own, run in stored form: the function, and its rule as the user wrote it.

The rule's residuals may be parameters as they came: they stay in stored form until the rule's backward part uses them,
so that no full parameter waits for it. A full gradient is what the rule returns; it is reduced like any other.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import _compat
from zerojax.gather.deferred import Deferred, plain
from zerojax.gather.equation import Equation, GatherWarning, Rebuild, disassemble
from zerojax.gather.stored import Stored, apply_with_gather
from zerojax.gather.uses import is_layered, uses_inside

# As `_compat.custom_vjp_rule` gives them.
Forward = Callable[[Sequence[Any]], tuple[list[Any], list[Any], list[int | None]]]
Backward = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


def custom_rule(e: Equation) -> list[Any]:
    """A `custom_vjp` or `custom_jvp` equation."""
    layered = [is_layered(uses) for uses in uses_inside(e.eqn, e.held, e.replicated)]
    e = dataclasses.replace(e, inputs=[plain(x) if isinstance(x, Deferred) else x for x in e.inputs])
    if not any(e.held):
        return e.bound()(e.inputs)
    if e.eqn.primitive.name == "custom_jvp_call":
        if not any(layered) and (sum(e.held) == 1 or e.scope.forward_only):
            return apply_with_gather(e.bound(), e.inputs)
        forward, backward = _rule_of_jvp(e)
    else:
        forward, backward = _compat.custom_vjp_rule(e.eqn)
    for x, loops in zip(e.inputs, layered, strict=True):
        if loops and isinstance(x, Stored) and x.grad_accumulator is not None:
            warnings.warn(
                f"params{x.placement.path} {x.placement.shape} is used layer by layer in a function with a derivative "
                "of its own, which returns the gradient of all layers before any is reduced; put the rule around one "
                "layer",
                GatherWarning,
                stacklevel=2,
            )
    return _run(e, forward, backward)


def _rule_of_jvp(e: Equation) -> tuple[Forward, Backward]:
    """A `custom_jvp` transposed: its inputs wait for the backward pass, which runs it again."""
    inexact, bound = [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in e.eqn.invars], e.bound()

    def forward(inputs: Sequence[Any]) -> tuple[list[Any], list[Any], list[int | None]]:
        return bound(inputs), [], list(range(len(inputs)))

    def backward(inputs: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        def of_inexact(values: list[Any]) -> list[Any]:
            new = iter(values)
            return bound([next(new) if moves else x for x, moves in zip(inputs, inexact, strict=True)])

        _, vjp = jax.vjp(of_inexact, [x for x, moves in zip(inputs, inexact, strict=True) if moves])
        new = iter(vjp(list(cotangents))[0])
        return [next(new) if moves else None for moves in inexact]

    return forward, backward


def _run(e: Equation, forward: Forward, backward: Backward) -> list[Any]:
    """The equation with `forward` and `backward`, traced on full shapes, evaluated in stored form."""
    flat, rebuild = disassemble([x.without_gradient() if isinstance(x, Stored) else x for x in e.inputs])
    accumulators = [x.gradient_holder() if isinstance(x, Stored) else None for x in e.inputs]
    # The rules below outlive the trace: they hold none of the inputs, as `e` and its scope do.
    nested, barrier, evaluate, evaluate_plain = e.scope.nested, e.scope.barrier, e.evaluate, e.evaluate_plain
    called, same_inputs = _compat.called_jaxpr(e.eqn), list(e.replicated)
    is_param = [isinstance(x, tuple) for x in flat]
    holders = [None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in accumulators]
    rebuild_residuals: list[Rebuild] = []

    def primal(flat: list[Any], accumulators: list[Any]) -> list[jax.Array]:
        inner = nested()
        return evaluate_plain(called, rebuild(flat, inner), inner, same_inputs)

    def fwd(flat: list[Any], accumulators: list[Any]) -> tuple[list[jax.Array], Any]:
        inner, forwarded = nested(), []
        inputs = rebuild(flat, inner)

        def traced(*values: Any) -> tuple[list[Any], list[Any]]:
            outputs, residuals, forwarded[:] = forward(values)
            return residuals, outputs

        jaxpr = jax.make_jaxpr(traced)(*map(_shape, inputs))
        results = evaluate(jaxpr, inputs, inner, same_inputs)
        own = iter(results)
        residuals = [_unless_deferred(next(own)) if number is None else inputs[number] for number in forwarded]
        kept, again = disassemble(residuals)
        rebuild_residuals[:] = [again]
        return [plain(x) for x in own], kept

    def bwd(kept: list[Any], cotangents: list[Any]) -> tuple[list[Any], list[Any]]:
        real = [c.dtype != jax.dtypes.float0 for c in cotangents]
        if barrier:  # else the compiler merges these gathers with those of the forward pass
            kept, waited = lax.optimization_barrier((kept, [c for c, r in zip(cotangents, real, strict=True) if r]))
            new = iter(waited)
            cotangents = [next(new) if r else c for c, r in zip(cotangents, real, strict=True)]
        inner, given = nested(), []
        residuals = rebuild_residuals[0](kept, inner)

        def traced(residuals: list[Any], inexact: list[Any]) -> list[Any]:
            new = iter(inexact)
            every = [next(new) if r else c for c, r in zip(cotangents, real, strict=True)]
            grads = backward(residuals, every)
            given[:] = [g is not None and g.dtype != jax.dtypes.float0 for g in grads]
            return [g for g, is_given in zip(grads, given, strict=True) if is_given]

        inexact = [c for c, r in zip(cotangents, real, strict=True) if r]
        jaxpr = jax.make_jaxpr(traced)(list(map(_shape, residuals)), list(map(_shape, inexact)))
        same = [isinstance(x, Stored) for x in residuals] + [False] * len(inexact)
        grads = iter(evaluate(jaxpr, [*residuals, *inexact], inner, same))
        grads = [next(grads) if is_given else None for is_given in given]
        grads = [plain(g) for g in grads]
        of_flat = [None if p else g for g, p in zip(grads, is_param, strict=True)]
        of_accumulators = [
            None if a is None else jnp.zeros(a.shape, a.dtype) if g is None else g
            for g, a in zip(grads, holders, strict=True)
        ]
        return of_flat, of_accumulators

    op = jax.custom_vjp(primal)
    op.defvjp(fwd, bwd)
    return op(flat, accumulators)


def _unless_deferred(x: Any) -> Any:
    return plain(x) if isinstance(x, Deferred) else x


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    aval = x.aval if isinstance(x, Stored) else x
    return jax.ShapeDtypeStruct(jnp.shape(aval), getattr(aval, "dtype", None) or jnp.result_type(aval))
