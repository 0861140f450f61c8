"""Where a loss uses each parameter: in which dtype, once or once per layer, and whether its backward pass reads it.

What a placement cannot know about traffic is in the loss itself: a float32 parameter that is cast to bfloat16 travels
in 2 bytes, a stack that is scanned over moves one layer at a time, and the table of an embedding lookup is not read
again by the backward pass. This follows the parameters through the traced loss, with nothing compiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax import _compat

# Operations that only rearrange, repeat or copy: the parameter goes on under another shape.
_VIEWS = frozenset({"transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "rev", "slice", "copy",
                    "copy_p", "sharding_constraint", "stop_gradient", "dynamic_slice"})  # fmt: skip
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat", "custom_jvp_call",
                    "custom_vjp_call", "custom_vjp_call_jaxpr"})  # fmt: skip
_CHECKPOINTS = frozenset({"remat2", "checkpoint", "remat"})
# Linear in the parameter with coefficients that do not depend on it: its value is not needed for any gradient.
_LINEAR = frozenset({"gather", "add", "add_any", "sub", "neg", "concatenate", "pad", "reduce_sum", "select_n", "psum"})


@dataclasses.dataclass(frozen=True)
class LeafUse:
    """One way in which a parameter is used.

    Attributes:
        dtype: in which it enters the computation.
        layers: length of the scan that takes it apart along dim 0; 1 outside of such a scan.
        in_backward: whether the backward pass needs its value: an operation that is not linear in it, or recomputation.
    """

    dtype: np.dtype
    layers: int = 1
    in_backward: bool = True


def leaf_uses(jaxpr: Any, num_leaves: int) -> list[tuple[LeafUse, ...]]:
    """The different uses of the first inputs of a loss.

    Args:
        jaxpr: the traced loss, `jax.make_jaxpr(loss_fn)(params, batch)`.
        num_leaves: number of leading inputs to follow.

    Returns:
        For each of them its uses, one per dtype and number of layers; none for a parameter that is not used.

    >>> import jax
    >>> loss = lambda w, x: jnp.sum(x @ w.astype(jnp.bfloat16))
    >>> leaf_uses(jax.make_jaxpr(loss)(jnp.ones((4, 4)), jnp.ones((2, 4), jnp.bfloat16)), 1)
    [(LeafUse(dtype=dtype(bfloat16), layers=1, in_backward=True),)]
    """
    inner, _ = _compat.open_jaxpr(jaxpr)
    return [merged(_follow(inner, var, jnp.dtype(var.aval.dtype), 1, False)) for var in inner.invars[:num_leaves]]


def merged(uses: Sequence[LeafUse]) -> tuple[LeafUse, ...]:
    """Uses of the same dtype and layers as one: within a step they share a gather."""
    found: dict[tuple[Any, int], bool] = {}
    for use in uses:
        key = use.dtype, use.layers
        found[key] = found.get(key, False) or use.in_backward
    return tuple(LeafUse(*key, again) for key, again in found.items())


def _follow(jaxpr: Any, var: Any, dtype: np.dtype, layers: int, recomputed: bool) -> list[LeafUse]:
    uses: list[LeafUse] = []
    for eqn in jaxpr.eqns:
        for position, atom in enumerate(eqn.invars):
            if atom is var:
                uses += _of_equation(jaxpr, eqn, position, dtype, layers, recomputed)
    return uses


def _of_equation(jaxpr: Any, eqn: Any, position: int, dtype: np.dtype, layers: int, recomputed: bool) -> list[LeafUse]:
    name = eqn.primitive.name
    if name == "convert_element_type":
        new = jnp.dtype(eqn.params["new_dtype"])
        narrower = jnp.issubdtype(new, jnp.floating) and new.itemsize < dtype.itemsize
        return _follow(jaxpr, eqn.outvars[0], new if narrower else dtype, layers, recomputed)
    if name in _VIEWS and position == 0:
        return _follow(jaxpr, eqn.outvars[0], dtype, layers, recomputed)
    if name == "scan":
        consts, carried = _compat.scan_arity(eqn.params)
        body, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
        if position < consts:
            return _follow(body, body.invars[position], dtype, layers, recomputed)
        if position >= consts + carried:
            return _follow(body, body.invars[position], dtype, layers * eqn.params["length"], recomputed)
        return [LeafUse(dtype, layers)]
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr")))
    if name in _CALLS and inner is not None:
        body, _ = _compat.open_jaxpr(inner)
        if len(body.invars) == len(eqn.invars):
            return _follow(body, body.invars[position], dtype, layers, recomputed or name in _CHECKPOINTS)
    return [LeafUse(dtype, layers, recomputed or name not in _LINEAR)]


def traced_flops(jaxpr: Any, *, recomputed: bool = True) -> int:
    """FLOP of forward and backward in matrix products, from a traced loss: 3 of each, 4 where it is recomputed.

    An estimate for when nothing is compiled: the backward pass of a product is two of its size.

    >>> import jax
    >>> traced_flops(jax.make_jaxpr(lambda w, x: jnp.sum(x @ w))(jnp.ones((8, 8)), jnp.ones((2, 8))))
    768
    """
    return _flops(_compat.open_jaxpr(jaxpr)[0], 3, recomputed)


def _flops(jaxpr: Any, factor: int, recomputed: bool) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            inner = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
            total += factor * 2 * inner * math.prod(eqn.outvars[0].aval.shape)
            continue
        again = factor + 1 if recomputed and name in _CHECKPOINTS else factor
        times = eqn.params["length"] if name == "scan" else 1
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                body = _compat.open_jaxpr(part)[0]
                if hasattr(body, "eqns"):
                    total += times * _flops(body, again, recomputed)
    return total
