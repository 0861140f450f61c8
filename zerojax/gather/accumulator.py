"""The gradient accumulator of a parameter: full-shaped zeros that cost nothing and carry its gradient to one reduction.

All uses of a parameter in one scope add up in the cotangent of the zeros, which is reduced once, in the dtype of the
compute. With an order of gathers, later gathers of the backward pass wait for the reduction, so that full gradients do
not pile up. Knows nothing of the uses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.collectives.packed import reduce_one
from zerojax.collectives.plain import Collectives
from zerojax.gather.order import Order, Token, hand_on, together
from zerojax.layout.placement import Placement

Reduce = Callable[[list[jax.Array], list[Any]], tuple[list[Any], list[Any]]]


class GradAccumulator:
    """Where the gradient of one parameter in one scope adds up and is reduced, made at the first use.

    Attributes:
        zeros: full-shaped zeros that no computation reads; their cotangent, reduced, is the cotangent of `grad_input`.
            With feedback, the cotangent of `feedback` is what this reduction lost: the feedback of the next step.
    """

    def __init__(
        self,
        collectives: Collectives,
        order: Order | None,
        fed_back: dict[str, object],
        grad_input: jax.Array,
        feedback: jax.Array | None,
        placement: Placement,
    ) -> None:
        self._collectives, self._order, self._fed_back = collectives, order, fed_back
        self._grad_input, self._feedback, self._placement = grad_input, feedback, placement

    @functools.cached_property
    def zeros(self) -> jax.Array:
        """See the class."""
        collectives, placement = self._collectives, self._placement

        def reduce(fulls: list[jax.Array], feedback: list[Any]) -> tuple[list[Any], list[Any]]:
            reduced, lost = reduce_one(fulls[0], feedback[0], placement, collectives)
            return [reduced], [lost]

        (zeros,) = expanded_zeros(
            [self._grad_input], [self._feedback], [placement], reduce, self._order, self._fed_back
        )
        return zeros


def expanded_zeros(
    grad_inputs: Sequence[jax.Array],
    feedback: Sequence[Any],
    placements: Sequence[Placement],
    reduce: Reduce,
    order: Order | None,
    fed_back: dict[str, object],
) -> list[jax.Array]:
    """Full-shaped zeros for some parameters; their cotangents, reduced together, are those of the grad_inputs.

    Args:
        grad_inputs: of each parameter.
        feedback: of each parameter, or None; its cotangent is what this reduction loses.
        placements: of the parameters.
        reduce: (full gradients, feedback) -> (shards, what was lost); holds no array.
        order: of the gathers, which wait for the reduction.
        fed_back: by key path, the one reduction that takes the leaf's feedback.
    """
    # The rules below outlive the trace in its equations: they must not hold on to its arrays.
    reduction, marks = object(), [] if order is None else order.awaited_by_reduction()
    num_marks, behind = len(marks), [] if order is None else order.reduced

    def zeros(grad_inputs: list[jax.Array]) -> list[jax.Array]:
        return [jnp.zeros(p.shape, x.dtype) for x, p in zip(grad_inputs, placements, strict=True)]

    @jax.custom_vjp
    def expand(grad_inputs: list[Any], feedback: list[Any], tokens: list[Token]) -> tuple[list[Any], list[Token]]:
        return zeros(grad_inputs), tokens

    def fwd(grad_inputs: list[Any], feedback: list[Any], tokens: list[Token]) -> tuple[Any, list[Any]]:
        return (zeros(grad_inputs), tokens), feedback

    def bwd(feedback: list[Any], cotangents: tuple[list[Any], list[Token]]) -> tuple[list[Any], list[Any], Any]:
        found, tokens = cotangents
        found, after = together(found, tokens[num_marks:])
        tokens = [*tokens[:num_marks], *after]
        for lost, p in zip(feedback, placements, strict=True):
            if lost is not None:
                claim_feedback(fed_back, p, reduction)
        reduced, lost = reduce(found, feedback)
        reduced, tokens = together(reduced, tokens)
        return reduced, lost, tokens

    expand.defvjp(fwd, bwd)
    out, tokens = expand(list(grad_inputs), list(feedback), [*(mark.token for mark in marks), *behind])
    hand_on(marks, tokens[:num_marks])
    if order is not None:
        order.reduces(tokens[num_marks:])
    return out


def claim_feedback(fed_back: dict[str, object], placement: Placement, reduction: object) -> None:
    """Notes that a reduction takes the leaf's error feedback.

    Raises:
        ValueError: another one does already.
    """
    if fed_back.setdefault(placement.path, reduction) is not reduction:
        raise ValueError(
            f"error_feedback: the gradient of params{placement.path} is reduced in more than one place (inside and "
            "outside a loop, or in two dtypes), and its feedback can enter only one; turn error_feedback off"
        )
