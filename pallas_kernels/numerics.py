"""The arithmetic of one block, written once for every backend.

Only elementwise operations that mean the same bits on CPU, in XLA's GPU code and in a Mosaic kernel: integer tricks in
place of ceil and floor, a multiplication by a constant in place of a division, products that are exact in float32
(level x scale has at most 15 significant bits, so a fused multiply-add changes nothing). Functions take arrays of any
shape and know nothing of blocks, tiles, slices or memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.array import BlockFormat

MIN_SCALE = 2.0**-100
"""Smallest effective scale: keeps 1 / scale finite and lets subnormal inputs round to zero on every backend."""

E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9
E4M3_NAN_CODE = 0x7F
_ABS = np.int32(0x7FFFFFFF)
_INF_BITS = np.int32(0x7F800000)
_DEFLATE = 1.0 - 2.0**-22


def bits_of(x: jax.Array) -> jax.Array:
    """float32 as int32 bits."""
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of(bits: jax.Array) -> jax.Array:
    """int32 bits as float32."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def abs_bits(x: jax.Array) -> jax.Array:
    """Magnitude as an int32 that orders like it; NaN and Inf are the largest, so an integer maximum keeps them."""
    return bits_of(x) & _ABS


def is_finite_bits(magnitude: jax.Array) -> jax.Array:
    """Whether a magnitude from `abs_bits` is finite."""
    return magnitude < _INF_BITS


def _mantissa_up(x: jax.Array, drop: int) -> jax.Array:
    """Rounds a positive float32 up to a mantissa with ``drop`` bits fewer."""
    mask = np.int32((1 << drop) - 1)
    return float_of((bits_of(x) + mask) & ~mask)


def needed_scale(magnitude: jax.Array, qmax: int) -> jax.Array:
    """absmax / qmax in float32, 0 for a non-finite block.

    The constant is a hair below 1 / qmax, so that a block that already lies on a grid of ``scale`` and reaches
    ``qmax`` asks for exactly that scale again, never for the next larger one.
    """
    finite = is_finite_bits(magnitude)
    return jnp.where(finite, float_of(magnitude), 0.0) * np.float32(_DEFLATE / qmax)


def round_scale(needed: jax.Array, qmax: int) -> jax.Array:
    """The bfloat16 scale as float32: rounded up, at least `MIN_SCALE`, and small enough that qmax * scale is finite."""
    ceiling = np.float32(_largest_scale(qmax))
    return jnp.minimum(jnp.maximum(_mantissa_up(needed, 16), np.float32(MIN_SCALE)), ceiling)


def round_tile_scale(needed: jax.Array, qmax: int) -> jax.Array:
    """The bfloat16 scale of a tile, from the largest `needed_scale` in it: rounded up so that block codes fit e4m3."""
    ceiling = np.float32(_largest_scale(qmax * E4M3_MAX))
    up = _mantissa_up(needed * np.float32(_DEFLATE / E4M3_MAX), 16)
    return jnp.minimum(jnp.maximum(up, np.float32(MIN_SCALE / E4M3_MIN)), ceiling)


def _largest_scale(factor: float) -> float:
    """The largest bfloat16 s with factor * s finite in float32."""
    value = np.float32(float(np.finfo(np.float32).max) / factor)
    return float((value.view(np.int32) & np.int32(-65536)).view(np.float32))


def e4m3_code(needed: jax.Array, tile_scale: jax.Array, magnitude: jax.Array) -> jax.Array:
    """The float8_e4m3fn code (int32, 1..0x7F) of needed / tile_scale rounded up; 0x7F (NaN) for a non-finite block."""
    ratio = needed * (np.float32(_DEFLATE) / tile_scale)
    ratio = jnp.minimum(jnp.maximum(ratio, np.float32(E4M3_MIN)), np.float32(E4M3_MAX))
    # Below 2**-6 the format is linear in steps of 2**-9: adding 2**-6 puts the same steps into a normal mantissa.
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


def hash_bits(index: jax.Array, hashed_seed: jax.Array) -> jax.Array:
    """32 random bits (uint32) for a counter: the finaliser of MurmurHash3 over index ^ hashed_seed."""
    h = index ^ hashed_seed
    h = (h ^ lax.shift_right_logical(h, np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ lax.shift_right_logical(h, np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ lax.shift_right_logical(h, np.uint32(16))


def hash_seed(seed: jax.Array | int) -> jax.Array:
    """A uint32 scalar that decorrelates neighbouring seeds; computed once, outside any kernel."""
    return hash_bits(jnp.asarray(seed).astype(jnp.uint32), jnp.uint32(0x9E3779B9))


def dither(random: jax.Array) -> jax.Array:
    """Noise in (-1/2, 1/2) from the upper 16 bits: odd multiples of 2**-17.

    Sixteen bits, because then level + noise is exact in float32 up to 127, so a value on the grid always stays there.
    """
    kept = lax.shift_right_logical(random, np.uint32(9)) & np.uint32(0x7FFF80)
    return lax.bitcast_convert_type(kept | np.uint32(0x3F800040), jnp.float32) - np.float32(1.5)


def round_level(y: jax.Array, fmt: BlockFormat, noise: jax.Array | None = None) -> jax.Array:
    """Rounds x / scale to a level (float32): half to even, or stochastically with ``noise`` from `dither`."""
    if fmt.levels == "integer":
        shifted = y if noise is None else y + noise
        rounded = lax.round(shifted, lax.RoundingMethod.TO_NEAREST_EVEN)
        return jnp.minimum(jnp.maximum(rounded, np.float32(-fmt.qmax)), np.float32(fmt.qmax))
    # e2m1: two levels per power of two, steps of 1/2 below 2.
    power = jnp.maximum(float_of(bits_of(y) & _INF_BITS), np.float32(1.0))
    step, inverse = power * np.float32(0.5), float_of(np.int32(0x7F800000 - 0x00800000) - bits_of(power)) * 2.0
    scaled = y * inverse
    scaled = scaled if noise is None else scaled + noise
    rounded = lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN) * step
    return jnp.minimum(jnp.maximum(rounded, np.float32(-6.0)), np.float32(6.0))


def level_code(level: jax.Array, fmt: BlockFormat) -> jax.Array:
    """The stored code of a level as int32: two's complement (8 or 4 bits, not masked), or the e2m1 nibble."""
    if fmt.levels == "integer":
        # An exact addition puts the integer into the low mantissa bits: no float-to-integer conversion.
        return bits_of(level + np.float32(12582912.0))
    magnitude = abs_bits(level)
    normal = lax.shift_right_logical(magnitude, np.int32(22)) - np.int32(252)
    code = jnp.where(magnitude < np.int32(0x3F000000), 0, jnp.where(magnitude < np.int32(0x3F800000), 1, normal))
    return code | (lax.shift_right_logical(bits_of(level), np.int32(28)) & np.int32(8))


def level_of_code(code: jax.Array, fmt: BlockFormat, high: bool = False) -> jax.Array:
    """The level (float32) of a code held in an int32 whose other bits are arbitrary.

    Args:
        code: int32; the low 8 bits (8-bit formats), or the low (``high=False``) or next (``high=True``) 4 bits count.
        fmt: the format.
        high: for 4 bits, read bits 4..7.
    """
    if fmt.levels == "integer":
        width, shift = (8, 0) if fmt.bits == 8 else (4, 4 if high else 0)
        mask, sign = ((1 << width) - 1) << shift, (1 << (width - 1)) << shift
        # 2**23 + (code + half): one logic instruction; the subtraction is exact.
        magic = float_of((code & np.int32(mask)) ^ np.int32(0x4B000000 | sign))
        level = magic - np.float32(8388608.0 + sign)
        return level * np.float32(1.0 / 16.0) if shift else level
    nibble = lax.shift_right_logical(code, np.int32(4)) if high else code
    small = nibble & np.int32(7)
    normal = float_of(lax.shift_left(small, np.int32(22)) + np.int32(126 << 23))
    value = jnp.where(small < 2, small.astype(jnp.float32) * np.float32(0.5), normal)
    return float_of(bits_of(value) | lax.shift_left(nibble & np.int32(8), np.int32(28)))


def butterfly(parts: list[jax.Array]) -> list[jax.Array]:
    """The orthonormal Walsh-Hadamard transform over a list of 2**k equal arrays; its own inverse."""
    width, parts = len(parts), list(parts)
    stride = 1
    while stride < width:
        for i in range(width):
            if not i & stride:
                a, b = parts[i], parts[i + stride]
                parts[i], parts[i + stride] = a + b, a - b
        stride *= 2
    return [part * np.float32(width**-0.5) for part in parts]
