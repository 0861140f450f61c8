"""The gradient accumulator of a parameter: full-shaped zeros that cost nothing and carry its gradient to one reduction.

All uses of a parameter in one scope add up in the cotangent of the zeros, which is reduced once, in the dtype of the
compute. With an order of gathers, later gathers of the backward pass wait for the reduction, so that full gradients do
not pile up. Knows nothing of the uses.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.collectives.plain import Collectives
from zerojax.gather.order import Order, Token, hand_on, together
from zerojax.layout.placement import Placement


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
        order = self._order
        marks = [] if order is None else [order.awaited_by_reduction()]
        zeros, tokens = self._expand([mark.token for mark in marks])
        hand_on(marks, tokens)
        return zeros

    def _expand(self, tokens: list[Token]) -> tuple[jax.Array, list[Token]]:
        # The rules below outlive the trace in its equations: they must not hold on to its arrays, as `self` does.
        collectives, fed_back, placement, mark = self._collectives, self._fed_back, self._placement, object()

        @jax.custom_vjp
        def expand(grad_input: jax.Array, feedback: jax.Array | None, tokens: list[Token]) -> tuple[Any, list[Token]]:
            return jnp.zeros(placement.shape, grad_input.dtype), tokens

        def fwd(grad_input: jax.Array, feedback: jax.Array | None, tokens: list[Token]) -> tuple[Any, Any]:
            return (jnp.zeros(placement.shape, grad_input.dtype), tokens), feedback

        def bwd(feedback: Any, cotangents: tuple[jax.Array, list[Token]]) -> tuple[Any, Any, list[Token]]:
            cotangent, tokens = cotangents
            if feedback is None:
                reduced, lost = collectives.reduce(cotangent, placement), None
            elif fed_back.setdefault(placement.path, mark) is not mark:
                raise ValueError(
                    f"error_feedback: the gradient of params{placement.path} is reduced in more than one place (inside "
                    "and outside a loop, or in two dtypes), and its feedback can enter only one; turn error_feedback "
                    "off"
                )
            else:
                reduced, lost = collectives.reduce_with_feedback(cotangent, feedback, placement)
            (reduced,), tokens = together([reduced], tokens)
            return reduced, lost, tokens

        expand.defvjp(fwd, bwd)
        return expand(self._grad_input, self._feedback, tokens)
