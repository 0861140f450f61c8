"""When weights travel: the order of gathers and reductions, stated as data dependence that no scheduler can undo.

The compiler moves a gather as early and a reduction as late as its operands allow. So that memory does not grow with
the number of layers, every gather here waits for a *token*: a scalar zero that leaves an optimisation barrier together
with the activations of an earlier use, the one `window` bytes of gathered weights before. In the backward pass the
cotangents of the tokens, zeros too, meet cotangents and reduced gradients in barriers and carry the order the other
way round. The compiler drops a barrier's operand whose result nobody reads: tokens are therefore handed on, each to one
reader, and summed at the end (`behind`); what they gate must be read as it leaves the barrier. Knows nothing of what is
gathered or applied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

Token = jax.Array
# Uses set a mark once their weights make up this part of the window.
_MARKS_IN_WINDOW = 64
# Windows of weights that are gathered again before a gradient must have been reduced: else its wire would wait idle.
_REDUCED_WITHIN = 2
# Marks handed on into and out of a region; each is an argument of it.
_MOST_MARKS = 6


def together(values: Sequence[Any], tokens: Sequence[Token]) -> tuple[list[Any], list[Token]]:
    """Values and tokens, none of them before all are there."""
    if not jax.tree.leaves(values) or not tokens:
        return list(values), list(tokens)
    out = lax.optimization_barrier((list(values), list(tokens)))
    return out[0], out[1]


def zero_token() -> Token:
    """A token of which nothing is known yet."""
    return jnp.zeros((), jnp.float32)


@dataclasses.dataclass
class Mark:
    """A point of the program: bytes gathered before it, the token that exists from it on, whether a gather has waited
    for it."""

    position: int
    token: Token
    waited: bool = False


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a region has come, without its tokens: of each mark, its position and whether a gather has waited."""

    marks: tuple[tuple[int, bool], ...]
    position: int
    marked: int

    def marks_of(self, tokens: Sequence[Token]) -> list[Mark]:
        """The marks, met by these tokens."""
        return [Mark(position, token, waited) for (position, waited), token in zip(self.marks, tokens, strict=True)]


class Order:
    """How far the program has come in one region, in bytes of weights gathered, and the tokens on the way.

    Attributes:
        window: bytes of weights that may be gathered ahead of their use; one use ahead is always allowed.
        seed: the token that new ones are made from.
        marks: points that later uses can wait for, oldest first; never empty.
        done: tokens that nothing waits for any more.
        position: bytes gathered so far.
    """

    def __init__(self, window: int, seed: Token, marks: Sequence[Mark], position: int = 0) -> None:
        self.window, self.seed, self.position = window, seed, position
        self.marks, self.done = list(marks), []
        self.group: list[Mark] = []
        self.group_end, self.group_bytes = -1, 0
        self.arrivals: list[Token] = []  # of the group
        self.before: list[Token] = []  # what has arrived of the groups before
        self.reduced_after: list[Token] = []  # reductions of the regions behind
        self.reductions: list[Token] = []  # those of this one
        self._marked = self.marks[-1].position

    def behind(self) -> Token:
        """One token for all: a zero that exists once everything so far does."""
        return sum((*self.done, *(mark.token for mark in self.marks)), zero_token())

    def awaited(self, num_bytes: int) -> list[Mark]:
        """What a gather of so many bytes waits for: the oldest mark within the window or the last one, and those before
        for which nothing has waited."""
        if self.position + num_bytes <= self.group_end:
            return self.group
        chosen = self._first_within(num_bytes, self.window)
        marks = [mark for mark in self.marks[:chosen] if not mark.waited]
        marks = [self.marks[chosen], *marks]
        for mark in marks:
            mark.waited = True
        self.close_group()
        self.before, self.arrivals = self.arrived(), []
        if self.group_bytes:
            self.group, self.group_end = marks, self.position + self.group_bytes
        return marks

    def awaited_by_reduction(self) -> Mark:
        """The use far enough back that its gather in the backward pass can wait for a reduction made here."""
        return self.marks[self._first_within(0, _REDUCED_WITHIN * self.window)]

    def sets_mark(self, num_bytes: int) -> bool:
        """Whether a use of so many bytes is a point to wait for."""
        return (self.position + num_bytes - self._marked) * _MARKS_IN_WINDOW >= self.window

    def close_group(self) -> None:
        """Lets what waits for the group's marks in the backward pass wait for its last use, recomputed, and no other."""
        if self.group and self.marks[-1] not in self.group:
            tokens = _gate([mark.token for mark in self.group], [self.marks[-1].token, *self.arrivals])
            hand_on(self.group, tokens)
        self.group = []

    def all_reductions(self) -> list[Token]:
        """A token that in the backward pass exists once the gradients from here on have been reduced."""
        return [sum(self.reductions[1:], self.reductions[0])] if self.reductions else self.reduced_after

    def arrived(self) -> list[Token]:
        """A token that exists once all gathers of the group have arrived; none where there was none."""
        return [sum(self.arrivals[1:], self.arrivals[0])] if self.arrivals else self.before

    def passed(self, num_bytes: int, token: Token | None, arrival: Sequence[Token]) -> None:
        """Notes a use, the token that exists since its inputs do, and that of its gathers."""
        self.arrivals += arrival
        if token is not None:
            self.marks.append(Mark(self.position, token))
        self.position += num_bytes
        if token is not None:
            self._marked = self.position
        first = self._first_within(0, _REDUCED_WITHIN * self.window)
        held = {id(mark) for mark in self.group} if self.position < self.group_end else set()
        self.done += [mark.token for mark in self.marks[:first] if id(mark) not in held]
        self.marks = [mark for i, mark in enumerate(self.marks) if i >= first or id(mark) in held]

    def _first_within(self, num_bytes: int, window: int) -> int:
        end = self.position + num_bytes
        within = (i for i, mark in enumerate(self.marks) if end - mark.position <= window)
        return next(within, len(self.marks) - 1)

    def hold(self, values: list[Any], marks: Sequence[Mark]) -> list[Any]:
        """The values, not before the marks; what follows on them cannot be merged with what does not wait."""
        held, tokens = _hold(values, [*(mark.token for mark in marks), *self.before])
        hand_on(marks, tokens[: len(marks)])
        return held

    def through(self, values: Sequence[Any]) -> list[Any]:
        """The values as they are; all that comes later waits for them, and in the backward pass for their cotangents.

        For the boundaries of a loop, inside which no gather is ordered from outside.
        """
        real = [i for i, x in enumerate(values) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
        if not real:
            return list(values)
        passed, token, done = _through([values[i] for i in real], self.seed, [mark.token for mark in self.marks])
        new = dict(zip(real, passed, strict=True))
        self.done += done
        self.marks = [Mark(self.position, token)]
        return [new.get(i, x) for i, x in enumerate(values)]

    def handed_on(self) -> list[Mark]:
        """The marks that what follows this region can still wait for."""
        step = -(-len(self.marks) // _MOST_MARKS)
        kept = {*range(0, len(self.marks), step), len(self.marks) - 1}  # waiting for a later one is always correct
        self.done += [mark.token for i, mark in enumerate(self.marks) if i not in kept]
        self.marks = [mark for i, mark in enumerate(self.marks) if i in kept]
        return self.marks

    @property
    def progress(self) -> Progress:
        """How far the region has come, as a value that holds no token."""
        return Progress(tuple((mark.position, mark.waited) for mark in self.marks), self.position, self._marked)

    def leave(self, end: Progress, left: Sequence[Token], done: Sequence[Token]) -> None:
        """Moves on to the end of a region, whose tokens came out as `left` and `done`."""
        self.marks = end.marks_of(left)
        self.done += done
        self.position, self._marked = end.position, end.marked


def hand_on(marks: Sequence[Mark], tokens: Sequence[Token]) -> None:
    """Lets the marks be met by their tokens as another operation has returned them."""
    for mark, token in zip(marks, tokens, strict=True):
        mark.token = token


@jax.custom_vjp
def _gate(tokens: list[Token], others: list[Token]) -> list[Token]:
    return tokens


def _gate_backward(others: list[Token], cotangents: list[Token]) -> tuple[list[Token], list[Token]]:
    tokens, others = together(cotangents, others)
    tokens = [tokens[0] + sum(others), *tokens[1:]]
    return tokens, [jnp.zeros_like(x) for x in others]


_gate.defvjp(lambda tokens, others: (tokens, others), _gate_backward)


@jax.custom_vjp
def _hold(values: list[Any], tokens: list[Token]) -> tuple[list[Any], list[Token]]:
    return together(values, tokens)


def _hold_forward(values: list[Any], tokens: list[Any]) -> tuple[Any, None]:
    return together(*jax.tree.map(lambda x: x.value, (values, tokens))), None


def _hold_backward(_: None, cotangents: Any) -> Any:
    return jax.tree.map(lambda c: None if isinstance(c, SymbolicZero) else c, cotangents)


_hold.defvjp(_hold_forward, _hold_backward, symbolic_zeros=True)


@jax.custom_vjp
def _through(values: list[Any], seed: Token, tokens: list[Token]) -> tuple[list[Any], Token, list[Token]]:
    passed, (token,) = together(values, [seed])
    return passed, token, tokens


def _through_backward(_: None, cotangents: tuple[list[Any], Token, list[Token]]) -> tuple[Any, Token, list[Token]]:
    values, token, tokens = cotangents
    values, tokens = together(values, tokens)
    return values, token, tokens


_through.defvjp(lambda values, seed, tokens: (_through(values, seed, tokens), None), _through_backward)
