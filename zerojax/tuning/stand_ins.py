"""The same step with nothing on the wire: what it takes less is the communication that compute does not hide.

Each collective over the given mesh axes is replaced, in the traced program, by a local operation of the same shapes: a
gather repeats the device's own part, a reduction keeps its slice. The values are wrong and only the time is of use. All
else stays: kernels, casts, quantisation, the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from zerojax import _compat

COLLECTIVES = frozenset({
    "all_gather", "all_gather_invariant", "reduce_scatter", "all_to_all", "ppermute",
    "psum", "psum2", "psum_invariant", "unreduced_psum", "pmax", "pmin", "pmax_invariant", "pmin_invariant",
})  # fmt: skip

_stand_in = Primitive("local_stand_in")
_stand_in.multiple_results = True
_stand_in.def_abstract_eval(lambda *_, outputs: list(outputs))


def without_sending(traced: jax.stages.Traced, axes: Iterable[str]) -> Callable[..., list[jax.Array]]:
    """A function on the flat arguments of a traced step that sends nothing over the axes; for `jax.jit`.

    Args:
        traced: what `step.trace(...)` gave.
        axes: mesh axes whose collectives become local.

    Returns:
        A function of the flattened arguments; it gives the flattened results, with values that mean nothing.

    >>> import numpy as np
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    >>> total = jax.jit(jax.shard_map(lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()))
    >>> alone = without_sending(total.trace(jnp.array([1.0, 2.0])), ["data"])
    >>> "all_reduce" in jax.jit(alone).lower(jnp.array([1.0, 2.0])).as_text()
    False
    """
    closed = traced.jaxpr
    quiet = closed.replace(jaxpr=_rewritten(closed.jaxpr, frozenset(axes)))
    return jaxpr_as_fun(quiet)


def _rewritten(jaxpr: Any, axes: frozenset[str]) -> Any:
    """An open jaxpr with the same inputs and outputs, its collectives replaced, those of inner jaxprs too."""
    return jaxpr.replace(eqns=[_local(eqn, axes) for eqn in jaxpr.eqns])


def _local(eqn: Any, axes: frozenset[str]) -> Any:
    if eqn.primitive.name in COLLECTIVES:
        if not _axes_of(eqn) <= axes:
            return eqn
        outputs = tuple(v.aval for v in eqn.outvars)
        return eqn.replace(primitive=_stand_in, params={"outputs": outputs}, effects=frozenset())
    inner = {name: _inside(value, axes) for name, value in eqn.params.items()}
    return eqn.replace(params=inner)


def _inside(value: Any, axes: frozenset[str]) -> Any:
    """A parameter of an equation with the jaxprs in it rewritten."""
    if isinstance(value, (tuple, list)):
        holds = any(hasattr(_compat.open_jaxpr(part)[0], "eqns") for part in value)
        return type(value)(_inside(part, axes) for part in value) if holds else value
    if not hasattr(_compat.open_jaxpr(value)[0], "eqns"):
        return value
    if hasattr(value, "jaxpr"):
        return value.replace(jaxpr=_rewritten(value.jaxpr, axes))
    return _rewritten(value, axes)


def _axes_of(eqn: Any) -> frozenset[str]:
    found = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return frozenset(found if isinstance(found, (tuple, list, frozenset, set)) else (found,))


def _fitted(x: jax.Array, wanted: Any) -> jax.Array:
    """The array's own values in another shape: repeated where it must grow, cut where it must shrink."""
    if x.ndim != len(wanted.shape):
        flat, size = x.ravel(), math.prod(wanted.shape)
        repeats = -(-size // max(1, flat.size))
        return jnp.tile(flat, repeats)[:size].reshape(wanted.shape)
    cut = lax.slice(x, [0] * x.ndim, [min(a, b) for a, b in zip(x.shape, wanted.shape, strict=True)])
    return jnp.tile(cut, [-(-b // max(1, a)) for a, b in zip(cut.shape, wanted.shape, strict=True)])


def _run_locally(*values: jax.Array, outputs: tuple[Any, ...]) -> list[jax.Array]:
    # The barrier keeps what was repeated from being fused away: a gathered array is written to memory too.
    return list(lax.optimization_barrier([_fitted(x, want) for x, want in zip(values, outputs, strict=True)]))


mlir.register_lowering(_stand_in, mlir.lower_fun(_run_locally, multiple_results=True))
