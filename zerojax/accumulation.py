"""Gradient accumulation: one device's part of the batch in microbatches, gradients summed in float32.

"sharded" reduces the gradient of each microbatch where it arises, so that the accumulators are shards: 1/N of the
memory, and a reduction for each microbatch. "deferred" sums whole gradients and reduces them once per step: a whole
float32 accumulator on each device, and traffic that does not depend on the number of microbatches. Only one
microbatch's activations live at a time. Runs inside `shard_map`; knows nothing of how gradients arise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from zerojax import _compat

Tree = Any
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


def microbatches(batch: Tree, count: int) -> Tree:
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
    micro = microbatches(batch, count)

    def body(carry: tuple[list[Any], list[Any]], part: tuple[jax.Array, Tree]) -> tuple[Any, Any]:
        sums, feedback = carry
        index, inputs = part
        keyed = jax.tree.map(lambda x: jax.random.fold_in(x, index) if _compat.is_prng_key(x) else x, rest)
        values, grads, feedback = step(inputs, keyed, feedback)
        sums = [s if g is None else s + g.astype(s.dtype) for s, g in zip(sums, grads, strict=True)]
        return (sums, feedback), values

    first = jax.tree.map(lambda x: x[0], micro)
    _, shapes, _ = jax.eval_shape(step, first, rest, feedback)
    zeros = [None if g is None else jnp.zeros(g.shape, jnp.promote_types(g.dtype, jnp.float32)) for g in shapes]
    (sums, feedback), values = jax.lax.scan(body, (zeros, feedback), (jnp.arange(count), micro))
    return values, sums, feedback
