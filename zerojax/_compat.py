"""Everything that differs between the supported JAX versions (0.10 to 0.12), and nothing else.

The evaluator of `zerojax.gather.evaluate` reads jaxprs, whose internals move between versions. Each function here hides
one such move behind the form of the newest version; the rest of the package never asks which version it runs on.
Differences are recognised by what an object offers, not by a version number, so that a release in between works too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core as jex_core

Literal = jex_core.Literal
# Equations that only call a jaxpr, under all names that they had.
CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """Splits a jaxpr, closed or not, into its open form and the values of its constants."""
    consts = list(getattr(jaxpr, "consts", ()))
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return inner, consts


def called_jaxpr(eqn: Any) -> Any:
    """The jaxpr that takes the inputs of an equation as they are: of a call, a checkpoint or a custom rule."""
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr")
    return next(eqn.params[name] for name in names if name in eqn.params)


def sub_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs, open, among the parameters of an equation: what it calls, its branches, the bodies of its loops."""
    for value in eqn.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            inner, _ = open_jaxpr(part)
            if hasattr(inner, "eqns"):
                yield inner


def scan_arity(params: dict[str, Any]) -> tuple[int, int]:
    """The number of constants and of carried values of a `scan` equation, from its parameters."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since 0.12 the arity is kept as a tree of three groups
    return len(list(consts)), len(list(carry))


def bind_equation(eqn: Any, args: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Runs one equation on new inputs, under the context (compute type, metadata) it was traced in.

    Args:
        eqn: the equation.
        args: its inputs.
        params: its parameters; None: as it was traced.
    """
    bound = eqn.primitive.get_bind_params(eqn.params if params is None else params)
    if isinstance(bound, tuple):  # releases before 0.10 return (subfuns, params)
        subfuns, bound = bound
        args = [*subfuns, *args]
    with name_stack_of(eqn), eqn.ctx.manager:
        out = eqn.primitive.bind(*args, **bound)
    return list(out) if eqn.primitive.multiple_results else [out]


def name_stack_of(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    """A context that gives what is traced in it the source line and name stack of an equation, for profiles."""
    try:
        from jax._src import source_info_util

        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
    except (ImportError, AttributeError, TypeError):  # names are a convenience: never fail for them
        return contextlib.nullcontext()


def custom_vjp_rule(eqn: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The user's rule of a `custom_vjp` equation, on flat lists of arrays.

    Returns:
        (forward, backward). forward: inputs -> (outputs, residuals that are no inputs as they came, and for each
        residual the number of the input that it is, or None). backward: (all residuals, cotangents of the outputs) ->
        cotangents of the inputs, None for zero.
    """
    bound = eqn.primitive.get_bind_params(eqn.params)
    _, fwd, bwd = bound["subfuns"]

    def forward(primals: Sequence[Any]) -> tuple[list[Any], list[Any], list[int | None]]:
        consts = eqn.params["num_consts"]
        perturbed = [i >= consts and jnp.issubdtype(jnp.result_type(x), jnp.inexact) for i, x in enumerate(primals)]
        out = fwd.call_wrapped(*(part for pair in zip(primals, perturbed, strict=True) for part in pair))
        _, residual_tree, forwarded = eqn.params["out_trees"]()
        count = residual_tree.num_leaves - sum(number is not None for number in forwarded)
        return list(out[count:]), list(out[:count]), list(forwarded)

    def backward(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        found = bwd.call_wrapped(*residuals, *cotangents)
        if isinstance(found, tuple):  # since 0.12 with what the rule logs
            found, _ = found
        return [x if hasattr(x, "shape") else None for x in found]

    return forward, backward


def closes_over_values(jaxpr: Any) -> bool:
    """Whether a function with a derivative of its own, anywhere in the jaxpr, closes over values of the program.

    Its rule may then close over them too, as Python functions do: it can run only while they are being traced.
    """
    inner, _ = open_jaxpr(jaxpr)
    return any(
        (eqn.primitive.name.startswith(("custom_vjp_call", "custom_jvp_call")) and eqn.params.get("num_consts", 0) > 0)
        or any(map(closes_over_values, sub_jaxprs(eqn)))
        for eqn in inner.eqns
    )


def with_consts_as_inputs(jaxpr: Any) -> tuple[Any, list[Any]]:
    """An open jaxpr whose first inputs are the constants of the one given, and the values of these."""
    from jax._src.interpreters.partial_eval import convert_constvars_jaxpr

    inner, consts = open_jaxpr(jaxpr)
    return convert_constvars_jaxpr(inner), consts


def manual_axes() -> frozenset[str]:
    """The mesh axes that `shard_map` has split this part of the program over."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def acts_on_the_world(eqn: Any) -> bool:
    """Whether an equation does more than compute its outputs: it reads or writes a reference, or calls the host."""
    # A collective has an effect that names its axis, and only computes.
    effects = [e for e in eqn.effects if type(e).__name__ != "NamedAxisEffect"]
    refers = any(hasattr(v.aval, "inner_aval") for v in (*eqn.invars, *eqn.outvars))
    return bool(effects) or refers or eqn.primitive.name.endswith("callback")


def holds_effect(jaxpr: Any) -> bool:
    """Whether an equation of an open jaxpr, at any depth, does more than compute."""
    return any(acts_on_the_world(eqn) or any(map(holds_effect, sub_jaxprs(eqn))) for eqn in jaxpr.eqns)


def is_differentiated(x: Any) -> bool:
    """Whether `x` is being differentiated right where it is used, not by a trace further out."""
    return type(x).__name__ in ("JVPTracer", "LinearizeTracer")


def is_traced(x: Any) -> bool:
    """Whether `x` stands for a value that is not known while the program is traced."""
    return isinstance(x, Tracer)


def is_eager(values: Sequence[Any]) -> bool:
    """Whether a call on these values is made outside of every trace, and compilation is not turned off."""
    if getattr(jax.config, "jax_disable_jit", False) or any(map(is_traced, values)):
        return False
    try:
        from jax._src.core import trace_state_clean
    except ImportError:  # the long way is always right
        return False
    return trace_state_clean()


def is_eager_gradient(values: Sequence[Any]) -> bool:
    """Whether a call on these values is made outside of every trace but that of one reverse-mode derivative."""
    traced = [x for x in values if is_traced(x)]
    if getattr(jax.config, "jax_disable_jit", False) or not traced:
        return False
    try:
        from jax._src.core import eval_trace, trace_ctx
        from jax._src.interpreters.ad import LinearizeTrace
    except ImportError:  # the long way is always right
        return False
    trace = trace_ctx.trace
    outermost = isinstance(trace, LinearizeTrace) and trace.parent_trace is eval_trace
    return outermost and all(getattr(x, "_trace", None) is trace for x in traced)


def is_prng_key(x: Any) -> bool:
    """Whether `x` is an array of typed PRNG keys (`jax.random.key`)."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def jax_line() -> tuple[int, int]:
    """Major and minor version of JAX: compiler options have no object that could be asked whether it knows them.

    >>> (0, 10) <= jax_line()
    True
    """
    major, minor, *_ = jax.__version_info__
    return major, minor


def has_explicit_axes(mesh: jax.sharding.Mesh) -> bool:
    """Whether any axis of the mesh carries its sharding in the array type (explicit sharding)."""
    return any(kind == jax.sharding.AxisType.Explicit for kind in mesh.axis_types)


def coordination_client() -> Any | None:
    """The client of the job's coordination service (texts by key, time limits); None in a job of one process."""
    from jax._src import distributed

    return distributed.global_state.client


def versions() -> str:
    """The versions of JAX and its compiler, for comparing processes."""
    import jaxlib.version

    return f"jax {jax.__version__}, jaxlib {jaxlib.version.__version__}"


def preemption_notice(client: Any, seconds: float) -> bool:
    """Waits until any process of the job was sent SIGTERM, at most so long; whether one was."""
    try:
        client.blocking_key_value_get("RECEIVED_PREEMPTION_NOTICE", int(1000 * seconds))
    except Exception as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return False
        raise SystemExit from None  # the service is gone, and with it the job: ends the thread that waits
    return True
