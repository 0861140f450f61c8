"""float32 as its bits, and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def bits_of(x: jax.Array) -> jax.Array:
    """float32 as int32 bits."""
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of(bits: jax.Array) -> jax.Array:
    """int32 bits as float32."""
    return lax.bitcast_convert_type(bits, jnp.float32)
