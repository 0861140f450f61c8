"""Calls outside of `jax.jit`: traced each time, compiled once for each program.

Without this, an eager call runs `shard_map` operation by operation and compiles all of them anew. A plain `jax.jit`
inside would keep the first trace, and with it everything that the loss function closed over at the time: a schedule
held in a Python variable, a model object that has changed. So each call is traced, and the compiled program of an
earlier call is taken where the trace is the same; arrays that it closes over are arguments of that program. Knows
nothing of losses or parameters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from zerojax import _compat
from zerojax.gather.stored import instantiated

KEPT = 16  # programs: as many shapes or variants of one function
COMPARED_BYTES = 2**20  # constants above are the same only if they are the same array


class CompiledOnce:
    """Calls functions as compiled programs, and keeps the programs.

    >>> import jax.numpy as jnp
    >>> call, factor = CompiledOnce(), [2.0]
    >>> for factor[0] in (2.0, 2.0, 3.0):
    ...     print(float(call(lambda x: jnp.sum(x) * factor[0], jnp.ones(4))), len(call.programs))
    8.0 1
    8.0 1
    12.0 2
    """

    def __init__(self) -> None:
        self.programs: OrderedDict[Any, Callable[..., Any]] = OrderedDict()

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(*args)`; within a trace, or where compilation is turned off, just that."""
        leaves = jax.tree.leaves(args)
        if _compat.is_eager(leaves):
            return self._compiled(fn, *args)
        return self._differentiated(fn, *args) if _compat.is_eager_gradient(leaves) else fn(*args)

    def _compiled(self, fn: Callable[..., Any], *args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        if any(map(_compat.is_traced, closed.consts)):
            return fn(*args)
        key = _fingerprint(closed.jaxpr)
        program = self.programs.pop(key, None) or _compiled(closed.jaxpr)
        self.programs[key] = program  # the last used is the last to go
        if len(self.programs) > KEPT:
            self.programs.popitem(last=False)
        return jax.tree.unflatten(jax.tree.structure(out), program(closed.consts, leaves))


    def _differentiated(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(*args)` under `jax.grad` outside of every other trace: two programs, of forward and of backward pass."""
        leaves, structure = jax.tree.flatten(args)
        pullbacks: list[Any] = []  # the structure of what the forward pass keeps, noted while it is traced

        @jax.custom_vjp
        def call(*leaves: Any) -> Any:
            return fn(*structure.unflatten(leaves))

        def forward(*primals: Any) -> tuple[Any, Any]:
            moves = [p.perturbed and jnp.issubdtype(jnp.result_type(p.value), jnp.inexact) for p in primals]

            def run(*values: Any) -> tuple[Any, list[Any]]:
                def of_moving(moving: list[Any]) -> Any:
                    new = iter(moving)
                    return fn(*structure.unflatten([next(new) if m else x for x, m in zip(values, moves, strict=True)]))

                out, pullback = jax.vjp(of_moving, [x for x, m in zip(values, moves, strict=True) if m])
                kept, form = jax.tree.flatten(pullback)
                pullbacks[:] = [form, moves]
                return out, kept

            return self._compiled(run, *(p.value for p in primals))

        def backward(kept: list[Any], cotangents: Any) -> tuple[Any, ...]:
            pullback, moves = pullbacks
            given = jax.tree.map(instantiated, cotangents)
            grads = iter(self._compiled(lambda kept, c: pullback.unflatten(kept)(c)[0], kept, given))
            return tuple(next(grads) if m else None for m in moves)

        call.defvjp(forward, backward, symbolic_zeros=True)
        return call(*leaves)


def _compiled(jaxpr: Any) -> Callable[..., Any]:
    return jax.jit(lambda consts, leaves: jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(jaxpr, consts))(*leaves))


class _Same:
    """Equal to itself alone; keeps the object, so that nothing else gets its id."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _fingerprint(jaxpr: Any) -> Any:
    """A hashable value, equal for jaxprs that compute the same from the same inputs and constants."""
    names = {var: i for i, var in enumerate((*jaxpr.constvars, *jaxpr.invars))}

    def atom(x: Any) -> Any:
        if isinstance(x, _compat.Literal):
            return x.aval, _of_value(x.val)
        return names[x]

    parts: list[Any] = [tuple(var.aval for var in names), len(jaxpr.constvars)]
    for eqn in jaxpr.eqns:
        inputs = tuple(atom(x) for x in eqn.invars)
        for var in eqn.outvars:
            names[var] = len(names)
        # Nothing is differentiated any more: of a rule for derivatives only what is computed counts.
        custom = eqn.primitive.name.startswith(("custom_jvp", "custom_vjp"))
        params = {k: v for k, v in eqn.params.items() if not custom or _is_jaxpr(v)}
        context = tuple(str(getattr(eqn.ctx, name, None)) for name in ("compute_type", "xla_metadata"))
        outputs = tuple(var.aval for var in eqn.outvars)
        parts.append((eqn.primitive, inputs, outputs, _of_value(params), context))
    return tuple(parts), tuple(atom(x) for x in jaxpr.outvars)


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns")


def _of_value(x: Any) -> Any:
    if _is_jaxpr(x):
        inner, consts = _compat.open_jaxpr(x)
        return _fingerprint(inner), tuple(_of_value(c) for c in consts)
    if isinstance(x, dict):
        return tuple((k, _of_value(v)) for k, v in sorted(x.items(), key=lambda item: str(item[0])))
    if type(x) in (tuple, list):
        return type(x), tuple(_of_value(v) for v in x)
    if isinstance(x, (np.ndarray, np.generic)) or (isinstance(x, jax.Array) and not _compat.is_prng_key(x)):
        if x.nbytes > COMPARED_BYTES or not getattr(x, "is_fully_addressable", True):
            return _Same(x)
        return x.shape, str(x.dtype), np.asarray(x).tobytes()
    try:
        hash(x)
    except TypeError:
        return _Same(x)
    return type(x), x
