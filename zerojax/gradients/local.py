"""One device's part of a loss and its gradient, of one batch or summed over microbatches, inside `shard_map`.

Gradients of microbatches are summed in float32. "sharded" reduces the gradient of each microbatch where it arises, so
that the accumulators are shards: 1/N of the memory, and a reduction for each microbatch. "deferred" sums full gradients
and reduces them once per step: a full float32 accumulator on each device, and traffic that does not depend on the
number of microbatches. Only one microbatch's activations live at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from zerojax import _compat
from zerojax.gradients import inputs as batches
from zerojax.gradients.backward import Backward, full_backward, reading, staged_backward
from zerojax.gradients.outputs import (
    global_loss,
    loss_cotangent,
    merged_state,
    wide_dtype,
    widened,
    zero_cotangent,
)
from zerojax.gradients.wire import WireState
from zerojax.layout.layout import Layout

Tree = Any


class Gradients(NamedTuple):
    """What one evaluation of the loss and its gradient gives.

    Attributes:
        loss: the global mean, scalar, the same on every device.
        weight: the global sum of the weights of a weighted loss, scalar of float32 or wider; else None.
        grads: as `value_and_grad` returns them.
        aux: auxiliary outputs, or None.
        wire: what the wire remembers until the next step, or None.
        model_state: new model state, the same on every device, or None.
    """

    loss: jax.Array
    weight: jax.Array | None
    grads: Tree
    aux: Tree
    wire: Any
    model_state: Tree


class LossKind(NamedTuple):
    """What the loss function returns, and over what its gradient is summed.

    Attributes:
        has_aux: it returns auxiliary outputs.
        weighted: it returns (sum, weight) instead of a mean.
        mutable: it returns a new model state.
        microbatches: number of pieces of this device's batch.
        accumulation: how their gradients are summed.
        aux_specs: PartitionSpecs of the auxiliary outputs.
    """

    has_aux: bool
    weighted: bool
    mutable: bool
    microbatches: int
    accumulation: Accumulation
    aux_specs: Tree


def split_outputs(out: Any, has_aux: bool, mutable: bool) -> tuple[Any, Any]:
    """(model state, aux) of a loss function's output, or of its shapes; None for what it does not return."""
    if has_aux and mutable:
        if not (isinstance(out[1], tuple) and len(out[1]) == 2):
            raise ValueError(
                "make_train_step(has_aux=True, mutable=True): loss_fn must return (loss, (new model state, aux)), but "
                f"what it returns beside the loss is {jax.tree.structure(out[1])}"
            )
        return out[1]
    return (out[1], None) if mutable else (None, out[1] if has_aux else None)


def local_gradients(
    loss_fn: Callable[..., Any],
    layout: Layout,
    leaves: list[jax.Array],
    batch: Tree,
    rest: Any,
    wire: WireState,
    scale: Any,
    kind: LossKind,
) -> Gradients:
    """The global loss and this device's part of everything else; `wire` has one list entry per leaf."""
    count, more = kind.microbatches, kind.has_aux or kind.mutable
    example = jax.tree.map(lambda x: x[0], split_microbatches(batch, count)) if count > 1 else batch
    backward = _backward(loss_fn, layout, leaves, example, rest, wire.replica, kind)
    feedback = [None if x is None else x[0] for x in wire.feedback]  # the dim over nodes has one entry here

    def step(batch: Tree, rest: Any, feedback: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        out, pullback = backward.run(batch, rest, feedback)
        # The factor of the mean is the cotangent of the loss: no pass over the gradients is spent on it.
        cotangent = loss_cotangent(out[0] if more else out, kind.weighted, layout, count, scale)
        grads, feedback, token = pullback((cotangent, jax.tree.map(zero_cotangent, out[1])) if more else cotangent)
        return reading(out, token), grads, feedback

    if count == 1:
        out, grads, feedback = step(batch, rest, feedback)
    else:
        out, grads, feedback = accumulate(step, batch, rest, feedback, count)
    loss, weight, factor = global_loss(out[0] if more else out, kind.weighted, layout, count)
    if factor is not None:
        grads = [None if g is None else widened(g) * factor for g in grads]
    grads = [None if g is None else g.astype(p.dtype) for g, p in zip(grads, layout.leaves, strict=True)]
    state, aux = split_outputs(out, kind.has_aux, kind.mutable)
    if kind.has_aux:
        if count > 1:
            aux = batches.merge_microbatches(aux, kind.aux_specs, layout)
        aux = batches.average_outputs(aux, kind.aux_specs, layout)
    grads, feedback = backward.finish(grads, feedback)
    wire = WireState([None if x is None else x[None] for x in feedback], list(backward.replicas))
    return Gradients(loss, weight, grads, aux, wire, merged_state(state, layout, count))


def _backward(
    loss_fn: Callable[..., Any], layout: Layout, leaves: list[jax.Array], example: Tree, rest: Any,
    replicas: list[Any], kind: LossKind,
) -> Backward:  # fmt: skip
    repeated, deferred = kind.microbatches > 1, kind.accumulation == "deferred"
    if layout.stage >= 2:
        return staged_backward(
            loss_fn, layout, leaves, example, rest, replicas, repeated=repeated, deferred=repeated and deferred
        )
    return full_backward(loss_fn, layout, leaves, example, rest, each=repeated and not deferred)

Accumulation = Literal["sharded", "deferred"]
Step = Callable[[Tree, Any, list[Any]], tuple[Any, list[Any], list[Any]]]


def accumulation_for(stage: int, asked: Accumulation | None) -> Accumulation:
    """How a stage sums gradients over microbatches: as asked, else as its memory promises.

    Raises:
        ValueError: an unknown name, or "sharded" at stage 0, which has no shards.

    >>> [accumulation_for(stage, None) for stage in range(4)]
    ['deferred', 'deferred', 'sharded', 'sharded']
    """
    if asked not in (None, "sharded", "deferred"):
        raise ValueError(f"accumulation={asked!r}: use 'sharded', 'deferred' or None (by the stage)")
    if asked == "sharded" and stage == 0:
        raise ValueError(
            "accumulation='sharded' keeps 1/N of each gradient, but stage 0 shards nothing: use 'deferred', or a "
            "stage from 1 to 3"
        )
    return asked or ("sharded" if stage >= 2 else "deferred")


def split_microbatches(batch: Tree, count: int) -> Tree:
    """One device's batch with a new leading dim of `count` microbatches; 0-d leaves repeated."""
    return jax.tree.map(
        lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]) if x.shape else jnp.broadcast_to(x, (count,)),
        batch,
    )


def accumulate(step: Step, batch: Tree, rest: Any, feedback: list[Any], count: int) -> tuple[Any, list[Any], list[Any]]:
    """Runs `step` on each microbatch in a loop.

    Args:
        step: (microbatch, rest, feedback) -> (values, partial gradients, new feedback).
        batch: this device's batch.
        rest: further arguments; PRNG keys are folded with the index of the microbatch.
        feedback: error feedback of each leaf, handed from microbatch to microbatch.
        count: number of microbatches.

    Returns:
        The values stacked along a new leading dim, the float32 sums of the gradients, and the last feedback.
    """
    micro = split_microbatches(batch, count)

    def body(carry: tuple[list[Any], list[Any]], part: tuple[jax.Array, Tree]) -> tuple[Any, Any]:
        sums, feedback = carry
        index, inputs = part
        keyed = jax.tree.map(lambda x: jax.random.fold_in(x, index) if _compat.is_prng_key(x) else x, rest)
        values, grads, feedback = step(inputs, keyed, feedback)
        sums = [s if g is None else s + g.astype(s.dtype) for s, g in zip(sums, grads, strict=True)]
        return (sums, feedback), values

    first = jax.tree.map(lambda x: x[0], micro)
    _, shapes, _ = jax.eval_shape(step, first, rest, feedback)
    zeros = [None if g is None else jnp.zeros(g.shape, wide_dtype(g.dtype)) for g in shapes]
    (sums, feedback), values = jax.lax.scan(body, (zeros, feedback), (jnp.arange(count), micro))
    return values, sums, feedback
