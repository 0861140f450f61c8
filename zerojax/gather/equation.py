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
from zerojax.gather.deferred import Deferred, is_held, plain
from zerojax.gather.stored import Movement, Scope, Stored

# Parameters gathered together that are more than this part of all are no longer one layer of many.
_MOST_OF_A_MODEL = 0.5
# A stack of more than this part of all elements is the layers, or the experts, of a model.
_LARGE_STACK = 0.125


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
        inputs: its inputs, local arrays and what stands for parameters: `Stored` and `Deferred`.
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
    def held(self) -> list[bool]:
        """For each input, whether it stands for parameters in stored form."""
        return [is_held(x) for x in self.inputs]

    @property
    def evaluate_plain(self) -> Callable[[Any, Sequence[Any], Scope, Sequence[bool]], list[jax.Array]]:
        """`evaluate` with every output gathered to an ordinary array; a function that does not hold this equation."""
        evaluate = self.evaluate
        return lambda *args: [plain(x) for x in evaluate(*args)]

    def bound(self) -> Callable[[Sequence[Any]], list[jax.Array]]:
        """The equation as a function of ordinary arrays."""
        return functools.partial(_compat.bind_equation, self.eqn)


def warn_if_gathered_early(params: Sequence[Stored], layered: Sequence[bool], scope: Scope, why: str) -> None:
    """Says so where one equation gathers full parameters that are used one layer at a time, or most of a model.

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
            f"params{first.path} {first.shape}{more} gathered in full, all layers at once: {why}",
            GatherWarning,
            stacklevel=2,
        )


def warn_if_stack_is_gathered(params: Sequence[Stored], scope: Scope, why: str) -> None:
    """Says so where a stack that is a large part of a model is gathered in full for one use.

    Args:
        params: what is gathered together.
        scope: their scope.
        why: what of the use needs all of it.
    """
    for p in params:
        placement = p.placement
        moved = scope.collectives.gather_bytes(placement, dict.fromkeys(placement.axes, 2))
        if len(placement.shape) > 2 and moved and math.prod(placement.shape) > _LARGE_STACK * scope.total > 0:
            warnings.warn(
                f"params{placement.path} {placement.shape} is gathered in full: {why}; a loop over it (lax.scan, "
                "lax.map) would gather one part at a time",
                GatherWarning,
                stacklevel=2,
            )


Rebuild = Callable[[Sequence[Any], Scope], list[Any]]


def disassemble(values: Sequence[Any], *, layer: bool = False) -> tuple[list[Any], Rebuild]:
    """Takes what is held apart into arrays that can cross a function boundary.

    Args:
        values: arrays, stored parameters and deferred values.
        layer: whether what is rebuilt is one layer of each stack; not for deferred values.

    Returns:
        (an array or pytree of arrays per value, a function that rebuilds the values from them in another scope).
    """

    forms = [_form(value) for value in values]  # rules close over `rebuild`: it holds on to no array

    def rebuild(arrays: Sequence[Any], scope: Scope) -> list[Any]:
        return [_rebuilt(form, x, scope, layer) for form, x in zip(forms, arrays, strict=True)]

    return [_arrays(value) for value in values], rebuild


@dataclasses.dataclass(frozen=True)
class _Form:
    """A stored parameter without its arrays; `one_array`: the grad_input is what is held."""

    movement: Movement
    one_array: bool
    secondary_stack: int | None


def _form(value: Any) -> Any:
    if isinstance(value, Deferred):
        return value.map_leaves(_form)
    if isinstance(value, Stored):
        return _Form(value.movement, value.grad_input is value.shard, value.secondary_stack)
    return None


def _arrays(value: Any) -> Any:
    if isinstance(value, Deferred):
        return [_arrays(leaf) for leaf in value.leaves]
    if isinstance(value, Stored):  # often one array is both: it crosses once
        return value.shard, None if value.grad_input is value.shard else value.grad_input, value.feedback
    return value


def _rebuilt(form: Any, arrays: Any, scope: Scope, layer: bool) -> Any:
    if isinstance(form, Deferred):
        parts = iter(arrays)
        return form.map_leaves(lambda leaf: _rebuilt(leaf, next(parts), scope, layer))
    if not isinstance(form, _Form):
        return arrays
    shard, grad_input, feedback = arrays
    if form.one_array:
        grad_input = shard
    placement, stack = form.movement.placement, form.secondary_stack
    if layer:
        placement, stack = placement.without_leading_dim(), None if stack is None else stack - 1
    return scope.enter(shard, grad_input, placement, feedback=feedback, secondary_stack=stack).under(form.movement.view)
