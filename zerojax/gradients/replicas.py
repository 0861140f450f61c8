"""One device's replicas of the weights, brought up to date before the loss and used in place of the shards.

All nodes first ask whether their replicas belong to the parameters at hand: one all-reduce of a flag for each leaf. A
replica that does not is gathered anew. Then changes travel, once for all uses and microbatches; forward and backward
pass gather inside the node. Runs inside `shard_map` over the data axes; nothing here is differentiated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives.deltas import Deltas, weight_deltas
from zerojax.gather.changes import FEWEST_LAYERS, Changing
from zerojax.gather.stored import Scope, Stored
from zerojax.gather.uses import LeafUse, cast_target, stacks_vectors
from zerojax.gradients.wire import has_replica
from zerojax.layout.layout import Layout
from zerojax.layout.mesh import prefetch_window
from zerojax.layout.placement import Placement


def travels_by_deltas(placement: Placement, uses: Sequence[LeafUse], layout: Layout) -> bool:
    """Whether a loss that uses a leaf so reads its replica; a stack of vectors has one that lies idle."""
    return has_replica(placement, layout) and not stacks_vectors(placement.shape, uses, least_quantized(layout))


def least_quantized(layout: Layout) -> int:
    """Fewest elements of what travels quantised."""
    return max(layout.config.min_shard_size, layout.config.min_quantize_size)


def up_to_date(
    leaves: Sequence[jax.Array], replicas: Mapping[int, jax.Array], layout: Layout, by_layer: Collection[int] = ()
) -> dict[int, jax.Array]:
    """The replicas of this step, by the number of their leaf.

    Args:
        leaves: the parameters in stored form, local.
        replicas: those of the last step.
        layout: the layout.
        by_layer: numbers of stacks whose changes travel later, layer by layer: their replicas belong to the parameters
            and are those of the last step.
    """
    if not replicas:
        return {}
    deltas, places = weight_deltas(layout), [layout.leaves[i] for i in replicas]
    shards = lax.stop_gradient([leaves[i] for i in replicas])
    with jax.named_scope("weight_deltas"):
        current = _belonging(shards, list(replicas.values()), places, deltas, layout.config.axes)
        # Of a leaf that is not trained nothing is sent: its replica has its bits.
        current = [
            deltas.updated(x, replica, p) if p.trainable and i not in by_layer else replica
            for i, x, replica, p in zip(replicas, shards, current, places, strict=True)
        ]
    return dict(zip(replicas, current, strict=True))


def _belonging(
    shards: list[jax.Array], replicas: list[jax.Array], places: list[Placement], deltas: Deltas, axes: tuple[str, ...]
) -> list[jax.Array]:
    """The replicas, gathered anew where one is far from the parameters on any device."""
    asked = zip(shards, replicas, places, strict=True)
    far = jnp.stack([deltas.is_far(x, replica, p) for x, replica, p in asked]).astype(jnp.int32)
    far = lax.pmax(far, axes)

    def anew(replicas: list[jax.Array]) -> list[jax.Array]:
        return [
            lax.cond(far[i] > 0, lambda x, _, p=p: _gathered_anew(x, p, deltas), lambda _, replica: replica, x, replica)
            for i, (x, replica, p) in enumerate(zip(shards, replicas, places, strict=True))
        ]

    return lax.cond(jnp.any(far > 0), anew, lambda replicas: replicas, replicas)


def _gathered_anew(x: jax.Array, placement: Placement, deltas: Deltas) -> jax.Array:
    with jax.named_scope("gathered_anew"):  # readers of the compiled program tell by it that no usual step does so
        return deltas.gathered(x, placement)


def held_by_replica(
    x: jax.Array, replica: jax.Array, placement: Placement, uses: Sequence[LeafUse], scope: Scope
) -> Stored:
    """A parameter held as its replica, in the dtype in which the loss uses it: its gathers stay inside the node."""
    dtype = cast_target(uses, placement.dtype)
    stored = scope.enter(x, x if placement.trainable else None, placement.with_dtype(dtype))
    # Every dim before the one that is split can be taken apart by a loop.
    return stored.holding(replica.astype(dtype), stack=placement.dim or 0)


def changing_by_layer(
    x: jax.Array, replica: jax.Array, placement: Placement, uses: Sequence[LeafUse], layout: Layout, scope: Scope
) -> Stored:
    """A stack whose changes travel in the loop that takes it layer by layer."""
    dtype, deltas = cast_target(uses, placement.dtype), weight_deltas(layout)

    def updated(shard: jax.Array, replica: jax.Array, placement: Placement) -> jax.Array:
        with jax.named_scope("weight_deltas"):
            return deltas.updated(shard, replica, placement)

    x = lax.stop_gradient(x)
    narrow = x.astype(dtype)  # read by nothing but a use that is not the loop's
    stored = scope.enter(narrow, narrow, placement.with_dtype(dtype))
    return dataclasses.replace(stored, changing=Changing(x, replica, placement, dtype, updated))


def can_change_by_layer(placement: Placement, uses: Sequence[LeafUse], layout: Layout) -> bool:
    """Whether a leaf is a stack of enough layers that is taken apart once, so that its changes can travel meanwhile.

    Not in a loop whose gathers inside the node travel ahead: there all changes travel before it.
    """
    ahead = prefetch_window(layout.mesh, layout.config) is not None
    if ahead or not placement.trainable or not placement.dim or len(uses) != 1:
        return False
    return uses[0].repeats == 1 and FEWEST_LAYERS <= uses[0].layers == placement.shape[0]
