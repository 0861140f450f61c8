"""When weights travel: the order of gathers and reductions, stated as data dependence that no scheduler can undo.

The compiler moves a gather as early and a reduction as late as its operands allow. So that memory does not grow with
the number of layers, every gather here waits for a *token*: a scalar zero that leaves an optimisation barrier together
with the activations of an earlier use, the one `window` bytes of gathered weights before. In the backward pass the
cotangents of the tokens, zeros too, meet cotangents and reduced gradients in barriers and carry the order the other
way round.

XLA's scheduler goes backwards through the program and keeps one collective in flight for as long as compute is left:
of several that may start at the same point it hides one. So in a region, a layer under `jax.checkpoint`, uses wait
together, for the region before and no further one, and XLA's combiner makes one message of their gathers. Outside of
regions that is true of groups of uses (`zerojax.gather.groups`). The combiner must not join those of two regions: such
a message starts as late as the second can and is waited for by the first: a gather waits for the *arrival* of the
region's before it (`arrived`), a reduction for those behind it (`reduced`). In the backward pass a layer's weights then
travel while the layer behind is differentiated, and gradients while the layer before is recomputed.

The compiler drops a barrier's operand whose result nobody reads: tokens are therefore handed on, each to one reader,
and summed at the end (`behind`); what they gate must be read as it leaves the barrier. Knows nothing of what is
gathered or applied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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

    Uses wait together, up to a window of them.

    Attributes:
        window: bytes of weights that may be gathered ahead of their use; one use ahead is always allowed.
        seed: the token that new ones are made from.
        marks: points that later uses can wait for, oldest first; never empty.
        done: tokens that nothing waits for any more.
        position: bytes gathered so far.
        arrived: token, at most one, of the gathers that were joint before this region.
        reduced: token, at most one, that comes back once the gradients behind this region are reduced.
        starts: positions of the regions so far, this one's last.
    """

    def __init__(
        self,
        window: int,
        seed: Token,
        marks: Sequence[Mark],
        position: int = 0,
        *,
        arrived: Sequence[Token] = (),
        reduced: Sequence[Token] = (),
        starts: Sequence[int] = (),
    ) -> None:
        self.window, self.seed, self.position = window, seed, position
        self.marks, self.done = list(marks), list[Token]()
        self.arrived, self.reduced, self.starts = list(arrived), list(reduced), list(starts)
        self._joint: list[Mark] = []  # what the joint uses wait for, up to that position
        self._joint_end = -1
        self._arrivals, self._reductions = list[Token](), list[Token]()
        self._secondaries, self._earlier_secondaries = list[Token](), list[Token]()
        self._marked = self.marks[-1].position

    def behind(self) -> Token:
        """One token for all: a zero that exists once everything so far does."""
        return sum((*self.done, *(mark.token for mark in self.marks)), zero_token())

    def awaited(self, num_bytes: int) -> list[Mark]:
        """What a gather of so many bytes waits for: the oldest mark within the window or the last one, and those before
        for which nothing has waited."""
        if self.position + num_bytes <= self._joint_end:
            return self._joint
        self.end_joint()
        chosen = max(self._first_within(num_bytes, self.window), self._first_of_region(1))
        marks = [mark for mark in self.marks[:chosen] if not mark.waited]
        marks = [self.marks[chosen], *marks]
        for mark in marks:
            mark.waited = True
        self._joint, self._joint_end = marks, self.position + self.window
        return marks

    def awaited_by_reduction(self) -> list[Mark]:
        """The use far enough back that its gather in the backward pass can wait for a reduction made here."""
        return [self.marks[max(self._first_within(0, _REDUCED_WITHIN * self.window), self._first_of_region(2))]]

    def sets_mark(self, num_bytes: int) -> bool:
        """Whether a use of so many bytes is a point to wait for."""
        return (self.position + num_bytes - self._marked) * _MARKS_IN_WINDOW >= self.window

    def end_joint(self) -> None:
        """No further use waits with the last ones.

        In the backward pass, what waits for this region waits for its weights and its last use's inputs, recomputed.
        """
        if self._joint and all(mark is not self.marks[-1] for mark in self._joint):
            others = [self.marks[-1].token, *self._arrivals]
            hand_on(self._joint, _behind_others([mark.token for mark in self._joint], others))
        self._joint, self._joint_end = [], -1
        self._earlier_secondaries, self._secondaries = summed(self._secondaries) or self._earlier_secondaries, []
        self.arrived, self._arrivals = summed(self._arrivals) or self.arrived, []

    def arrived_after(self, before: Sequence[Token]) -> list[Token]:
        """Tokens of what had arrived before this region, once its own weights are there too.

        In the backward pass they come back once its weights, gathered again, are there.
        """
        (token,) = _behind_others(list(before), self.arrived)
        return [token + lax.stop_gradient(sum(self.arrived, zero_token()))]

    def secondary(self, make: Callable[[jax.Array], Any], shard: jax.Array) -> Any:
        """A secondary partition, made not before the uses two windows ahead of its own, nor before those of the region
        before have arrived."""
        tokens = [self.marks[self._first_within(0, _REDUCED_WITHIN * self.window)].token, *self._earlier_secondaries]
        (shard,), _ = together([shard], [lax.stop_gradient(x) for x in tokens])
        leaves, structure = jax.tree.flatten(make(shard))
        leaves, arrival = together(leaves, [lax.stop_gradient(self.seed)])
        self._secondaries += arrival
        return structure.unflatten(leaves)

    def reduces(self, tokens: Sequence[Token]) -> None:
        """Notes the tokens that a reduction hands on: they come back once it may run."""
        self._reductions += tokens

    def reduced_from_here(self) -> list[Token]:
        """A token that comes back once the gradients of this region and of those behind it are reduced."""
        return summed(self._reductions) or self.reduced

    def passed(self, num_bytes: int, token: Token | None, arrival: Sequence[Token]) -> None:
        """Notes a use, the token that exists since its inputs do, and that of its gathers."""
        self._arrivals += arrival
        if token is not None:
            self.marks.append(Mark(self.position, token))
        self.position += num_bytes
        if token is not None:
            self._marked = self.position
        first = self._first_within(0, _REDUCED_WITHIN * self.window)
        held = {id(mark) for mark in self._joint}
        self.done += [mark.token for mark in self.marks[:first] if id(mark) not in held]
        self.marks = [mark for i, mark in enumerate(self.marks) if i >= first or id(mark) in held]

    def _first_within(self, num_bytes: int, window: int) -> int:
        end = self.position + num_bytes
        within = (i for i, mark in enumerate(self.marks) if end - mark.position <= window)
        return next(within, len(self.marks) - 1)

    def region_starts(self) -> list[int]:
        """Positions of the last regions, and of the one that starts here; those of little bytes count as one."""
        far = [x for x in self.starts if (self.position - x) * _MARKS_IN_WINDOW >= self.window]
        return [*far[-2:], self.position]

    def _first_of_region(self, before: int) -> int:
        """The first mark of the region so many before this one: more freedom is no use to a scheduler that keeps one
        collective in flight for as long as it may."""
        if len(self.starts) <= before:
            return 0
        start = self.starts[-1 - before]
        return next((i for i, mark in enumerate(self.marks) if mark.position >= start), len(self.marks) - 1)

    def hold(self, values: list[Any], marks: Sequence[Mark]) -> list[Any]:
        """The values, not before the marks; what follows on them cannot be merged with what does not wait."""
        held, tokens = _hold(values, [*(mark.token for mark in marks), *self.arrived])
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

    def leave(
        self,
        end: Progress,
        left: Sequence[Token],
        done: Sequence[Token],
        arrived: Sequence[Token],
        reduced: list[Token],
    ) -> None:
        """Moves on to the end of a region, whose tokens came out so."""
        self._arrivals, self._reductions = list(arrived), reduced
        self.marks = end.marks_of(left)
        self.done += done
        self.position, self._marked = end.position, end.marked


def hand_on(marks: Sequence[Mark], tokens: Sequence[Token]) -> None:
    """Lets the marks be met by their tokens as another operation has returned them."""
    for mark, token in zip(marks, tokens, strict=True):
        mark.token = token


def summed(tokens: Sequence[Token]) -> list[Token]:
    """One token that exists once all do; none of none."""
    return [sum(tokens[1:], tokens[0])] if tokens else []


@jax.custom_vjp
def _behind_others(tokens: list[Token], others: list[Token]) -> list[Token]:
    """The tokens, whose cotangents wait for the others as the backward pass has them."""
    return tokens


def _behind_others_backward(others: list[Token], cotangents: list[Token]) -> tuple[list[Token], list[Token]]:
    tokens, others = together(cotangents, others)
    return [tokens[0] + sum(others), *tokens[1:]], [jnp.zeros_like(x) for x in others]


_behind_others.defvjp(lambda tokens, others: (tokens, others), _behind_others_backward)


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
