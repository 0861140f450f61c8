"""The order of gathers and reductions outside of regions: layers of an unrolled model that are not checkpointed.

Such layers have no bounds in the program. Uses are taken together by their bytes: a *group* is gathered in one message
once the group before has begun. In the backward pass one operation gathers the weights of a group again, placed in
the program behind the group after it; the uses take them as the cotangents of the full weights that they hand to it.
Its message then has a place between those of the gradients: after the group behind has been differentiated and reduced,
and before the gradients of the group itself travel. So there is one message to choose, and compute to hide it:

    differentiated       group 3                        group 2                        group 1
    on the wire          gradients of 4, weights of 2   gradients of 3, weights of 1   gradients of 2

What stays exposed, replayed for eight layers of an 18B GPT on 48 x 8 H100: the first hop of each group's reduction. The
scheduler takes a GPU for twice as fast as it is, hides the second hop behind all that is left of the segment, and a
reduction cannot be made to wait for what is differentiated after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from zerojax.gather.order import Mark, Order, Progress, Token, summed, together, zero_token


@dataclasses.dataclass(frozen=True)
class GatheredWeight:
    """A weight that a use has gathered.

    Attributes:
        held: what is held of it.
        gather: (held) -> full weight, as the use reads it; holds no array.
        full: the full weight, for its cotangent only.
    """

    held: Any
    gather: Callable[[Any], jax.Array]
    full: jax.Array


class GroupedOrder(Order):
    """The order of a program's top level."""

    def __init__(self, window: int, seed: Token, marks: Sequence[Mark]) -> None:
        super().__init__(window, seed, marks, reduced=[seed])
        self._weights, self._earlier = list[GatheredWeight](), list[GatheredWeight]()
        self._end = -1  # of the group, in bytes; the next one is gathered ahead too, together a window
        self._begun = list[Mark]()  # the group's own mark, at most one
        self._gate = list[Token]()  # at most one: comes back once the next use has its cotangents
        self._is_behind_region = False

    def awaited(self, num_bytes: int) -> list[Mark]:
        """What the gathers of a group wait for; one that does not fit into the group begins another."""
        if num_bytes and self.position + num_bytes > self._end:
            self.end_joint()
            if self._is_behind_region:
                self._leave_region(num_bytes)
            self._end = self.position + self.window // 2
        return self.marks

    def _leave_region(self, num_bytes: int) -> None:
        mark = self.marks[self._first_within(num_bytes, self.window)]
        self._gate = [sum((x.token for x in self.marks), zero_token())]
        self.reduced, self._reductions = summed(self._reductions) or [self.seed], []
        self.marks = [Mark(mark.position, lax.stop_gradient(mark.token))]
        self._is_behind_region = False

    def end_joint(self) -> None:
        """Ends the group."""
        super().end_joint()
        if self._is_behind_region:
            return
        self.reduced = summed([*self._reductions, *self._gate]) or self.reduced
        self._reductions, self._gate = [], []
        self._gather_again(self.reduced)
        self.reduced = self._gate or self.reduced
        self._earlier, self._weights = self._weights, []
        if self._begun:
            self.done += [mark.token for mark in self.marks]
            self.marks, self._begun = self._begun, []
        self._end = -1

    def _gather_again(self, tokens: Sequence[Token]) -> None:
        """Places the gather of the backward pass for the group before: ahead of the reductions with these tokens."""
        if self._earlier and tokens:
            (token,) = summed([*tokens, *self._gate])
            self._gate, self._earlier = [_gathered_again(self._earlier, token)], []

    def finish(self) -> None:
        """Ends the group, behind which nothing is gathered that this order knows of."""
        self.end_joint()
        self.end_joint()

    def sets_mark(self, num_bytes: int) -> bool:
        """Whether a use is the one whose inputs the next group waits for: the first."""
        return not self._begun

    def differentiates(self) -> list[Token]:
        """At most one token, for a use to hand on: it comes back once the use is differentiated."""
        self._gather_again(self._reductions)
        return self._gate

    def awaited_by_reduction(self) -> list[Mark]:
        """None: gathers wait for reductions by the tokens of these."""
        return []

    def passed(self, num_bytes: int, token: Token | None, arrival: Sequence[Token]) -> None:
        """See `Order.passed`."""
        self._arrivals += arrival
        if token is not None:
            self._begun = [Mark(self.position, lax.stop_gradient(token))]
        self.position += num_bytes

    def gathered(self, weights: Sequence[GatheredWeight], differentiated: Sequence[Token]) -> None:
        """Notes what a use has gathered, and the token of `differentiates` as it hands it on."""
        self._weights += weights
        if differentiated:
            self._reductions += differentiated
            self._gate = []

    def through(self, values: Sequence[Any]) -> list[Any]:
        """See `Order.through`."""
        self.finish()
        if not self._is_behind_region:
            self.marks += [Mark(self.position, token) for token in self.reduced]
        self.reduced, self._gate, self._is_behind_region = [self.seed], [], False
        return super().through(values)

    def handed_on(self) -> list[Mark]:
        """See `Order.handed_on`."""
        self.finish()
        if not self._is_behind_region:
            self.done += [mark.token for mark in self.marks[:-1]]
            mark = self.marks[-1]
            self.marks = [Mark(mark.position, self.reduced[0] + lax.stop_gradient(mark.token))]
            self._reductions, self._gate = self.reduced, []
        return super().handed_on()

    def leave(
        self,
        end: Progress,
        left: Sequence[Token],
        done: Sequence[Token],
        arrived: Sequence[Token],
        reduced: list[Token],
    ) -> None:
        """See `Order.leave`."""
        super().leave(end, left, done, arrived, reduced)
        self._is_behind_region = True

    def behind(self) -> Token:
        """See `Order.behind`."""
        self.finish()
        # With the arrival of the last weights, or the first gather of the backward pass would be merged with theirs.
        rest = [] if self._is_behind_region else [*self.reduced, *self.arrived]
        return sum(rest, super().behind())


def _gathered_again(weights: Sequence[GatheredWeight], token: Token) -> Token:
    """The token; in the backward pass the weights are gathered once it comes back, and it goes on once they arrive."""
    if not weights:
        return token
    # The rules below outlive the trace in its equations: they must not hold on to its arrays.
    gathers = [w.gather for w in weights]
    held, structure = jax.tree.flatten([w.held for w in weights])

    @jax.custom_vjp
    def pass_on(fulls: list[jax.Array], held: list[Any], token: Token) -> Token:
        return token

    def forward(fulls: list[jax.Array], held: list[Any], token: Token) -> tuple[Token, list[Any]]:
        return token, held

    def backward(held: list[Any], cotangent: Token) -> tuple[list[jax.Array], list[None], Token]:
        shards, (cotangent,) = together(held, [cotangent])
        fulls = [gather(x) for gather, x in zip(gathers, structure.unflatten(shards), strict=True)]
        fulls, (arrived,) = together(fulls, [zero_token()])  # the weights themselves wait for nothing further
        return fulls, [None] * len(held), cotangent + arrived

    pass_on.defvjp(forward, backward)
    return pass_on([w.full for w in weights], held, token)
