"""Which values of a program are the same on every device, by dataflow: constants, parameters and loop counters are.

Every device must run the same collectives. A gather may therefore stand in a branch or behind an index only if every
device takes that branch or asks for that part. A value is known to be the same if the equation that makes it is a pure
function of values that are; what is not known counts as different. Knows nothing of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerojax import _compat

# Give each device something of its own, whatever their inputs.
_DIFFERENT = frozenset({"axis_index", "ppermute", "all_to_all", "reduce_scatter", "psum_scatter", "infeed",
                        "rng_uniform", "pcast", "pvary", "shard_map"})  # fmt: skip
# Give every device the same, whatever their inputs, over all axes that the program is split over.
_COMMON = frozenset({"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"})


def output_flags(eqn: Any, inputs: Sequence[bool]) -> list[bool]:
    """Whether each output of an equation is the same on every device.

    Args:
        eqn: the equation.
        inputs: for each of its inputs, whether that is.

    >>> import jax, jax.numpy as jnp
    >>> jaxpr = jax.make_jaxpr(lambda i, x: (i + 1, i * x))(0, 1.0)
    >>> flags_of_outputs(jaxpr.jaxpr, [True, False])
    [True, False]
    """
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name in _COMMON and _spans_all_axes(eqn):
        return [True] * count
    if name in _DIFFERENT or _compat.acts_on_the_world(eqn):
        return [False] * count
    if name == "scan":
        consts, carried = _compat.scan_arity(eqn.params)
        body, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
        flags = body_flags(body, consts, carried, inputs)
        return flags_of_outputs(body, flags)
    if name == "while":
        condition, body = while_flags(eqn, inputs)
        stops_together = flags_of_outputs(_compat.open_jaxpr(eqn.params["cond_jaxpr"])[0], condition)[0]
        return [flag and stops_together for flag in body[eqn.params["body_nconsts"] :]]
    if name == "cond":
        branches = [flags_of_outputs(_compat.open_jaxpr(b)[0], inputs[1:]) for b in eqn.params["branches"]]
        return [inputs[0] and all(flags) for flags in zip(*branches, strict=True)]
    bodies = list(_compat.sub_jaxprs(eqn))
    if name in _compat.CALLS and bodies:
        return flags_of_outputs(bodies[0], inputs)
    return [all(inputs) and not any(map(_has_own_values, bodies))] * count


def flags_of_outputs(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Whether each output of an open jaxpr is the same on every device, by its inputs."""
    env = Flags(jaxpr, inputs)
    for eqn in jaxpr.eqns:
        env.step(eqn)
    return [env.of(atom) for atom in jaxpr.outvars]


class Flags:
    """What is known of the variables of a jaxpr while its equations are gone through in turn."""

    def __init__(self, jaxpr: Any, inputs: Sequence[bool]) -> None:
        # Constants of the jaxpr are values that the program has closed over: not made from this device's inputs.
        self._known = {**dict.fromkeys(jaxpr.constvars, True), **dict(zip(jaxpr.invars, inputs, strict=True))}

    def of(self, atom: Any) -> bool:
        """Whether a variable or literal is the same on every device."""
        return isinstance(atom, _compat.Literal) or self._known[atom]

    def step(self, eqn: Any) -> list[bool]:
        """Takes note of an equation; returns the flags of its inputs."""
        inputs = [self.of(atom) for atom in eqn.invars]
        self._known.update(zip(eqn.outvars, output_flags(eqn, inputs), strict=True))
        return inputs


def body_flags(body: Any, consts: int, carried: int, inputs: Sequence[bool]) -> list[bool]:
    """The flags of the inputs of a loop's body: what is carried must stay the same in every iteration.

    Args:
        body: the body's open jaxpr: constants, carried values, the rest; returns the carried values first.
        consts: number of constants.
        carried: number of carried values.
        inputs: flags of the values that enter the loop.
    """
    flags = list(inputs)
    while True:
        after = flags_of_outputs(body, flags)[:carried]
        new = [before and now for before, now in zip(flags[consts : consts + carried], after, strict=True)]
        if new == flags[consts : consts + carried]:
            return flags
        flags[consts : consts + carried] = new


def while_flags(eqn: Any, inputs: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """The flags of the inputs of the condition and of the body of a `while` equation."""
    of_cond, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    body, _ = _compat.open_jaxpr(eqn.params["body_jaxpr"])
    flags = body_flags(body, of_body, len(inputs) - of_cond - of_body, inputs[of_cond:])
    return [*inputs[:of_cond], *flags[of_body:]], flags


def _spans_all_axes(eqn: Any) -> bool:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = {axes} if isinstance(axes, str) else {a for a in axes if isinstance(a, str)}
    manual = _compat.manual_axes()
    return bool(manual) and manual <= axes and eqn.params.get("axis_index_groups") is None


def _has_own_values(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in _DIFFERENT
        or _compat.acts_on_the_world(eqn)
        or any(map(_has_own_values, _compat.sub_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )
