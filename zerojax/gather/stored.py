"""A parameter in stored form while the loss is evaluated, and the one operation that uses it.

`apply_with_gather` is the heart of stage 3 (arXiv 1910.02054, section 7.2.2): it gathers the shards, applies an
operation, and keeps only the *shards* for the backward pass, which gathers again and applies the operation's own VJP.
The full weight can therefore never become a residual, with or without activation checkpointing. The gradient leaves
through a full-shaped *gradient accumulator* that costs nothing: all uses of a parameter in one scope add up there and
are reduced once, in the dtype of the compute.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.collectives.plain import Collectives
from zerojax.gather.accumulator import GradAccumulator
from zerojax.gather.changes import Changing
from zerojax.gather.cotangents import after, fill, instantiated, is_inexact, take
from zerojax.gather.groups import GatheredWeight, GroupedOrder
from zerojax.gather.order import Mark, Order, Token, together
from zerojax.gather.region_packs import RegionPack, sources_of
from zerojax.gather.views import Op, seen
from zerojax.layout.placement import Placement


class Scope:
    """One region of the program in which the uses of a parameter share a grad_accumulator.

    The body of a loop, the inside of a checkpointed function and the top level are scopes of their own.

    Attributes:
        collectives: how leaves move.
        barrier: whether the backward gather must be kept apart from the forward one. True at the top level, where the
            compiler would merge them and keep the full weight alive in between; inside a loop body they lie in
            different loops, and under activation checkpointing recomputation and VJP should share one gather.
        order: where the program has come to, for what gathers wait for; None where they wait for nothing: where nothing
            is gathered, and in loops, an iteration of which is bounded as it is.
        min_loop_size: stacks of layers with fewer elements than this each are gathered before a loop, not in it.
        window: bytes of weights of a loop's next layer that are gathered while a layer computes; None: none are.
        fed_back: by key path, the one reduction that takes the leaf's error feedback; shared by nested scopes.
        total: number of elements of all stored parameters of the program; 0: not known.
        pack_bytes: bytes of full leaves that travel together, see `zerojax.gather.region_packs`; 0: none do.
        region_pack_bytes: the same of nested scopes, whose programs are compiled once for all layers.
        changed: by key path, the replicas of stacks that a loop has brought up to date.
        forward_only: nothing is differentiated here, and what a caller differentiates from outside, in either mode,
            is the inputs beside the parameters.
    """

    def __init__(
        self,
        collectives: Collectives,
        *,
        barrier: bool = True,
        min_loop_size: int = 0,
        fed_back: dict[str, object] | None = None,
        total: int = 0,
        forward_only: bool = False,
        order: Order | None = None,
        window: int | None = None,
        pack_bytes: int = 0,
        region_pack_bytes: int = 0,
    ) -> None:
        self.collectives = collectives
        self.pack_bytes, self.region_pack_bytes = pack_bytes, region_pack_bytes
        # By id of a parameter, the pack it travels in and its number there; filled in when the region is read.
        self.packs: dict[int, tuple[RegionPack, int]] = {}
        # Ids of the parameters of all packs, also before their cast: what changes their shape is done after the gather.
        self.in_packs: set[int] = set()
        self.is_planned = forward_only or not pack_bytes
        self.order = order
        self.window = window
        self.changed: dict[str, jax.Array] = {}
        self.total = total
        self.forward_only = forward_only
        self.fed_back = {} if fed_back is None else fed_back
        self.barrier = barrier
        self.min_loop_size = min_loop_size
        # By id of an array, (the array, the equation that has broadcast it, its input).
        self.broadcasts: dict[int, tuple[Any, Any, Any]] = {}
        self._casts: dict[tuple[int, np.dtype], Stored] = {}
        self._secondaries: dict[int, Stored] = {}
        self._held: dict[int, Any] = {}
        self._alive: list[Stored] = []  # keeps the ids that serve as keys from being reused

    @property
    def nested(self) -> Callable[[], Scope]:
        """Makes scopes for the body of a loop or of a checkpointed function; holds on to no array of this one, so that
        a rule that outlives the trace may close over it."""
        return functools.partial(
            Scope, self.collectives, barrier=False, min_loop_size=self.min_loop_size, fed_back=self.fed_back,
            forward_only=self.forward_only, total=self.total, window=self.window, pack_bytes=self.region_pack_bytes,
            region_pack_bytes=self.region_pack_bytes,
        )  # fmt: skip

    def enter(
        self,
        shard: Any,
        grad_input: jax.Array | None,
        placement: Placement,
        *,
        feedback: jax.Array | None = None,
        secondary_stack: int | None = None,
    ) -> Stored:
        """A parameter of this scope; `grad_input` is the shard-shaped input whose cotangent is the reduced gradient."""
        accumulator = None if grad_input is None else self._accumulator(grad_input, feedback, placement)
        aval = jax.ShapeDtypeStruct(placement.shape, placement.dtype)
        return Stored(
            self, shard, grad_input, placement, accumulator, (), aval, feedback, secondary_stack=secondary_stack
        )

    def _accumulator(self, *parts: Any) -> GradAccumulator:
        accumulator = GradAccumulator(self.collectives, self.order, self.fed_back, *parts)
        if self.order is None and not self.pack_bytes:
            _ = accumulator.zeros
        return accumulator

    def cast(self, stored: Stored, dtype: np.dtype) -> Stored:
        """The parameter in a narrower dtype, cast before it is gathered; the same cast twice is one parameter."""
        key = (id(stored.root), jnp.dtype(dtype))
        if key not in self._casts:
            shard, grad_input, _ = stored.map_shards(lambda x: lax.convert_element_type(x, dtype))
            placement = stored.placement.with_dtype(dtype)
            self._casts[key] = self.enter(shard, grad_input, placement, feedback=stored.feedback)
            self._alive.append(stored.root)
        return self._casts[key].under(stored.view)

    def held(self, stored: Sequence[Stored], marks: Sequence[Mark]) -> list[Any]:
        """What is held of parameters, not before the marks; the same for all uses, so that they share one gather."""
        if self.order is None:
            return [s.shard for s in stored]
        new = {id(s.shard): s.shard for s in stored if id(s.shard) not in self._held}
        self._held.update(zip(new, self.order.hold(list(new.values()), marks), strict=True))
        self._alive.extend(stored)
        held = [self._held[id(s.shard)] for s in stored]
        # Tokens are differentiated: what has no gradient must not seem to have one by having waited for them.
        return [x if s.grad_accumulator else lax.stop_gradient(x) for x, s in zip(held, stored, strict=True)]

    def secondary(self, stored: Stored, stack: int = 0) -> Stored:
        """The parameter held as its node-local secondary partition, made once in this scope.

        Without a secondary partition, the parameter as it is. `stack` counts leading dims that will be scanned over.
        """
        make = self.collectives.secondary
        if make is None or stored.is_secondary or not stored.placement.is_sharded:
            return stored
        root = stored.root
        if id(root) not in self._secondaries:
            made, shard = lambda x: make(x, root.placement, stack), lax.stop_gradient(root.shard)
            held = made(shard) if self.order is None else self.order.secondary(made, shard)
            self._secondaries[id(root)] = dataclasses.replace(root, shard=held, secondary_stack=stack)
            self._alive.append(root)
        return self._secondaries[id(root)].under(stored.view)


@dataclasses.dataclass(frozen=True)
class Movement:
    """How a stored parameter becomes the array that its use sees; no array is in it, so that rules may close over it.

    Attributes:
        collectives: of its scope.
        placement: of the parameter.
        view: shape-only operations applied after the gather.
        is_secondary: whether what is held is the secondary partition.
    """

    collectives: Collectives
    placement: Placement
    view: tuple[Op, ...]
    is_secondary: bool

    def gathered(self, held: Any) -> jax.Array:
        """The full array under the view, from what is held."""
        move = self.collectives.gather_secondary if self.is_secondary else self.collectives.gather
        return seen(self.view, move(held, self.placement))


@dataclasses.dataclass(eq=False)
class Stored:
    """A parameter inside a scope: what is held, and the view of it that the program has reached.

    Attributes:
        scope: the scope it belongs to.
        shard: what this device holds: the local shard at stage 3, the full leaf at stage 2, or the secondary partition.
        grad_input: local, of the shard's shape; carries the gradient out. None: no gradient is wanted. Often `shard`
            itself.
        placement: placement of the leaf as this scope sees it.
        grad_accumulator: of the parameter before the view; None: no gradient is wanted.
        view: shape-only operations applied after the gather; they close over no array.
        aval: shape and dtype after the view, as the program sees the parameter.
        feedback: what earlier reductions lost between nodes; its cotangent is what this one loses. Usually None.
        origin: the parameter before the view, or None.
        changing: the weights of a stack whose replica a loop brings up to date layer by layer; usually None.
        secondary_stack: None for a shard; for a secondary partition, its number of leading dims to be scanned over.
    """

    scope: Scope
    shard: Any
    grad_input: jax.Array | None
    placement: Placement
    grad_accumulator: GradAccumulator | None
    view: tuple[Op, ...]
    aval: jax.ShapeDtypeStruct
    feedback: jax.Array | None = None
    origin: Stored | None = None
    secondary_stack: int | None = None
    changing: Changing | None = None

    @property
    def is_secondary(self) -> bool:
        """Whether what is held is the secondary partition."""
        return self.secondary_stack is not None

    @property
    def root(self) -> Stored:
        """The parameter before any view."""
        return self if self.origin is None else self.origin

    def viewed(self, op: Op) -> Stored:
        """The parameter after a further shape-only operation, itself applied after the gather."""
        return dataclasses.replace(self, view=(*self.view, op), aval=jax.eval_shape(op, self.aval), origin=self.root)

    def holding(self, secondary: Any, stack: int) -> Stored:
        """The same parameter held as a secondary partition, of which `stack` leading dims can be scanned over."""
        return dataclasses.replace(self, shard=secondary, secondary_stack=stack)

    def under(self, view: Sequence[Op]) -> Stored:
        """The parameter after further shape-only operations."""
        return functools.reduce(Stored.viewed, view, self)

    @property
    def movement(self) -> Movement:
        """How what is held becomes the full array under the view."""
        return Movement(self.scope.collectives, self.placement, self.view, self.is_secondary)

    def gradient_holder(self) -> jax.Array | None:
        """Full-shaped zeros under the view: what the gradient of this use is the cotangent of; None: none is wanted."""
        return None if self.grad_accumulator is None else seen(self.view, self.grad_accumulator.zeros)

    def map_shards(self, op: Op) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """An operation on what is held, and the same on the grad_input and on the feedback."""
        shard = op(self.shard)
        feedback = None if self.feedback is None else op(self.feedback)
        if self.grad_input is None:
            return shard, None, None
        return shard, shard if self.grad_input is self.shard else op(self.grad_input), feedback

    def without_gradient(self) -> Stored:
        """The same parameter behind a `stop_gradient`."""
        root = None if self.origin is None else dataclasses.replace(self.root, grad_input=None, grad_accumulator=None)
        return dataclasses.replace(self, grad_input=None, grad_accumulator=None, origin=root)

    def full(self) -> jax.Array:
        """The full array as an ordinary value, for a consumer of which nothing is known."""
        (out,) = apply_with_gather(lambda args: [args[0]], [self])
        return out


def apply_with_gather(apply: Callable[[Sequence[Any]], Sequence[jax.Array]], args: Sequence[Any]) -> list[jax.Array]:
    """Applies an operation to arguments of which some are `Stored`, keeping only shards for the backward pass.

    Only what is perturbed is differentiated, as in plain JAX: an operation without a derivative may read the batch or a
    stopped parameter. A derivative of the derivative, of either mode, flows through the shards.

    Args:
        apply: the operation on plain local arrays; must not close over traced values.
        args: its arguments; `Stored` ones are gathered here and again in the backward pass.
    """
    stored = [a for a in args if isinstance(a, Stored)]
    where = [isinstance(a, Stored) for a in args]
    others = [a for a in args if not isinstance(a, Stored)]
    scope = stored[0].scope
    sources, packs, reads = sources_of(stored, scope)
    arrived = [None if pack is None else pack.carried for pack in packs]
    # The rules below outlive the trace in its equations: none of them may hold on to its arrays, as `stored` does.
    movements, barrier, has_arrived = [s.movement for s in sources], scope.barrier, [x is not None for x in arrived]
    order, moving = scope.order, [x is None and s.placement.is_sharded for s, x in zip(sources, arrived, strict=True)]
    # What is gathered again behind this use comes back as the cotangent of the full weight that is handed on to it.
    groups = order if isinstance(order, GroupedOrder) and not scope.forward_only else None
    is_handed = [groups is not None or pack is not None for pack in packs]
    num_bytes = sum(s.placement.full_bytes for s in take(sources, moving))
    marks = [] if order is None else order.awaited(num_bytes)
    trains = any(s.grad_accumulator is not None for s in stored)
    may_mark = trains or scope.forward_only or groups is not None
    sets_mark = order is not None and may_mark and order.sets_mark(num_bytes)
    sources_held = scope.held(sources, marks)
    # Flat, since the rules below are given marked leaves, which a quantised array could not hold.
    held, structure = jax.tree.flatten(sources_held)
    holders = [s.gradient_holder() for s in stored if s.grad_accumulator is not None]
    has_holder = [s.grad_accumulator is not None for s in stored]

    def gathered(shards: Sequence[Any], carried: Sequence[Any]) -> tuple[list[jax.Array], list[jax.Array]]:
        """The full arrays, and those handed on; `carried`: sources that are there already, or None."""
        parts = zip(movements, structure.unflatten(shards), carried, strict=True)
        fulls = [move.gathered(held) if x is None else x for move, held, x in parts]
        return [read.of(fulls[read.source]) for read in reads], take(fulls, is_handed)

    def merged(fulls: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        of_stored, of_rest = iter(fulls), iter(rest)
        return [next(of_stored) if is_stored else next(of_rest) for is_stored in where]

    def forward(shards: Sequence[Any], rest: Sequence[Any], carried: Sequence[Any], arrival: list[Token]) -> list[Any]:
        fulls, handed = gathered(shards, fill([None] * len(has_arrived), has_arrived, carried))
        fulls, arrival = together(fulls, arrival)  # before any of them is used
        return [list(apply(merged(fulls, rest))), handed, arrival]

    # One equation, which keeps its inputs and no full weight: a loop around it must not take the gather out of it.
    recomputed = jax.checkpoint(forward)
    # Tokens, none without an order: of the mark set here, of the gathers' arrival, and one that comes back with the
    # cotangents. Only the last is differentiated: what has no derivative must not seem to have one.
    seed = [lax.stop_gradient(order.seed)] if order is not None and sets_mark else []
    arrival = [lax.stop_gradient(order.seed)] if order is not None and num_bytes else []
    noted = groups.differentiates() if groups is not None and trains else []

    def passed(out: list[Any], handed: list[Any], arrival: list[Token], seed: list[Token], noted: list[Token]) -> Any:
        weights = []
        parts = zip(*(take(x, is_handed) for x in (packs, sources_held, movements)), handed, strict=True)
        for pack, source_held, movement, x in parts:
            if pack is None:
                weights.append(GatheredWeight(source_held, movement.gathered, x))
            else:
                pack.carried = x
        if order is not None:
            arrival = [lax.stop_gradient(x) for x in arrival]
            order.passed(num_bytes, seed[0] if seed else None, arrival)
        if groups is not None:
            groups.gathered(weights, noted)
        return out

    if scope.forward_only:
        others, seed = together(others, seed)
        out, handed, arrival = recomputed(held, others, [], arrival)
        return passed(out, handed, arrival, seed, noted)

    @jax.custom_vjp
    def op(shards: list[Any], holders: list[Any], rest: list[Any], carried: list[Any], *tokens: list[Token]) -> _Out:
        arrival, seed, noted = tokens
        rest, seed = together(rest, seed)
        return *forward(shards, rest, carried, arrival), seed, noted

    def fwd(shards: list[Any], holders: list[Any], rest: list[Any], *more: list[Any]) -> tuple[_Out, Any]:
        values, inputs, carried, arrival, seed, noted = ([x.value for x in part] for part in (shards, rest, *more))
        inputs, seed = together(inputs, seed)
        perturbed = _Perturbed(tuple(x.perturbed for x in holders), tuple(x.perturbed for x in rest))
        out, handed, arrival = recomputed(values, inputs, carried, arrival)
        return (list(out), handed, arrival, seed, noted), (values, inputs, perturbed)

    def bwd(residuals: Any, outputs: tuple[list[Any], ...]) -> tuple[Any, ...]:
        shards, rest, were = residuals
        outs, handed_back, *tokens = outputs
        unused = all(isinstance(c, jax.custom_derivatives.SymbolicZero) for c in outs)
        # What a later use has gathered again comes back as the cotangent of what was handed on to it.
        back = [None if isinstance(c, jax.custom_derivatives.SymbolicZero) else c for c in handed_back]
        cotangents, arrival, seed, noted = ([instantiated(c) for c in part] for part in (outs, *tokens))
        if unused:  # called for the tokens' sake: there may be no derivative to take
            returned = take(fill([None] * len(is_handed), is_handed, back), has_arrived)
            return [None] * len(shards), [None] * sum(has_holder), [None] * len(rest), returned, arrival, seed, noted
        carried = fill([None] * len(is_handed), is_handed, back)
        if barrier and any(x is None for x in carried):
            shards, cotangents = after(shards, cotangents)
        fulls, handed = gathered(shards, carried)
        returned = take(fill([None] * len(is_handed), is_handed, handed), has_arrived)
        wanted = fill(has_holder, has_holder, were.holders)
        perturbed = [m and is_inexact(r) for r, m in zip(rest, were.rest, strict=True)]

        def of_inputs(wanted_fulls: list[Any], perturbed_rest: list[Any]) -> list[Any]:
            return list(apply(merged(fill(fulls, wanted, wanted_fulls), fill(rest, perturbed, perturbed_rest))))

        _, vjp = jax.vjp(of_inputs, take(fulls, wanted), take(rest, perturbed))
        d_fulls, d_rest = vjp(cotangents)
        d_holders = fill([None] * len(were.holders), were.holders, d_fulls)
        if noted:
            d_rest, now = together(d_rest, [jnp.zeros_like(noted[0])])
            noted = [noted[0] + x for x in now]
        d_rest = fill([None] * len(rest), perturbed, d_rest)
        return [None] * len(shards), d_holders, d_rest, returned, arrival, seed, noted

    op.defvjp(fwd, bwd, symbolic_zeros=True)
    return passed(*op(held, holders, others, take(arrived, has_arrived), arrival, seed, noted))


_Out = tuple[list[Any], list[jax.Array], list[Token], list[Token], list[Token]]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Perturbed:
    """Which inputs of an operation are differentiated, as a residual that is known while the program is traced."""

    holders: tuple[bool, ...]
    rest: tuple[bool, ...]
