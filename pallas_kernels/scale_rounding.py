"""The scale of a block: rounded up, so that every level fits, to bfloat16 or to float8 under the scale of a tile.

Written once for every backend, with the operations that `numerics` allows itself; knows the formats, not the memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.array import QuantFormat
from pallas_kernels.bits import bits_of, float_of
from pallas_kernels.numerics import is_finite_bits

MIN_SCALE = 2.0**-100
"""Smallest effective scale: keeps 1 / scale finite and lets subnormal inputs round to zero on every backend."""

E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9
E4M3_NAN_CODE = 0x7F
_DEFLATE = 1.0 - 2.0**-22


def _mantissa_up(x: jax.Array, drop: int) -> jax.Array:
    """Rounds a positive float32 up to a mantissa with ``drop`` bits fewer."""
    mask = np.int32((1 << drop) - 1)
    return float_of((bits_of(x) + mask) & ~mask)


def needed_scale(magnitude: jax.Array, reach: float) -> jax.Array:
    """absmax / reach in float32, 0 for a non-finite block.

    The constant is slightly below 1 / reach, so that a block that already lies on a grid of ``scale`` and reaches
    as far asks for exactly that scale again, never for the next larger one.
    """
    finite = is_finite_bits(magnitude)
    return jnp.where(finite, float_of(magnitude), 0.0) * np.float32(_DEFLATE / reach)


def round_scale(needed: jax.Array, reach: float) -> jax.Array:
    """The bfloat16 scale as float32: rounded up, at least `MIN_SCALE`; reach * scale is finite."""
    ceiling = np.float32(_largest_scale(reach))
    return jnp.minimum(jnp.maximum(_mantissa_up(needed, 16), np.float32(MIN_SCALE)), ceiling)


def round_tile_scale(needed: jax.Array, reach: float) -> jax.Array:
    """The bfloat16 scale of a tile, from the largest `needed_scale` in it: rounded up so that block codes fit e4m3."""
    ceiling = np.float32(_largest_scale(reach * E4M3_MAX))
    up = _mantissa_up(needed * np.float32(_DEFLATE / E4M3_MAX), 16)
    return jnp.minimum(jnp.maximum(up, np.float32(MIN_SCALE / E4M3_MIN)), ceiling)


def _largest_scale(factor: float) -> float:
    """The largest bfloat16 s with factor * s finite in float32."""
    value = np.float32(float(np.finfo(np.float32).max) / factor)
    return float((value.view(np.int32) & np.int32(-65536)).view(np.float32))


def tile_inverse(one_over_tile_scale: jax.Array) -> jax.Array:
    """What turns needed scales into ratios to their tile's scale; the hair below 1 is that of `needed_scale`."""
    return one_over_tile_scale * np.float32(_DEFLATE)


def e4m3_code(needed: jax.Array, tile_inverse: jax.Array, magnitude: jax.Array) -> jax.Array:
    """The float8_e4m3fn code (int32, 1..0x7F) of needed / tile_scale rounded up; 0x7F (NaN) for a non-finite block."""
    ratio = needed * tile_inverse
    ratio = jnp.minimum(jnp.maximum(ratio, np.float32(E4M3_MIN)), np.float32(E4M3_MAX))
    # Below 2**-6 the format is linear in steps of 2**-9: adding 2**-6 puts the same steps into a normal mantissa.
    # The sum is exact once the ratio is rounded up to 21 bits.
    ratio = _mantissa_up(ratio, 3)
    linear = ratio < np.float32(2.0**-6)
    shifted = jnp.where(linear, ratio + np.float32(2.0**-6), ratio)
    code = lax.shift_right_logical(bits_of(_mantissa_up(shifted, 20)), np.int32(20)) - np.int32(120 << 3)
    code = jnp.where(linear, code - np.int32(8), code)
    return jnp.where(is_finite_bits(magnitude), code, np.int32(E4M3_NAN_CODE))


def e4m3_value(code: jax.Array) -> jax.Array:
    """The float32 value of a float8_e4m3fn code (int32 without sign)."""
    normal = float_of(lax.shift_left(code, np.int32(20)) + np.int32(120 << 23))
    value = jnp.where(code < 8, code.astype(jnp.float32) * np.float32(E4M3_MIN), normal)
    return jnp.where(code == E4M3_NAN_CODE, np.float32(np.nan), value)


def inverse_scale(
    one_over_scale: jax.Array, effective: jax.Array, magnitude: jax.Array, fmt: QuantFormat, stochastic: bool
) -> jax.Array:
    """1 / scale, or less where stochastic rounding could take a 4-bit level beyond the largest.

    `numerics.rounded_down` and `e2m1.rounded_down` keep a value on a level that it exceeds by less than 2**-17 of a
    step: 2.2 * 2**-21 of 7, and more of 6. Scales are too small by 1.5 * 2**-21 of themselves at most, for the two
    hairs that `needed_scale` and `tile_inverse` take off and for the rounding of products; but under the ceiling of
    `round_scale`, where blocks reach float32's largest numbers, by up to 2**-7.
    """
    if not stochastic or fmt.bits != 4:
        return one_over_scale
    over = float_of(magnitude) > effective * np.float32(fmt.qmax * (1 + 1.5 * 2.0**-21))
    return jnp.where(over, one_over_scale * np.float32(1 - 2.0**-7), one_over_scale)
