"""Small leaves that travel together: several of one kind as rows of one leaf, in one message per hop.

A message has a cost that does not depend on its size (15 to 30 us between GPUs, a round trip elsewhere), and so has
every operation that the compiler must see. Leaves that are needed at the same time are therefore joined before they
move, each slice of one device being the slices of the members, one after the other, in whole blocks: values and bytes
are those of leaves that travel by themselves. What is joined is again a leaf with a `Placement`, so that any
`Collectives` moves it.

Time to the first step of unrolled dense layers with Adam: CPU seconds to trace and lower + to compile, 8 simulated CPU
devices as 2 x 4, 16 examples on each (a fair comparison gives each device the batch that plain JAX has: XLA takes five
times as long for products of two rows as of 16). JAX 0.12, 2026-12-01, a machine that did other work too: +- 20 %.

| leaves, width | plain `jax.jit`, one device | stage 1 | stage 2 | stage 3 | ZeRO++ |
|---|---|---|---|---|---|
| 240, 16: before leaves were joined in the loss by default | 0.7 + 1.5 | 1.6 + 5.5 | 3.2 + 5.7 | 4.2 + 6.5 | |
| 240, 16 | 0.7 + 1.5 | 1.0 + 3.7 | 2.1 + 3.6 | 2.3 + 3.8 | |
| 240, 128: before | 0.7 + 1.6 | | | | 15.2 + 49.9 |
| 240, 128 | 0.7 + 1.6 | | | | 2.9 + 7.7 |
| 800, 16 | 2.0 + 6.0 | 4.4 + 20.5 | | 9.5 + 18.5 | |
| 2000, 16 | 8.6 + 28.0 | | | 23.8 + 69.4 | |

Plain JAX with the batch split over the 8 devices, nothing else sharded, took 1.0 + 2.7 for the first row. Laying the
shards of small leaves together for the optimizer's update was tried and made compiling slower (stage 3's update alone:
2.1 to 4.3 seconds), since each leaf of the state has to be cut out again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from zerojax.collectives.plain import Collectives
from zerojax.layout.placement import Placement, pad, unpad


@dataclasses.dataclass(frozen=True)
class Pack:
    """Leaves of one dtype and split that travel as one.

    Attributes:
        members: their placements.
        unit: elements of a row; the size of each member's shard is a multiple of it.
    """

    members: tuple[Placement, ...]
    unit: int = 1

    @functools.cached_property
    def ends(self) -> list[int]:
        """Where in a slice the members' slices end, in elements."""
        return list(itertools.accumulate(math.prod(p.shard_shape) for p in self.members))

    @functools.cached_property
    def placement(self) -> Placement:
        """The placement of the joined leaf: (rows, unit), or one dim where a row is an element."""
        first, rows = self.members[0], self.members[0].num_shards * self.ends[-1] // self.unit
        shape = (rows,) if self.unit == 1 else (rows, self.unit)
        path = first.path if len(self.members) == 1 else f"{first.path} and {len(self.members) - 1} more"
        return dataclasses.replace(
            first, path=path, shape=shape, dim=0, padding=0, reason="small leaves that travel together",
            spec=(None,) * len(shape),
        )  # fmt: skip

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The joined leaf, or a part of it, from the same number of slices (padded) of each member."""
        flat = [_to_slices(x, p) for x, p in zip(parts, self.members, strict=True)]
        # Else what computes the members would become one kernel with the joining, which takes long to compile.
        flat = lax.optimization_barrier(flat)
        joined = lax.concatenate(flat, 1) if len(flat) > 1 else flat[0]
        return joined.reshape(-1) if self.unit == 1 else joined.reshape(-1, self.unit)

    def part(self, joined: jax.Array, i: int) -> jax.Array:
        """The slices of one member, padded, from the joined leaf or a part of it."""
        begin = lax.optimization_barrier(np.int32(self.ends[i - 1] if i else 0))
        return self._cut(joined.reshape(-1, self.ends[-1]), i, begin)

    def parts(self, joined: jax.Array) -> list[jax.Array]:
        """`part` of every member."""
        slices = joined.reshape(-1, self.ends[-1])
        begins = lax.optimization_barrier([np.int32(n) for n in (0, *self.ends[:-1])])
        return [self._cut(slices, i, begin) for i, begin in enumerate(begins)]

    def _cut(self, slices: jax.Array, i: int, begin: Any) -> jax.Array:
        # At a place that the compiler does not know: members of one shape are cut out by one kernel, compiled once.
        size = (slices.shape[0], math.prod(self.members[i].shard_shape))
        cut = lax.dynamic_slice(slices, (np.int32(0), begin), size, allow_negative_indices=False)
        return _from_slices(cut, self.members[i])

    def full(self, joined: jax.Array, i: int) -> jax.Array:
        """One member, full and logical, from the full joined leaf."""
        return unpad(self.part(joined, i), self.members[i])

    def with_dtype(self, dtype: Any) -> Pack:
        """The same leaves in another dtype."""
        return Pack(tuple(p.with_dtype(dtype) for p in self.members), self.unit)


def groups(
    placements: Sequence[Placement | None],
    collectives: Collectives,
    limit: int,
    kinds: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Which leaves travel together: numbers of the leaves of each message, messages in the order of their first leaves.

    Args:
        placements: of the leaves in the order in which they are needed; None: it does not move.
        collectives: how they move.
        limit: bytes of full leaves in a message; a larger leaf travels by itself.
        kinds: leaves of different kinds are kept apart.

    >>> from zerojax.collectives.plain import plain_collectives
    >>> from zerojax.layout.placement import place
    >>> some = [place(name, (8, 8), np.dtype("float32"), axes=("data",), num_shards=8, min_shard_size=0)
    ...         for name in "abc"]
    >>> groups(some, plain_collectives(), 512)
    [[0, 1], [2]]
    """
    found: list[list[int]] = []
    open_groups: dict[Hashable, tuple[list[int], int]] = {}
    for i, p in enumerate(placements):
        if p is None:
            continue
        unit = collectives.unit(p)
        if not unit or p.full_bytes > limit:
            found.append([i])
            continue
        key = (unit, p.dtype, p.axes, p.num_shards, p.is_quantized, None if kinds is None else kinds[i])
        group, held = open_groups.get(key, ([], limit))
        if held + p.full_bytes > limit:
            group, held = [], 0
            found.append(group)
        group.append(i)
        open_groups[key] = group, held + p.full_bytes
    return found


def pack_of(placements: Sequence[Placement], collectives: Collectives) -> Pack:
    """The pack of one group."""
    return Pack(tuple(placements), collectives.unit(placements[0]))


def gather_together(
    shards: Sequence[jax.Array], placements: Sequence[Placement], collectives: Collectives, limit: int
) -> list[jax.Array]:
    """`Collectives.gather` of several leaves, small ones in common messages of up to `limit` bytes."""
    out: list[Any] = [None] * len(shards)
    for group in groups(placements, collectives, limit):
        if len(group) == 1:
            (i,) = group
            out[i] = collectives.gather(shards[i], placements[i])
            continue
        pack = pack_of([placements[i] for i in group], collectives)
        joined = collectives.gather(pack.join([shards[i] for i in group]), pack.placement)
        for i, x in zip(group, pack.parts(joined), strict=True):
            out[i] = unpad(x, placements[i])
    return out


def reduce_together(
    fulls: Sequence[Any],
    feedback: Sequence[Any],
    placements: Sequence[Placement | None],
    collectives: Collectives,
    limit: int,
) -> tuple[list[Any], list[Any]]:
    """`Collectives.reduce` of several leaves, small ones in common messages of up to `limit` bytes.

    Args:
        fulls: full gradients; None where there is none.
        feedback: of each, what earlier reductions lost, or None.
        placements: of each; one without is left as it is.
        collectives: how they move.
        limit: see `groups`.

    Returns:
        (reduced gradients, what these reductions lost).
    """
    moved = [None if g is None else p for g, p in zip(fulls, placements, strict=True)]
    typed = [p if p is None else p.with_dtype(g.dtype) for g, p in zip(fulls, moved, strict=True)]
    out, lost = list(fulls), list(feedback)
    for group in groups(typed, collectives, limit, [x is None for x in feedback]):
        members = [typed[i] for i in group]
        if len(group) == 1:
            (i,) = group
            out[i], lost[i] = reduce_one(fulls[i], feedback[i], moved[i], collectives)
            continue
        reduced, left = reduce_pack(
            pack_of(members, collectives), [fulls[i] for i in group], [feedback[i] for i in group], collectives  # type: ignore[arg-type]
        )
        for i, x, rest in zip(group, reduced, left, strict=True):
            out[i], lost[i] = x, rest
    return out, lost


def reduce_one(full: jax.Array, feedback: Any, placement: Any, collectives: Collectives) -> tuple[jax.Array, Any]:
    """One reduction, with feedback where there is some."""
    if feedback is None:
        return collectives.reduce(full, placement), None
    return collectives.reduce_with_feedback(full, feedback, placement)


def reduce_pack(
    pack: Pack, fulls: Sequence[jax.Array], feedback: Sequence[Any], collectives: Collectives
) -> tuple[list[jax.Array], list[Any]]:
    """One reduction of a pack: the members' shards, and what was lost of each (None without feedback)."""
    joined = pack.join([pad(x, p) for x, p in zip(fulls, pack.members, strict=True)])
    fed = None if feedback[0] is None else pack.join(feedback)
    reduced, lost = reduce_one(joined, fed, pack.placement, collectives)
    return pack.parts(reduced), [None] * len(fulls) if lost is None else pack.parts(lost)


def _to_slices(x: jax.Array, p: Placement) -> jax.Array:
    """(slices, elements of a slice), from a leaf or some slices of it."""
    assert p.dim is not None
    one = p.shard_shape
    count = x.shape[p.dim] // one[p.dim] if one[p.dim] else 1
    if count > 1 and p.dim:
        split = x.reshape(*one[: p.dim], count, *one[p.dim :])
        x = lax.transpose(split, (p.dim, *(d for d in range(split.ndim) if d != p.dim)))
    return x.reshape(count, math.prod(one))


def _from_slices(x: jax.Array, p: Placement) -> jax.Array:
    """The inverse of `_to_slices`."""
    assert p.dim is not None
    one, count = p.shard_shape, x.shape[0]
    if count > 1 and p.dim:
        order = (*range(1, p.dim + 1), 0, *range(p.dim + 1, len(one) + 1))
        x = lax.transpose(x.reshape(count, *one), order)
    return x.reshape(*one[: p.dim], count * one[p.dim], *one[p.dim + 1 :])
