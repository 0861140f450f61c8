"""A loop over layers in which the next layer travels while this one computes, and the last one's gradient leaves.

Forward, iteration l gathers the weights of layer l + 1; backward it gathers those of layer l - 1 and reduces the
gradient of layer l + 1, all carried from one iteration to the next: nothing in an iteration waits for a collective that
began in it. The first and the last iteration stand outside of the loop, so that no byte more is sent than without this.

The weights enter a layer in full, and are no residuals: what the backward pass needs of a layer is read from the traced
layer, and what depends on weights alone is computed again from the ones gathered for it. Knows nothing of equations:
a layer is a function of arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives.packed import reduce_one
from zerojax.collectives.plain import Collectives
from zerojax.gather.accumulator import claim_feedback
from zerojax.gather.cotangents import fill, instantiated, is_inexact, take
from zerojax.gather.order import together, zero_token
from zerojax.gather.traced_layer import (
    Arrays,
    Layer,
    Operands,
    TracedLayer,
    leaves_filled,
    traced_layer,
    trained_of,
)
from zerojax.layout.placement import Placement

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Ahead:
    """How a stacked parameter travels, one layer at a time; no array is in it.

    Attributes:
        collectives: how leaves move.
        placement: of one layer, in the dtype that travels.
        is_secondary: whether the secondary partition enters the loop.
        grad_dtype: of the gradient's input; None: no gradient is wanted.
        in_backward: whether the backward pass needs the weights.
        fed_back: by key path, the one reduction that takes the leaf's error feedback.
    """

    collectives: Collectives
    placement: Placement
    is_secondary: bool
    grad_dtype: Any
    in_backward: bool
    fed_back: dict[str, object]

    @property
    def makes_secondary(self) -> bool:
        """Whether the loop makes the secondary partition, which the backward pass gathers from."""
        return self.collectives.secondary is not None and not self.is_secondary

    def held(self, shard: Any) -> Any:
        """What a layer's weights are gathered from, here and again in the backward pass."""
        if self.is_secondary:
            return shard
        narrow = lax.convert_element_type(shard, self.placement.dtype)
        make = self.collectives.secondary
        return narrow if make is None else make(lax.stop_gradient(narrow), self.placement, 0)

    def full(self, held: Any) -> jax.Array:
        """A layer's weights."""
        secondary = self.is_secondary or self.makes_secondary
        move = self.collectives.gather_secondary if secondary else self.collectives.gather
        return move(held, self.placement)

    def reduced(self, full: jax.Array, feedback: Any) -> tuple[jax.Array, Any]:
        """A layer's gradient as a shard, and what its reduction lost."""
        if feedback is not None:
            claim_feedback(self.fed_back, self.placement, self)
        shard, lost = reduce_one(full, feedback, self.placement, self.collectives)
        return lax.convert_element_type(shard, self.grad_dtype), lost


@dataclasses.dataclass(frozen=True, eq=False)
class LoopAhead:
    """A loop of two layers or more; no array is in it.

    Attributes:
        layer: one layer.
        ahead: how the stacks of the operands travel.
        results: shapes of the results of all layers.
        length: number of layers.
        reverse: whether the last layer comes first.
        unroll: layers in one iteration of the compiled loop.
        spread: (for each operand, whether it is differentiated) -> for each carried value, whether it ever is.
    """

    layer: Layer
    ahead: Sequence[Ahead]
    results: Sequence[jax.ShapeDtypeStruct]
    length: int
    reverse: bool
    unroll: int
    spread: Callable[[Operands], list[bool]]

    def run(self, operands: Operands) -> tuple[Arrays, Arrays]:
        """The values carried out of the last layer, and the results of all layers."""
        leaves, structure = jax.tree.flatten(operands)

        @jax.custom_vjp
        def looped(leaves: Arrays) -> tuple[Arrays, Arrays]:
            def step(consts: Arrays, carried: Arrays, xs: Arrays, fulls: Arrays) -> tuple[Arrays, Arrays, Arrays]:
                return *self.layer(consts, carried, xs, fulls, [None] * len(fulls)), []

            values = structure.unflatten(leaves)
            return self._forward(values, self._first(values), step)[0]

        def fwd(primals: Arrays) -> tuple[tuple[Arrays, Arrays], Any]:
            wanted = [x.perturbed and jnp.issubdtype(jnp.result_type(x.value), jnp.inexact) for x in primals]
            values = structure.unflatten([x.value for x in primals])
            return self._kept_forward(values, structure.unflatten(wanted))

        def bwd(residuals: Any, cotangents: tuple[Arrays, Arrays]) -> tuple[Arrays]:
            if all(isinstance(c, jax.custom_derivatives.SymbolicZero) for c in jax.tree.leaves(cotangents)):
                return ([None] * structure.num_leaves,)
            return (self._backward(residuals, cotangents),)

        looped.defvjp(fwd, bwd, symbolic_zeros=True)
        return looped(leaves)

    def _layer_at(self, place: Any) -> Any:
        """The number of the layer that is run at a place, counted from the first that is run."""
        return self.length - 1 - place if self.reverse else place

    def _first(self, operands: Operands) -> tuple[Arrays, Arrays]:
        """What is held of the first layer's weights, and these."""
        return self._gathered(_at([shard for shard, _, _ in operands.stacks], self._layer_at(0)))

    def _gathered(self, shards: Arrays) -> tuple[Arrays, Arrays]:
        held = [a.held(shard) for a, shard in zip(self.ahead, shards, strict=True)]
        return held, [a.full(x) for a, x in zip(self.ahead, held, strict=True)]

    def _forward(self, operands: Operands, begun: tuple[Arrays, Arrays], step: Callable[..., Any]) -> Any:
        """((carried, results), what each step but the last keeps, what the last one keeps, secondaries)."""
        consts, first, xs, stacks = operands
        held_first, fulls = begun
        shards = [shard for shard, _, _ in stacks]
        made = [a.makes_secondary for a in self.ahead]

        def body(state: Any, place: jax.Array) -> Any:
            carried, fulls, results = state
            layer, following = self._layer_at(place), _at(shards, self._layer_at(place + 1))
            if self.unroll != 1:  # else the weights of all layers in an iteration may come at once
                following, carried = _gated(following, carried)
            held, after = self._gathered(following)
            carried, ys, kept = step(consts, carried, _at(xs, layer), fulls)
            return (carried, after, _put(results, ys, layer)), (kept, [h for h, m in zip(held, made, strict=True) if m])

        results = [jnp.zeros(x.shape, x.dtype) for x in self.results]
        places = jnp.arange(self.length - 1, dtype=jnp.int32)
        unroll = min(self.unroll, self.length - 1)
        (carried, fulls, results), (kept, held) = lax.scan(body, (first, fulls, results), places, unroll=unroll)
        last = self._layer_at(self.length - 1)
        carried, ys, kept_last = step(consts, carried, _at(xs, last), fulls)
        secondaries = [h for h, m in zip(held_first, made, strict=True) if m], held
        return (carried, _put(results, ys, last)), kept, kept_last, secondaries

    def _kept_forward(self, operands: Operands, wanted: Operands) -> Any:
        wanted = wanted._replace(first=self.spread(wanted))
        begun = self._first(operands)
        consts, first, xs, _ = operands
        placements = [a.placement for a in self.ahead]
        traced = traced_layer(self.layer, placements, wanted, [consts, first, _at(xs, 0), begun[1]])
        once = traced.constants(consts)
        (carried, results), kept, kept_last, secondaries = self._forward(operands, begun, traced.step)
        # The first gather of the backward pass waits for the end of the forward pass.
        real = [is_inexact(x) for x in carried]
        passed, token = together(take(carried, real), [zero_token()])
        carried = fill(carried, real, passed)
        return (carried, results), (operands, kept, kept_last, secondaries, once, token, traced)

    def _backward(self, residuals: Any, cotangents: tuple[Arrays, Arrays]) -> list[Any]:
        """Cotangents of the operands' leaves, in order; None where none is wanted."""
        operands, kept, kept_last, secondaries, once, token, traced = residuals
        traced: TracedLayer
        wanted, last = traced.wanted, self.length - 1
        of_carried, of_results = jax.tree.map(instantiated, cotangents)
        moving = take(of_carried, wanted.first)
        trained = trained_of(wanted)
        carries = [a.in_backward for a in self.ahead]

        def shards_at(place: Any) -> Arrays:
            """What the weights at a place are gathered from."""
            held_first, held = secondaries
            made = iter([jax.tree.map(lambda f, h: _select_first(f, h, place), f, h)
                         for f, h in zip(held_first, held, strict=True)])  # fmt: skip
            layer = self._layer_at(place)
            return [next(made) if a.makes_secondary else _at(shard, layer)
                    for a, (shard, _, _) in zip(self.ahead, operands.stacks, strict=True)]  # fmt: skip

        def gathered(shards: Arrays, which: Sequence[bool]) -> Arrays:
            return [a.full(x if a.makes_secondary else a.held(x)) if w else None
                    for a, x, w in zip(self.ahead, shards, which, strict=True)]  # fmt: skip

        def pulled(kept: Arrays, place: Any, fulls: Arrays, moving: Arrays) -> tuple[Arrays, Arrays, Arrays, Arrays]:
            layer = self._layer_at(place)
            here = gathered(shards_at(place), [not c for c in carries])  # the compiler drops what no use reads
            fulls = [h if w is None else w for w, h in zip(fulls, here, strict=True)]
            of_layer = _at(of_results, layer)
            return traced.pull(
                kept, once, operands.consts, _at(operands.xs, layer), fulls,
                fill(of_carried, wanted.first, moving), of_layer,
            )  # fmt: skip

        def reduced(fulls: Arrays, place: Any) -> list[Any]:
            """The gradients of the layer at a place, and what their reductions lost."""
            layer, new = self._layer_at(place), []
            of_trained = [a for a, t in zip(self.ahead, trained, strict=True) if t]
            stacks = take(operands.stacks, trained)
            for a, (_, _, feedback), full in zip(of_trained, stacks, fulls, strict=True):
                new.append(a.reduced(full, None if feedback is None else _at(feedback, layer)))
            return new

        # The last layer: its weights wait for the end of the forward pass, the next ones for the cotangents.
        (shards, token), before = together(shards_at(last), token), shards_at(last - 1)
        moving = _plus(moving, token[0])
        fulls = gathered(shards, carries)
        before, moving = _gated(before, moving)
        following = gathered(before, carries)
        d_consts, moving, d_xs, d_fulls = pulled(kept_last, last, fulls, moving)
        in_all = [jax.tree.map(lambda x: jnp.zeros((self.length, *x.shape), x.dtype), d) for d in d_xs]
        in_all = _put(in_all, d_xs, self._layer_at(last))
        buffers = [
            jax.tree.map(jnp.zeros_like, (shard if grad_input is None else grad_input, feedback))
            for shard, grad_input, feedback in take(operands.stacks, trained)
        ]

        def body(state: Any, place: jax.Array) -> Any:
            moving, fulls, d_after, d_consts, in_all, buffers = state
            # The gradient leaves first, so that it is gone before this layer's needs its place.
            new, before = reduced(d_after, place + 1), shards_at(place - 1)
            if new:
                before, new = _together(before, new)
            else:
                before, moving = _gated(before, moving)
            following = gathered(before, carries)
            buffers = _put(buffers, new, self._layer_at(place + 1))
            more, moving, d_xs, d_fulls = pulled(_at(kept, place), place, fulls, moving)
            if self.unroll != 1:
                buffers, moving = _gated(buffers, moving)
            d_consts = [a + b for a, b in zip(d_consts, more, strict=True)]
            return (moving, following, d_fulls, d_consts, _put(in_all, d_xs, self._layer_at(place)), buffers), None

        state = (moving, following, d_fulls, d_consts, in_all, buffers)
        if self.length > 2:
            places = jnp.arange(last - 1, 0, -1, dtype=jnp.int32)
            state, _ = lax.scan(body, state, places, unroll=min(self.unroll, self.length - 2))
        moving, fulls, d_after, d_consts, in_all, buffers = state
        buffers = _put(buffers, reduced(d_after, 1), self._layer_at(1))
        more, moving, d_xs, d_fulls = pulled(_at(kept, 0), 0, fulls, moving)
        buffers = _put(buffers, reduced(d_fulls, 0), self._layer_at(0))
        d_consts = [a + b for a, b in zip(d_consts, more, strict=True)]
        in_all = _put(in_all, d_xs, self._layer_at(0))
        return [
            *leaves_filled(operands.consts, wanted.consts, d_consts),
            *fill([None] * len(of_carried), wanted.first, moving),
            *leaves_filled(operands.xs, wanted.xs, in_all), *self._of_stacks(operands.stacks, trained, buffers),
        ]  # fmt: skip

    def _of_stacks(self, stacks: Sequence[Any], trained: Sequence[bool], buffers: Sequence[Any]) -> list[Any]:
        """Cotangents of the leaves of the stacks."""
        out, new = [], iter(buffers)
        for (shard, grad_input, feedback), trains in zip(stacks, trained, strict=True):
            grad, lost = next(new) if trains else (None, None)
            of_shard = [None] * len(jax.tree.leaves(shard))
            out += [*of_shard, grad] if grad_input is not None else [grad] if trains else of_shard
            out += [] if feedback is None else [lost]
        return out


def _at(tree: Tree, layer: Any) -> Tree:
    """One layer of each array."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False), tree)


def _put(tree: Tree, values: Tree, layer: Any) -> Tree:
    """The arrays of all layers with one layer replaced."""
    return jax.tree.map(lambda x, v: lax.dynamic_update_index_in_dim(x, v, layer, 0), tree, values)


def _select_first(first: Any, others: Any, place: Any) -> Any:
    """What was made at a place: before the loop, or in it."""
    if isinstance(place, int):
        return first if place == 0 else lax.index_in_dim(others, place - 1, keepdims=False)
    later = lax.dynamic_index_in_dim(others, jnp.maximum(place - 1, 0), keepdims=False)
    return jnp.where(place == 0, first, later)


def _gated(values: Tree, carried: Arrays) -> tuple[Tree, Arrays]:
    """Values, not before the floats among what is carried."""
    leaves, structure = jax.tree.flatten(values)
    real = [is_inexact(x) for x in carried]
    leaves, passed = together(leaves, take(carried, real))
    return structure.unflatten(leaves), fill(carried, real, passed)


def _together(one: Tree, other: Tree) -> tuple[Tree, Tree]:
    """Neither before both are there."""
    leaves, structure = jax.tree.flatten((one, other))
    return structure.unflatten(lax.optimization_barrier(leaves))


def _plus(values: Arrays, token: jax.Array) -> Arrays:
    """The values, the first of which reads a token, which is zero."""
    return [values[0] + token.astype(values[0].dtype), *values[1:]] if values else values
