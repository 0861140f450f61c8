"""Equations that are run as an equivalent program, whose equations keep parameters in stored form.

A part that is picked by one index is a dynamic slice, a split is several slices, and a sum over a stack of layers is a
loop over them. The evaluator runs that program and the prediction follows it, so that both see the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_REDUCTIONS: dict[str, Callable[..., jax.Array]] = {
    "reduce_sum": jnp.sum, "reduce_max": jnp.max, "reduce_min": jnp.min,
}  # fmt: skip


def picks_one(eqn: Any) -> bool:
    """Whether an equation takes one entry of dim 0 by its index, as `jnp.take(stack, i, axis=0)` does."""
    if eqn.primitive.name != "gather":
        return False
    numbers, sizes = eqn.params["dimension_numbers"], tuple(eqn.params["slice_sizes"])
    operand, indices = (tuple(v.aval.shape) for v in eqn.invars)
    return (
        indices == (1,) and tuple(numbers.start_index_map) == (0,) and not numbers.operand_batching_dims
        and sizes == (1, *operand[1:]) and operand[0] > 0
        and tuple(numbers.collapsed_slice_dims) in ((), (0,))
    )  # fmt: skip


def sums_over_layers(eqn: Any) -> bool:
    """Whether an equation reduces a stack over dim 0: one of matrices, or anything to a scalar.

    The mean of each filter of a convolution is better computed where it is used, of the kernel that is there anyway.
    """
    shape = eqn.invars[0].aval.shape
    return (
        eqn.primitive.name in _REDUCTIONS and 0 in eqn.params["axes"] and math.prod(shape) > 0
        and (len(shape) == 3 or (len(shape) > 3 and eqn.outvars[0].aval.shape == ()))
    )  # fmt: skip


def is_rewritten(eqn: Any, replicated: Sequence[bool]) -> bool:
    """Whether an equation is always run as `rewritten`.

    Args:
        eqn: the equation.
        replicated: for each of its inputs, whether its value is the same on every device.
    """
    return eqn.primitive.name == "split" or (picks_one(eqn) and all(replicated[1:]))


def rewritten(eqn: Any) -> Any:
    """The equivalent program of an equation, as a closed jaxpr of the same inputs and outputs."""
    run = _split if eqn.primitive.name == "split" else _picked if picks_one(eqn) else _summed
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return jax.make_jaxpr(run(eqn))(*avals)


def _split(eqn: Any) -> Callable[..., list[jax.Array]]:
    axis, ends = eqn.params["axis"], np.cumsum(eqn.params["sizes"]).tolist()

    def run(x: jax.Array) -> list[jax.Array]:
        return [lax.slice_in_dim(x, a, b, axis=axis) for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    return run


def _picked(eqn: Any) -> Callable[..., list[jax.Array]]:
    params = eqn.params
    keeps, mode = not params["dimension_numbers"].collapsed_slice_dims, params["mode"]
    fills = mode in (None, lax.GatherScatterMode.FILL_OR_DROP)

    def run(x: jax.Array, indices: jax.Array) -> list[jax.Array]:
        index, last = indices[0], np.asarray(x.shape[0] - 1, indices.dtype)
        start = lax.clamp(np.zeros((), indices.dtype), index, last)
        zeros = [np.zeros((), indices.dtype)] * (x.ndim - 1)
        part = lax.dynamic_slice(x, (start, *zeros), (1, *x.shape[1:]), allow_negative_indices=False)
        out = part if keeps else lax.squeeze(part, (0,))
        if fills:
            fill = _fill_value(params.get("fill_value"), out.dtype)
            out = jnp.where(start == index, out, jnp.full(out.shape, fill, out.dtype))
        return [out]

    return run


def _fill_value(given: Any, dtype: Any) -> Any:
    if given is not None:
        return given
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    if dtype == jnp.bool_:
        return True
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max


def _summed(eqn: Any) -> Callable[..., list[jax.Array]]:
    reduce, others = _REDUCTIONS[eqn.primitive.name], tuple(axis - 1 for axis in eqn.params["axes"] if axis)

    def run(x: jax.Array) -> list[jax.Array]:
        dtype = x.dtype
        _, parts = lax.scan(lambda _, layer: (None, reduce(layer, axis=others).astype(dtype)), None, x)
        return [reduce(parts, axis=0).astype(dtype)]

    return run
