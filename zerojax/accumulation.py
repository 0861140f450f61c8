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
Step = Callable[[Tree, Any], tuple[Any, list[Any]]]


def microbatches(batch: Tree, count: int) -> Tree:
    """One device's batch with a new leading dim of `count` microbatches; 0-d leaves repeated."""
    return jax.tree.map(
        lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]) if x.shape else jnp.broadcast_to(x, (count,)),
        batch,
    )


def accumulate(step: Step, batch: Tree, rest: Any, count: int) -> tuple[Any, list[Any]]:
    """Runs `step` on each microbatch in a loop.

    Args:
        step: (microbatch, rest) -> (values, partial gradients).
        batch: this device's batch.
        rest: further arguments; PRNG keys are folded with the index of the microbatch.
        count: number of microbatches.

    Returns:
        The values stacked along a new leading dim, and the float32 sums of the gradients.
    """
    micro = microbatches(batch, count)

    def body(sums: list[Any], part: tuple[jax.Array, Tree]) -> tuple[list[Any], Any]:
        index, inputs = part
        keyed = jax.tree.map(lambda x: jax.random.fold_in(x, index) if _compat.is_prng_key(x) else x, rest)
        values, grads = step(inputs, keyed)
        return [s if g is None else s + g.astype(s.dtype) for s, g in zip(sums, grads, strict=True)], values

    first = jax.tree.map(lambda x: x[0], micro)
    _, shapes = jax.eval_shape(step, first, rest)
    zeros = [None if g is None else jnp.zeros(g.shape, jnp.promote_types(g.dtype, jnp.float32)) for g in shapes]
    sums, values = jax.lax.scan(body, zeros, (jnp.arange(count), micro))
    return values, sums
