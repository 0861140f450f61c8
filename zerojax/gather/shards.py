"""Operations that are done on the shards, or after the gather, and leave a parameter in stored form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import _compat
from zerojax.gather.equation import Equation
from zerojax.gather.stored import Cast, Stored, apply_with_gather
from zerojax.layout.placement import Placement


def view_rule(e: Equation) -> list[Any]:
    """An operation on the shape of one operand is applied after the gather."""
    (param,) = e.inputs
    return [param.viewed(lambda x: _compat.bind_equation(e.eqn, [x])[0])]


def stop_rule(e: Equation) -> list[Any]:
    """`stop_gradient`."""
    return [e.inputs[0].without_gradient()]


def cast_rule(e: Equation) -> list[Any]:
    """A float is narrowed before the gather, since the wire then carries less, and widened after it."""
    (param,) = e.inputs
    new = jnp.dtype(e.eqn.params["new_dtype"])
    if jnp.issubdtype(param.aval.dtype, jnp.integer) and jnp.issubdtype(new, jnp.floating):
        return [param.viewed(Cast(new))]  # a frozen quantised weight: gathered as it is, also in the backward pass
    if not jnp.issubdtype(new, jnp.inexact) or not jnp.issubdtype(param.aval.dtype, jnp.inexact):
        return apply_with_gather(e.bound(), e.inputs)
    held = jnp.dtype(param.placement.dtype)
    if new == param.aval.dtype:  # already cast, where a secondary partition was made ahead of the region
        return [param]
    widens = new.itemsize > held.itemsize  # done before the gather, it would widen the wire
    if widens or param.is_secondary or param.aval.dtype != held:
        return [param.viewed(Cast(new))]
    return [e.scope.cast(param, new)]


def slice_rule(e: Equation) -> list[Any]:
    """A slice along dims that are whole is taken from the shards: only the part that is used travels."""
    param, *indices = e.inputs
    if isinstance(param, Stored) and not any(isinstance(i, Stored) for i in indices):
        if (part := _sliced(e, param, indices)) is not None:
            return [part]
        if not indices:
            return view_rule(e)
    return apply_with_gather(e.bound(), e.inputs)


def _sliced(e: Equation, param: Stored, indices: list[Any]) -> Stored | None:
    """The part of the parameter in stored form; None where it is cut along the dim that is split."""
    placement, params = param.placement, e.eqn.params
    dim, shape = placement.dim, tuple(e.eqn.outvars[0].aval.shape)
    strides = params.get("strides") or (1,) * len(shape)
    if dim is None or not _only_cast(param) or shape[dim] != placement.shape[dim] or strides[dim] != 1:
        return None
    if param.is_secondary and (not param.secondary_stack or shape[1:] != placement.shape[1:]):
        return None  # a secondary partition is in one piece but along its stack

    def cut(x: jax.Array) -> jax.Array:
        # What is cut keeps its own extent along the dim that is split, and a secondary partition in all but the stack.
        kept = range(1, x.ndim) if param.is_secondary else (dim,)
        if indices:
            if param.is_secondary:
                return lax.dynamic_slice_in_dim(x, indices[0], shape[0])
            return lax.dynamic_slice(x, indices, [x.shape[d] if d in kept else n for d, n in enumerate(shape)])
        starts, limits, steps = list(params["start_indices"]), list(params["limit_indices"]), list(strides)
        if param.is_secondary:
            starts, limits, steps = [starts[0], *[0] * (x.ndim - 1)], [limits[0]] * x.ndim, [steps[0]] + [1] * (x.ndim - 1)
        return lax.slice(x, starts, [x.shape[d] if d in kept else n for d, n in enumerate(limits)], steps)

    return _mapped(e, param, cut, placement.with_shape(shape), param.secondary_stack)


def squeeze_rule(e: Equation) -> list[Any]:
    """Dropping leading dims of size 1 (after a slice) is done on the shards, so that what follows can be too."""
    (param,) = e.inputs
    sharded, stack = param.placement.dim, param.secondary_stack
    if not _only_cast(param) or stack == 0 or not sharded or tuple(e.eqn.params["dimensions"]) != (0,):
        return view_rule(e)
    placement = param.placement.without_leading_dim()
    return [_mapped(e, param, lambda x: lax.squeeze(x, (0,)), placement, None if stack is None else stack - 1)]


def _only_cast(param: Stored) -> bool:
    return all(isinstance(op, Cast) for op in param.view)


def _mapped(
    e: Equation, param: Stored, op: Callable[[jax.Array], jax.Array], placement: Placement, stack: int | None
) -> Stored:
    """An operation on every array in which the parameter is held; a parameter of its own, under the same casts."""
    shard, grad_input, feedback = param.map_shards(lambda held: jax.tree.map(op, held))
    entered = e.scope.enter(shard, grad_input, placement, feedback=feedback, secondary_stack=stack)
    return entered.with_view_of(param)
