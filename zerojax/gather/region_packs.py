"""Which parameters of one straight-line part of a program travel together: small ones, used near each other, directly.

The equations of a region are read before they are run. A parameter takes part where every use of it there gathers it
as it is, in one dtype; what enters a loop, a branch or a rule of its own, or is sliced, stays by itself. A pack is
gathered at its first use and handed on from use to use; in the backward pass it is gathered at the last use, which
comes first there, and handed back *as the cotangent* of what was handed on: so no full weight is a residual, and
nothing is gathered twice in one pass. The gradients of its members are reduced by one `PackAccumulator`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import _compat
from zerojax.collectives.packed import Pack, groups, pack_of, reduce_pack
from zerojax.collectives.plain import Collectives
from zerojax.gather.accumulator import expanded_zeros
from zerojax.gather.order import Order
from zerojax.gather.primitives import Kind, kind_of, layer_flags
from zerojax.gather.replicated import Flags
from zerojax.gather.views import Op, seen

# Their derivative needs no operand: in the backward pass nobody asks for what is only added.
_ADDS = frozenset({"add", "add_any", "sub"})
# The derivative of one operand needs the other: asked for only where that other one depends on a parameter.
_PRODUCTS = frozenset({"dot_general", "mul", "conv_general_dilated"})

# Of `zerojax.gather.stored`, which imports this.
Scope = Any
Stored = Any


class RegionPack:
    """Parameters of a scope that are gathered as one.

    Attributes:
        pack: how they are joined.
        source: the joined parameter, made at the first use.
        carried: what the last use has handed on: the gathered pack; None before the first use.
    """

    def __init__(
        self, scope: Scope, members: Sequence[Stored], pack: Pack, accumulator: PackAccumulator | None
    ) -> None:
        self._scope, self._members, self._accumulator = scope, members, accumulator
        self.pack = pack
        self.carried: jax.Array | None = None

    @functools.cached_property
    def source(self) -> Stored:
        """See the class."""
        joined = self._scope.enter(self.pack.join([x.shard for x in self._members]), None, self.pack.placement)
        joined.grad_accumulator = self._accumulator  # whether it has one is what counts
        return self._scope.secondary(joined)


class PackAccumulator:
    """Where the gradients of the members of a pack add up and are reduced together; see `GradAccumulator`."""

    def __init__(
        self,
        collectives: Collectives,
        order: Order | None,
        fed_back: dict[str, object],
        members: Sequence[Stored],
        pack: Pack,
    ) -> None:
        self._collectives, self._order, self._fed_back, self._pack = collectives, order, fed_back, pack
        self._inputs = [(x.grad_input, x.feedback) for x in members]

    @functools.cached_property
    def zeros(self) -> list[jax.Array]:
        """Full-shaped zeros for each member."""
        collectives, pack = self._collectives, self._pack

        def reduce(fulls: list[jax.Array], feedback: list[Any]) -> tuple[list[Any], list[Any]]:
            return reduce_pack(pack.with_dtype(fulls[0].dtype), fulls, feedback, collectives)

        grad_inputs, feedback = zip(*self._inputs, strict=True)
        return expanded_zeros(grad_inputs, feedback, pack.members, reduce, self._order, self._fed_back)


@dataclasses.dataclass(frozen=True)
class _Part:
    """The accumulator of one member."""

    of_pack: PackAccumulator
    number: int

    @property
    def zeros(self) -> jax.Array:
        """Full-shaped zeros, as of a `GradAccumulator`."""
        return self.of_pack.zeros[self.number]


def plan_packs(jaxpr: Any, args: Sequence[Any], replicated: Sequence[bool], scope: Scope, limit: int) -> None:
    """Decides which of a region's parameters travel together, and notes it in the scope.

    Args:
        jaxpr: the region, open.
        args: its inputs.
        replicated: for each, whether it is the same on every device.
        scope: of the region; its `packs` are filled in.
        limit: bytes of full leaves in a message.
    """
    candidates = [_is_candidate(x, scope) for x in args]
    if sum(candidates) < 2:
        return
    order: list[tuple[int, Any]] = []
    barred: set[int] = set()
    needed: set[int] = set()
    numbered = [i if c else None for i, c in enumerate(candidates)]
    # What enters the whole program and differs between devices is the batch; what enters a region may be anything.
    active = [not scope.barrier or same for same in replicated]
    _direct_uses(jaxpr, numbered, replicated, active, args, order, barred, needed)
    chosen: dict[int, Any] = {}
    first: dict[int, int] = {}
    position = 0
    for i, dtype in order:
        if chosen.setdefault(i, dtype) != dtype:
            barred.add(i)
        start = first.setdefault(i, position)
        if position - start > limit:  # a use far from the others would keep it all that time
            barred.add(i)
        if start == position:
            position += math.prod(args[i].placement.shape) * jnp.dtype(dtype).itemsize
    numbers = [i for i in chosen if i not in barred]
    placements = [args[i].placement.with_dtype(chosen[i]) for i in numbers]
    kinds = [(args[i].grad_input is None, args[i].feedback is None, i in needed) for i in numbers]
    for group in groups(placements, scope.collectives, limit, kinds):
        if len(group) > 1:
            scope.in_packs |= {id(args[numbers[n]]) for n in group}
            _join(scope, [_cast(args[numbers[n]], chosen[numbers[n]], scope) for n in group])


def _join(scope: Scope, members: list[Stored]) -> None:
    pack = pack_of([x.placement for x in members], scope.collectives)
    scope.in_packs |= {id(x) for x in members}
    trains = members[0].grad_input is not None
    accumulator = None
    if trains and scope.collectives.reduces:
        accumulator = PackAccumulator(scope.collectives, scope.order, scope.fed_back, members, pack)
        for number, x in enumerate(members):
            x.grad_accumulator = _Part(accumulator, number)  # type: ignore[assignment]
    if scope.collectives.gathers:
        known = accumulator if accumulator is not None or not trains else members[0].grad_accumulator
        joined = RegionPack(scope, members, pack, known)  # type: ignore[arg-type]
        scope.packs |= {id(x): (joined, number) for number, x in enumerate(members)}


def _cast(x: Stored, dtype: Any, scope: Scope) -> Stored:
    return x if x.placement.dtype == dtype else scope.cast(x, dtype)


def _is_candidate(x: Any, scope: Scope) -> bool:
    if not hasattr(x, "grad_accumulator") or x.view or x.is_secondary or x.changing is not None:
        return False
    return bool(scope.collectives.unit(x.placement))


def _direct_uses(
    jaxpr: Any,
    numbers: Sequence[int | None],
    replicated: Sequence[bool],
    active: Sequence[bool],
    args: Sequence[Any],
    order: list[tuple[int, Any]],
    barred: set[int],
    needed: set[int],
) -> list[tuple[int, Any] | None]:
    """Notes uses of some inputs in program order, those that are used in any other way, and those whose values the
    backward pass needs too. `active` says of each input whether it may depend on a parameter.

    Returns:
        For each output, (number, dtype in which it is gathered) where it is such an input, else None.
    """
    env: dict[Any, tuple[int, Any]] = {}
    for var, known in zip(jaxpr.invars, numbers, strict=True):
        if isinstance(known, tuple):
            env[var] = known
        elif known is not None:
            env[var] = known, args[known].placement.dtype
    flags = Flags(jaxpr, replicated)
    moving = {var for var, is_active in zip(jaxpr.invars, active, strict=True) if is_active}

    def read(atom: Any) -> tuple[int, Any] | None:
        return None if isinstance(atom, _compat.Literal) else env.get(atom)

    for eqn in jaxpr.eqns:
        same, found = flags.step(eqn), [read(atom) for atom in eqn.invars]
        moves = [not isinstance(atom, _compat.Literal) and atom in moving for atom in eqn.invars]
        if any(moves):
            moving.update(eqn.outvars)
        used = [x for x in found if x is not None]
        if not used:
            continue
        kind, (number, dtype) = kind_of(eqn, same), used[0]
        if kind is Kind.GATHER and not any(True for _ in _compat.sub_jaxprs(eqn)):
            order += used
            if eqn.primitive.name not in _ADDS and (eqn.primitive.name not in _PRODUCTS or sum(moves) > 1):
                needed.update(i for i, _ in used)
        elif kind is Kind.CALL:
            inner = _compat.open_jaxpr(_compat.called_jaxpr(eqn))[0]
            out = _direct_uses(inner, found, same, moves, args, order, barred, needed)  # type: ignore[arg-type]
            env.update((v, x) for v, x in zip(eqn.outvars, out, strict=True) if x is not None)
        elif kind is Kind.VIEW and _stays_a_view(eqn):
            env[eqn.outvars[0]] = number, dtype
        elif kind is Kind.CAST and (target := _cast_target(eqn, dtype)) is not None:
            env[eqn.outvars[0]] = number, target
        else:
            barred.update(i for i, _ in used)
    return [read(atom) for atom in jaxpr.outvars]


def _stays_a_view(eqn: Any) -> bool:
    before = eqn.invars[0].aval.shape
    by_layer = len(before) > 2 and layer_flags(eqn, before[0]) == [True]
    return len(eqn.invars) == 1 and not by_layer


def _cast_target(eqn: Any, held: Any) -> Any:
    """The dtype in which a parameter is gathered after a cast; None where the cast is no narrowing of it as it is."""
    new, old = jnp.dtype(eqn.params["new_dtype"]), eqn.invars[0].aval.dtype
    if new == old:
        return held
    narrows = jnp.issubdtype(new, jnp.floating) and new.itemsize <= old.itemsize and old == held
    return new if narrows else None


@dataclasses.dataclass(frozen=True)
class Read:
    """How an argument is read from what was gathered.

    Attributes:
        source: number of the source.
        pack: what the source is a pack of, or None.
        member: number of the member.
        view: shape-only operations on the member.
    """

    source: int
    pack: Pack | None
    member: int
    view: tuple[Op, ...]

    def of(self, full: jax.Array) -> jax.Array:
        """The argument."""
        return full if self.pack is None else seen(self.view, self.pack.full(full, self.member))


def sources_of(stored: Sequence[Stored], scope: Scope) -> tuple[list[Stored], list[RegionPack | None], list[Read]]:
    """What is gathered for some parameters, the packs among it, and how each parameter is read from it."""
    sources: list[Stored] = []
    packs: list[RegionPack | None] = []
    reads: list[Read] = []
    numbers: dict[int, int] = {}
    for s in stored:
        pack, member = scope.packs.get(id(s.root), (None, 0))
        if pack is None or s.is_secondary:
            reads.append(Read(len(sources), None, 0, ()))
            sources.append(scope.secondary(s))
            packs.append(None)
            continue
        if id(pack) not in numbers:
            numbers[id(pack)] = len(sources)
            sources.append(pack.source)
            packs.append(pack)
        reads.append(Read(numbers[id(pack)], pack.pack, member, s.view))
    return sources, packs, reads
