"""One equation to be run on parameters in stored form, and the way of such parameters into a function of arrays."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zerojax import _compat
from zerojax.gather.stored import Scope, Stored


# Parameters gathered together that are more than this part of all are no longer one layer of many.
_MOST_OF_A_MODEL = 0.5


class GatherWarning(UserWarning):
    """A parameter is gathered earlier or longer than its use needs; the message names it and the way out.

    >>> import warnings
    >>> warnings.simplefilter("error", GatherWarning)  # a test of one's own that no parameter is gathered too early
    """


@dataclasses.dataclass(frozen=True)
class Equation:
    """An equation with stored parameters among its inputs.

    Attributes:
        eqn: the equation of the jaxpr.
        inputs: its inputs, local arrays and `Stored` parameters.
        replicated: for each of them, whether its value is the same on every device.
        scope: the scope of the stored inputs.
        evaluate: (jaxpr, inputs, scope, replicated) -> outputs; runs a jaxpr that the equation holds.
    """

    eqn: Any
    inputs: list[Any]
    replicated: list[bool]
    scope: Scope
    evaluate: Callable[[Any, Sequence[Any], Scope, Sequence[bool]], list[Any]]

    @property
    def stored(self) -> list[bool]:
        """For each input, whether it is in stored form."""
        return [isinstance(x, Stored) for x in self.inputs]

    def evaluate_plain(
        self, jaxpr: Any, inputs: Sequence[Any], scope: Scope, replicated: Sequence[bool]
    ) -> list[jax.Array]:
        """`evaluate` with every output gathered to an ordinary array."""
        return [plain(x) for x in self.evaluate(jaxpr, inputs, scope, replicated)]

    def bound(self) -> Callable[[Sequence[Any]], list[jax.Array]]:
        """The equation as a function of ordinary arrays."""
        return functools.partial(_compat.bind_equation, self.eqn)


def plain(x: Any) -> Any:
    """A value as an ordinary array, gathered if it is in stored form."""
    return x.full() if isinstance(x, Stored) else x


def warn_if_gathered_early(params: Sequence[Stored], layered: Sequence[bool], scope: Scope, why: str) -> None:
    """Says so where one equation gathers whole parameters that are used one layer at a time, or most of a model.

    Args:
        params: the parameters that are gathered together.
        layered: for each of them, whether what is inside the equation takes one layer at a time.
        scope: their scope.
        why: the cause and the way out, as the end of the message.
    """
    stacks = [p for p, by_layer in zip(params, layered, strict=True) if by_layer]
    size = sum(math.prod(p.placement.shape) for p in params)
    named = stacks or (params if len(params) > 1 and size > _MOST_OF_A_MODEL * scope.total else [])
    if named:
        first = named[0].placement
        more = f" and {len(named) - 1} more parameters are" if len(named) > 1 else " is"
        warnings.warn(
            f"params{first.path} {first.shape}{more} gathered whole, all layers at once: {why}",
            GatherWarning,
            stacklevel=2,
        )


Rebuild = Callable[[Sequence[Any], Scope], list[Any]]


def disassemble(values: Sequence[Any], *, layer: bool = False) -> tuple[list[Any], Rebuild]:
    """Takes stored parameters apart into arrays that can cross a function boundary.

    Args:
        values: arrays and stored parameters.
        layer: whether what is rebuilt is one layer of each stack.

    Returns:
        (one array or tuple of arrays per value, a function that rebuilds the values from them in another scope).
    """
    flat: list[Any] = []
    for value in values:
        if isinstance(value, Stored):
            # Often one array is both: it crosses once.
            grad_input = None if value.grad_input is value.shard else value.grad_input
            flat.append((value.shard, grad_input, value.feedback))
        else:
            flat.append(value)

    def rebuild(arrays: Sequence[Any], scope: Scope) -> list[Any]:
        pairs = zip(values, arrays, strict=True)
        return [_rebuilt(v, x, scope, layer) if isinstance(v, Stored) else x for v, x in pairs]

    return flat, rebuild


def _rebuilt(value: Stored, arrays: Any, scope: Scope, layer: bool) -> Stored:
    shard, grad_input, feedback = arrays
    if value.grad_input is value.shard:
        grad_input = shard
    placement, stack = value.placement, value.secondary_stack
    if layer:
        placement, stack = placement.without_leading_dim(), None if stack is None else stack - 1
    return scope.enter(shard, grad_input, placement, feedback=feedback, secondary_stack=stack).with_view_of(value)
