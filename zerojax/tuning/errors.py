"""What a technique does to the gradient: relative errors of mean gradients, raw and as an Adam user feels them.

The exact gradient and the one under test are sharded alike, so that everything is summed on the shards and only scalars
travel. Adam divides each coordinate by the root of its mean square; here the mean square is that of the exact gradients
of the batches given. A coordinate that was zero in all of them has no such scale, and counts in the raw figure alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tree = Any


class GradientError(NamedTuple):
    """Relative L2 errors over all float leaves.

    Attributes:
        raw: of the gradients as they are.
        preconditioned: after division by the root of the mean square of each coordinate.
    """

    raw: float
    preconditioned: float


def gradient_error(exact: Sequence[Tree], found: Sequence[Tree]) -> GradientError:
    """The mean over the batches of the relative errors of one mean gradient.

    Args:
        exact: the gradient of each batch, global arrays in any sharding.
        found: the same of the technique, in the same order and sharding.

    >>> exact, found = [{"w": jnp.array([3.0, 0.5])}], [{"w": jnp.array([3.0, 1.0])}]
    >>> error = gradient_error(exact, found)
    >>> round(error.raw, 3), round(error.preconditioned, 3)
    (0.164, 0.707)
    """
    scales = jax.jit(_mean_squares)(list(exact))
    ratios = [jax.jit(_squared_ratios)(e, f, scales) for e, f in zip(exact, found, strict=True)]
    roots = [(float(jnp.sqrt(raw)), float(jnp.sqrt(pre))) for raw, pre in ratios]
    return GradientError(*(sum(each) / len(roots) for each in zip(*roots, strict=True)))


def _floats(tree: Tree) -> list[jax.Array]:
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
    return [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in leaves]


def _mean_squares(trees: list[Tree]) -> list[jax.Array]:
    return [sum(jnp.abs(x) ** 2 for x in leaves) / len(leaves) for leaves in zip(*map(_floats, trees), strict=True)]  # type: ignore[misc]


def _squared_ratios(exact: Tree, found: Tree, scales: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    pairs = list(zip(_floats(exact), _floats(found), scales, strict=True))

    def ratio(weigh: Any) -> jax.Array:
        wrong = sum(jnp.sum(weigh(jnp.abs(f - e) ** 2, v)) for e, f, v in pairs)
        right = sum(jnp.sum(weigh(jnp.abs(e) ** 2, v)) for e, _, v in pairs)
        return wrong / jnp.where(right == 0, 1.0, right)

    return ratio(lambda x, v: x), ratio(lambda x, v: jnp.where(v > 0, x / jnp.where(v > 0, v, 1.0), 0.0))
