"""The level set e2m1 (fp4): 0, 1/2, 1, 3/2, 2, 3, 4, 6 and their negatives; its nibble is sign, exponent, mantissa.

e2m1 is float32 with few bits: times 2**-126 its smallest level, subnormal there too, is subnormal in float32, and the
three bits below the sign of every level are those of the float32 from `PLACE` on. So stochastic rounding is an addition
of integers, and decoding is moving bits. A GPU keeps subnormal numbers; XLA on a CPU does not, and takes the same bits
another way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.bits import INF, bits_of, float_of, half_of

PLACE = 22
"""Lowest bit of a nibble from `rounded_down`."""

_SIZE = np.int32(7 << PLACE)
_SIGN = np.int32(-1 << 31)


def nearest(y: jax.Array, level_wanted: bool, subnormals: bool) -> tuple[jax.Array, jax.Array | None]:
    """The level nearest to y, ties to the even mantissa; below 7, as all are, sizes become at most 6.

    e2m1 has two levels per power of two, at steps of 1/2, 1 and 2. Adding 1.5 * 2**23 steps rounds, once, to a whole
    number k of steps in the low bits; the code is k plus twice the index of the power. Its low three bits are all it
    has, so the constants of both exponents count modulo 8.

    Returns:
        ``(code, level)``: int32 with the nibble in its low bits and arbitrary bits above; float32, or None.
    """
    size = jnp.abs(y)
    power = jnp.maximum(bits_of(size) & INF, np.int32(0x3F800000))
    total = size + float_of(power + np.int32((22 << 23) + (1 << 22) + 2))
    code = (bits_of(total) + lax.shift_right_logical(power, np.int32(22))) & np.int32(7)
    code = code | (lax.shift_right_logical(bits_of(y), np.int32(28)) & np.int32(~7))
    return code, level(code, 0, subnormals) if level_wanted else None


def rounded_down(
    y: jax.Array, random: jax.Array, upper: bool, signs: jax.Array, level_wanted: bool, subnormals: bool
) -> tuple[jax.Array, jax.Array | None]:
    """The largest level up to the size of y plus a random fraction of a step, signed.

    The fraction is 16 bits of a hash, at most 1 - 2**-17: a size that exceeds a level by less than 2**-17 of a step
    stays on it. `scale_rounding.inverse_scale` sees to it that no size exceeds the largest level by more.

    Args:
        y: float32.
        random: uint32 hashes.
        upper: which half of them.
        signs: float32 with the signs of y.
        level_wanted: whether the level is.
        subnormals: whether the device keeps subnormal numbers.

    Returns:
        ``(code, level)``: int32 with the nibble from `PLACE` on and arbitrary bits around it; float32, or None.
    """
    fraction = lax.bitcast_convert_type(half_of(random, upper, PLACE - 16), jnp.int32)
    bits = bits_of_size(y, subnormals) + fraction + np.int32(0x20)
    sign = bits_of(signs)
    code = (bits & _SIZE) | (lax.shift_right_logical(sign, np.int32(31 - 3 - PLACE)) & ~_SIZE)
    if not level_wanted:
        return code, None
    if not subnormals:
        return code, level(lax.shift_right_logical(code, np.int32(PLACE)), 0, subnormals)
    size = bits_of(float_of(bits & np.int32(-1 << PLACE)) * np.float32(2.0**126))
    return code, float_of(size | (sign & _SIGN))


def bits_of_size(y: jax.Array, subnormals: bool) -> jax.Array:
    """The bits of the float32 |y| * 2**-126, as int32; rounded where it is subnormal."""
    size = jnp.abs(y)
    if subnormals:
        return bits_of(size * np.float32(2.0**-126))
    # Below 1, adding 1 rounds to the same multiple of 2**-23.
    below = bits_of(size + np.float32(1.0)) - np.int32(127 << 23)
    return jnp.where(size < np.float32(1.0), below, bits_of(size) - np.int32(126 << 23))


def bits_of_level(code: jax.Array, place: int) -> jax.Array:
    """The bits of the float32 that is 2**-126 times the level of `level`, as int32."""
    # One product moves the sign to the top, and the other bits to the lowest of the exponent and the highest below it.
    wide = (code & np.int32(0xF << place)) * np.int32((1 << (22 - place)) + (1 << (28 - place)))
    return wide & np.int32(0x81C00000 - (1 << 32))


def level(code: jax.Array, place: int, subnormals: bool) -> jax.Array:
    """The float32 level of the nibble that an int32 holds from bit ``place`` (0 or 4) on."""
    if subnormals:
        return float_of(bits_of_level(code, place)) * np.float32(2.0**126)
    nibble = lax.shift_right_logical(code, np.int32(place)) if place else code
    small = nibble & np.int32(7)
    normal = float_of(lax.shift_left(small, np.int32(22)) + np.int32(126 << 23))
    value = jnp.where(small < 2, small.astype(jnp.float32) * np.float32(0.5), normal)
    return float_of(bits_of(value) | lax.shift_left(nibble & np.int32(8), np.int32(28)))
