"""The table of primitives: how an equation is run that takes a parameter in stored form.

The evaluator runs by it and the prediction follows parameters by it, so that both enter the same calls and loops. What
it does not name gathers the parameter and is applied, which is always correct.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from zerojax import _compat


class Kind(enum.Enum):
    """How an equation that takes a stored parameter is run."""

    VIEW = "rearranges, repeats or copies one operand: applied after the gather"
    CAST = "a narrowing is done on the shards, any other after the gather"
    SLICE = "taken from the shards, where its place is the same on every device"
    SQUEEZE = "a leading dim of one layer is dropped on the shards"
    STOP = "the parameter goes on without a gradient"
    STACK = "joins parameters of one placement: done on the shards"
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
    **dict.fromkeys(("slice", "dynamic_slice"), Kind.SLICE),
    "squeeze": Kind.SQUEEZE,
    "stop_gradient": Kind.STOP,
    **dict.fromkeys(("stack", "concatenate"), Kind.STACK),
    **dict.fromkeys(("add", "add_any", "sub", "mul", "div", "rem", "neg", "abs", "sign", "max", "min", "clamp",
                     "select_n", "square", "sqrt", "rsqrt", "cbrt", "pow", "integer_pow", "exp", "exp2", "expm1",
                     "log", "log1p", "tanh", "logistic", "sin", "cos", "erf", "floor", "ceil", "round", "is_finite",
                     "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor",
                     "reduce_sum", "reduce_max", "reduce_min"), Kind.DEFER),
    **dict.fromkeys(_compat.CALLS, Kind.CALL),
    **dict.fromkeys(("remat2", "checkpoint", "remat"), Kind.CHECKPOINT),
    "scan": Kind.SCAN,
    "while": Kind.WHILE,
    "cond": Kind.COND,
    **dict.fromkeys(("custom_vjp_call", "custom_vjp_call_jaxpr", "custom_jvp_call"), Kind.CUSTOM),
}  # fmt: skip

# Parameters that a deferred value is computed from, at most: its use gathers them together.
DEFERRED_AT_ONCE = 3
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
    if kind not in _GOES_THROUGH and _compat.acts_on_the_world(eqn):
        return Kind.EFFECT
    if kind is Kind.VIEW and len(eqn.invars) > 1:  # a shape given by an operand
        return Kind.GATHER
    if kind is Kind.SLICE and not all(replicated[1:]):
        # Each device would send the others a part that they did not ask for.
        return Kind.GATHER
    if kind is Kind.COND and not replicated[0]:
        return Kind.GATHER  # devices in another branch would not take part in the collectives of this one
    if kind is Kind.DEFER and not all(replicated):
        return Kind.GATHER  # it takes part in the computation on this device's batch
    if kind is Kind.STACK and eqn.params.get("axis", eqn.params.get("dimension")) != 0:
        return Kind.GATHER
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
