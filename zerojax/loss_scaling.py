"""Dynamic loss scaling for float16, and what to do with a step whose loss or gradient is not finite.

A float16 gradient underflows long before it matters (arXiv 1710.03740, section 3.2): the loss is multiplied by a scale
that doubles after a run of good steps and halves when gradients overflow, and an overflowing step changes nothing. All
of it is decided from global values, so every device takes the same decision. Pure functions of small scalars; knows
nothing of how gradients arise.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicScale:
    """When the loss scale changes, and by how much.

    Attributes:
        initial: scale of the first step.
        growth_interval: good steps in a row after which the scale doubles.
        hysteresis: overflows in a row that are needed for the scale to halve; a growth restores the count.
        floor: smallest scale. An overflow at the floor is still skipped and counted, never ignored.

    >>> DynamicScale().initial
    65536.0
    """

    initial: float = 2.0**16
    growth_interval: int = 1000
    hysteresis: int = 2
    floor: float = 1.0

    def __post_init__(self) -> None:
        if not self.floor > 0 or self.initial < self.floor or self.growth_interval < 1 or self.hysteresis < 1:
            raise ValueError(f"{self}: initial >= floor > 0, growth_interval >= 1 and hysteresis >= 1 are required")


class LossScale(NamedTuple):
    """State of dynamic loss scaling: scalars, the same on every device.

    Attributes:
        scale: float32, what the loss is multiplied by.
        good_steps: int32, good steps since the scale last changed or a step overflowed.
        overflows_left: int32, overflows until the scale halves.

    >>> jax.tree.map(float, init_loss_scale(DynamicScale()))
    LossScale(scale=65536.0, good_steps=0.0, overflows_left=2.0)
    """

    scale: jax.Array
    good_steps: jax.Array
    overflows_left: jax.Array


def init_loss_scale(rule: DynamicScale) -> LossScale:
    """The state before the first step.

    >>> float(init_loss_scale(DynamicScale(initial=8.0)).scale)
    8.0
    """
    return LossScale(jnp.float32(rule.initial), jnp.zeros((), jnp.int32), jnp.full((), rule.hysteresis, jnp.int32))


def next_loss_scale(state: LossScale, finite: jax.Array, rule: DynamicScale) -> LossScale:
    """The state after a step.

    Args:
        state: the state of the step.
        finite: bool scalar, whether its loss and gradients were finite.
        rule: the rule.

    >>> rule = DynamicScale(initial=8.0, hysteresis=1)
    >>> float(next_loss_scale(init_loss_scale(rule), jnp.bool_(False), rule).scale)
    4.0
    """
    good = state.good_steps + 1
    grows = good >= rule.growth_interval
    halves = state.overflows_left <= 1
    after_good = LossScale(
        jnp.where(grows, state.scale * 2, state.scale),
        jnp.where(grows, 0, good),
        jnp.where(grows, rule.hysteresis, state.overflows_left),
    )
    after_overflow = LossScale(
        jnp.where(halves, jnp.maximum(state.scale / 2, rule.floor), state.scale),
        jnp.zeros_like(good),
        jnp.maximum(state.overflows_left - 1, 1),
    )
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), after_good, after_overflow)


def keep_unless(finite: jax.Array, new: Tree, old: Tree) -> Tree:
    """The new values where the step was finite, else the old ones, bit for bit."""
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
