"""float32 as its bits and back, and 16 of the 32 bits of a hash."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

INF = np.int32(0x7F800000)
"""The bits of infinity, which are those of the whole exponent."""


def bits_of(x: jax.Array) -> jax.Array:
    """float32 as int32 bits."""
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of(bits: jax.Array) -> jax.Array:
    """int32 bits as float32."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def half_of(random: jax.Array, upper: bool, place: int) -> jax.Array:
    """The upper or lower 16 bits of a uint32, moved to the bits from ``place`` on; all others are zero."""
    if upper:
        moved = lax.shift_right_logical(random, np.uint32(16 - place))
    else:
        moved = lax.shift_left(random, np.uint32(place)) if place else random
    return moved & np.uint32(0xFFFF << place)
