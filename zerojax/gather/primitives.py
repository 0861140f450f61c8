"""The table of primitives: how an equation is run that takes a parameter in stored form.

The evaluator runs by it and the prediction follows parameters by it, so that both enter the same calls and loops. What
it does not name gathers the parameter and is applied, which is always correct.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

from zerojax import _compat
from zerojax.gather.rewritten import is_rewritten


class Kind(enum.Enum):
    """How an equation that takes a stored parameter is run."""

    VIEW = "rearranges, repeats or copies one operand: applied after the gather"
    CAST = "a narrowing is done on the shards, any other after the gather"
    SLICE = "taken from the shards, where its place is the same on every device"
    SQUEEZE = "a leading dim of one layer is dropped on the shards"
    STOP = "the parameter goes on without a gradient"
    STACK = "joins parameters of one placement: done on the shards"
    REWRITE = "run as an equivalent program (`zerojax.gather.rewritten`)"
    DEFER = "cheap, of parameters and of what all devices share: left to whatever uses the result"
    CALL = "its jaxpr is run in place of the equation"
    CHECKPOINT = "entered; rebuilt around the body in stored form"
    SCAN = "entered; one layer is gathered in each iteration"
    WHILE = "entered; every device runs as many iterations"
    COND = "entered, where every device takes the same branch"
    CUSTOM = "entered; the user's rule is run in stored form"
    EFFECT = "reads or writes a reference, or calls the host: gathered before it, which is then run once, as it is"
    GATHER = "gathers the parameter and is applied"


PRIMITIVES: dict[str, Kind] = {
    **dict.fromkeys(("transpose", "reshape", "expand_dims", "broadcast_in_dim", "rev", "copy", "copy_p",
                     "sharding_constraint", "reshard", "mesh_cast", "layout_constraint"), Kind.VIEW),
    "convert_element_type": Kind.CAST,
    **dict.fromkeys(("slice", "dynamic_slice", "gather"), Kind.SLICE),
    "split": Kind.REWRITE,
    "squeeze": Kind.SQUEEZE,
    "stop_gradient": Kind.STOP,
    **dict.fromkeys(("stack", "concatenate"), Kind.STACK),
    **dict.fromkeys(("add", "add_any", "sub", "mul", "div", "rem", "neg", "abs", "sign", "max", "min", "clamp",
                     "select_n", "square", "sqrt", "rsqrt", "cbrt", "pow", "integer_pow", "exp", "exp2", "expm1",
                     "log", "log1p", "tanh", "logistic", "sin", "cos", "erf", "floor", "ceil", "round", "is_finite",
                     "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor",
                     "reduce_sum", "reduce_max", "reduce_min", "dot_general", "pad"), Kind.DEFER),
    **dict.fromkeys(_compat.CALLS, Kind.CALL),
    **dict.fromkeys(("remat2", "checkpoint", "remat"), Kind.CHECKPOINT),
    "scan": Kind.SCAN,
    "while": Kind.WHILE,
    "cond": Kind.COND,
    **dict.fromkeys(("custom_vjp_call", "custom_vjp_call_jaxpr", "custom_jvp_call"), Kind.CUSTOM),
}  # fmt: skip

# What a deferred value is computed from, at most, as a multiple of its largest parameter: its use gathers all of it.
DEFERRED_AT_ONCE = 3
# Their results are larger than their operands: as arrays they would take more memory than the parameters.
_GROWING = frozenset({"dot_general", "concatenate", "stack", "pad"})
# Regions whose equations are looked at one by one, so that only those with an effect gather first.
_GOES_THROUGH = (Kind.CALL, Kind.CHECKPOINT, Kind.SCAN)
_MOVES_DIMS = frozenset({"reshape", "squeeze", "expand_dims", "transpose", "rev",
                         "reduce_sum", "reduce_max", "reduce_min"})  # fmt: skip


def kind_of(eqn: Any, replicated: Sequence[bool]) -> Kind:
    """How an equation is run that takes a stored parameter.

    Args:
        eqn: the equation.
        replicated: for each of its inputs, whether its value is the same on every device.
    """
    kind = PRIMITIVES.get(eqn.primitive.name, Kind.GATHER)
    if is_rewritten(eqn, replicated):
        return Kind.REWRITE
    if kind not in _GOES_THROUGH and _compat.acts_on_the_world(eqn):
        return Kind.EFFECT
    if kind is Kind.VIEW and len(eqn.invars) > 1:  # a shape given by an operand
        return Kind.GATHER
    if kind is Kind.SLICE and not all(replicated[1:]):
        # Each device would send the others a part that they did not ask for.
        return Kind.GATHER
    if kind is Kind.SLICE and math.prod(eqn.outvars[0].aval.shape) > math.prod(eqn.invars[0].aval.shape):
        return Kind.GATHER  # a lookup of more rows than there are
    if kind is Kind.STACK and eqn.params.get("axis", eqn.params.get("dimension")) != 0:
        kind = Kind.DEFER
    if kind is Kind.COND and not replicated[0]:
        return Kind.GATHER  # devices in another branch would not take part in the collectives of this one
    if kind is Kind.DEFER and not all(replicated):
        return Kind.GATHER  # it takes part in the computation on this device's batch
    if kind is Kind.CUSTOM and eqn.params.get("symbolic_zeros"):
        return Kind.GATHER
    if kind is Kind.CHECKPOINT and eqn.params["differentiated"]:
        return Kind.GATHER
    return kind


def layer_flags(eqn: Any, length: int) -> list[bool] | None:
    """For each input of a deferred equation, whether its dim 0 runs along a stack of layers, as the result's does.

    Returns:
        The flags; None where a layer of the result is not computed from the same layer of the inputs.
    """
    name, params = eqn.primitive.name, eqn.params
    out, shapes = tuple(eqn.outvars[0].aval.shape), [tuple(v.aval.shape) for v in eqn.invars]
    if out[:1] != (length,):
        return None
    if name == "dot_general":
        return _layers_of_product(params["dimension_numbers"], shapes)
    if params.get("dimension", params.get("axis", 1)) == 0 and name in ("concatenate", "stack"):
        return None
    if name == "stack":
        return [True] * len(shapes)
    if name == "pad" and params["padding_config"][0] != (0, 0, 0):
        return None
    if name == "broadcast_in_dim":
        (dims, shape) = params["broadcast_dimensions"], shapes[0]
        along = 0 in dims and shape[dims.index(0)] == length
        return [along] if not along or dims.index(0) == 0 else None
    if name in _MOVES_DIMS:
        moved = params.get("axes", params.get("dimensions")) or ()
        stays = shapes[0][:1] == (length,) and 0 not in moved and params.get("permutation", (0,))[0] == 0
        return [True] if stays else None
    # Scalars, and extents of 1 in an operand of the same rank, are repeated.
    return [shape[:1] == (length,) for shape in shapes] if all(len(s) in (0, len(out)) for s in shapes) else None


def defers(eqn: Any, held: Sequence[bool], sizes: Sequence[int], flags: Sequence[bool] | None) -> bool:
    """Whether the result of a cheap equation is better computed where it is used than here.

    Args:
        eqn: the equation, of kind DEFER or STACK.
        held: for each of its inputs, whether it stands for parameters.
        sizes: numbers of elements of the different parameters that the result is computed from.
        flags: its `layer_flags`, where all that it is computed from goes layer by layer; else None.
    """
    out = tuple(eqn.outvars[0].aval.shape)
    size = math.prod(out)
    by_layer = flags is not None and len(out) > 2 and any(h and f for h, f in zip(held, flags, strict=True))
    grows = size > max(math.prod(v.aval.shape) for v, h in zip(eqn.invars, held, strict=True) if h)
    if not out or (not by_layer and sum(sizes) > DEFERRED_AT_ONCE * max(sizes)):
        return False
    if eqn.primitive.name == "dot_general":  # of two matrices: one of low rank
        return by_layer or (all(held) and grows)
    return not grows or eqn.primitive.name in _GROWING


def _layers_of_product(numbers: Any, shapes: Sequence[tuple[int, ...]]) -> list[bool] | None:
    (contracted, of_right), (batch, right_batch) = numbers
    if batch:
        return [True, True] if batch[0] == 0 and right_batch[0] == 0 else None
    if len(contracted) == len(shapes[0]):
        return None if 0 in of_right else [False, True]
    return None if 0 in contracted else [True, False]


def holds_loop(jaxpr: Any) -> bool:
    """Whether there is a loop in a jaxpr, at any depth."""
    return any(
        PRIMITIVES.get(eqn.primitive.name) in (Kind.SCAN, Kind.WHILE) or any(map(holds_loop, _compat.sub_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )
