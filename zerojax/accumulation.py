"""Gradient accumulation: one device's part of the batch in microbatches, gradients summed in float32.

Stages 2 and 3 reduce the gradient of each microbatch where it arises, so that the accumulators are shards; stages 0 and
1 accumulate whole gradients and reduce them once. Only one microbatch's activations live at a time. Runs inside
`shard_map`; knows nothing of how gradients arise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import _compat

Tree = Any
Step = Callable[[Tree, Any, list[Any]], tuple[Any, list[Any], list[Any]]]


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
