"""Dynamic loss scaling for float16.

A float16 gradient underflows long before it matters (arXiv 1710.03740, section 3.2): the loss is multiplied by a scale
that doubles after a run of good steps and halves when gradients overflow, and an overflowing step changes nothing. All
of it is decided from global values, so every device takes the same decision. Pure functions of small scalars.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Gradients that are zero permanently never overflow: their scale would double until it is infinite, and zero times it
# no number any more.
LARGEST = 2.0**120


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicScale:
    """When the loss scale changes, and by how much.

    Attributes:
        initial: scale of the first step.
        growth_interval: good steps in a row after which the scale doubles.
        hysteresis: overflows after which the scale halves, and then at each further one; a growth restores the count.
            They need not follow each other.
        floor: smallest scale. An overflow there that would halve it cannot be cured: the step stops training, unless it
            was made with `on_nonfinite="skip"`, which counts it.

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


# Named profiles. bfloat16 has the exponents of float32: nothing underflows that float32 would keep.
PROFILES: dict[str, DynamicScale | None] = {"float16": DynamicScale(), "bfloat16": None}


def loss_scale_rule(profile: DynamicScale | str | None) -> DynamicScale | None:
    """The rule of a profile: "float16" scales (2**16 at first, 1000 good steps, hysteresis 2, floor 1), "bfloat16" not.

    Raises:
        ValueError: an unknown name.

    >>> loss_scale_rule("float16")
    DynamicScale(initial=65536.0, growth_interval=1000, hysteresis=2, floor=1.0)
    """
    if not isinstance(profile, str):
        return profile
    if profile not in PROFILES:
        raise ValueError(f"loss_scale={profile!r}: use {', '.join(map(repr, PROFILES))}, a DynamicScale or None")
    return PROFILES[profile]


class LossScaleState(NamedTuple):
    """State of dynamic loss scaling: scalars, the same on every device.

    Attributes:
        scale: float32, what the loss is multiplied by.
        good_steps: int32, good steps since the scale last changed or a step overflowed.
        overflows_left: int32, overflows until the scale halves.

    >>> jax.tree.map(float, init_loss_scale(DynamicScale()))
    LossScaleState(scale=65536.0, good_steps=0.0, overflows_left=2.0)
    """

    scale: jax.Array
    good_steps: jax.Array
    overflows_left: jax.Array


def init_loss_scale(rule: DynamicScale) -> LossScaleState:
    """The state before the first step.

    >>> float(init_loss_scale(DynamicScale(initial=8.0)).scale)
    8.0
    """
    return LossScaleState(jnp.float32(rule.initial), jnp.zeros((), jnp.int32), jnp.full((), rule.hysteresis, jnp.int32))


def next_loss_scale(state: LossScaleState, finite: jax.Array, rule: DynamicScale) -> LossScaleState:
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
    after_good = LossScaleState(
        jnp.where(grows, jnp.minimum(state.scale * 2, LARGEST), state.scale),
        jnp.where(grows, 0, good),
        jnp.where(grows, rule.hysteresis, state.overflows_left),
    )
    after_overflow = LossScaleState(
        jnp.where(halves, jnp.maximum(state.scale / 2, rule.floor), state.scale),
        jnp.zeros_like(good),
        jnp.maximum(state.overflows_left - 1, 1),
    )
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), after_good, after_overflow)


def is_at_floor(state: LossScaleState, rule: DynamicScale) -> jax.Array:
    """Whether one more overflow would have to halve a scale that is the smallest already.

    >>> rule = DynamicScale(initial=1.0, hysteresis=1)
    >>> bool(is_at_floor(init_loss_scale(rule), rule))
    True
    """
    return (state.scale <= rule.floor) & (state.overflows_left <= 1)
