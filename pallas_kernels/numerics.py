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


def dither(random: jax.Array, upper: bool) -> jax.Array:
    """Noise in (-1/2, 1/2) from the upper or lower 16 bits of a hash: odd multiples of 2**-17.

    Sixteen bits, because then level + noise is exact in float32 up to 127, so a value on the grid always stays there;
    and because one hash then serves two elements, the j-th of either half of a block.
    """
    moved = lax.shift_right_logical(random, np.uint32(9)) if upper else lax.shift_left(random, np.uint32(7))
    kept = (moved & np.uint32(0x7FFF80)) | np.uint32(0x3F800040)
    return lax.bitcast_convert_type(kept, jnp.float32) - np.float32(1.5)


def encode(y: jax.Array, fmt: BlockFormat, noise: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Rounds x / scale to a level, half to even, or stochastically with ``noise`` from `dither`.

    Returns:
        ``(code, level)``: the stored code as int32 (two's complement with arbitrary bits above the low 4 or 8, or the
        e2m1 nibble), and its value in float32.
    """
    if fmt.levels == "integer":
        shifted = y if noise is None else y + noise
        rounded = lax.round(shifted, lax.RoundingMethod.TO_NEAREST_EVEN)
        # Nearest at 4 bits cannot leave the range: even under the ceiling of `round_scale`, |y| stays below 7.1.
        level = rounded
        if fmt.bits == 8 or noise is not None:
            level = jnp.minimum(jnp.maximum(rounded, np.float32(-fmt.qmax)), np.float32(fmt.qmax))
        # An exact addition puts the integer into the low mantissa bits: no float-to-integer conversion.
        return bits_of(level + np.float32(12582912.0)), level
    # e2m1 has two levels per power of two, at steps of 1/2, 1 and 2. Adding 1.5 * 2**23 steps rounds to a whole number
    # k of steps in the low bits; the code is k plus twice the index of the power.
    size = jnp.minimum(float_of(abs_bits(y)), np.float32(6.0))
    power = float_of(jnp.maximum(bits_of(size) & _INF_BITS, np.int32(0x3F800000)))
    if noise is not None:
        size = jnp.minimum(size + noise * (power * np.float32(0.5)), np.float32(6.0))
    magic = power * np.float32(1.5 * 2.0**22)
    steps = bits_of(size + magic) - bits_of(magic)
    index = lax.shift_right_logical(bits_of(power), np.int32(23)) - np.int32(127)
    sign = lax.shift_right_logical(bits_of(y), np.int32(28)) & np.int32(8)
    code = (steps + index + index) | sign
    return code, scaled_level(code, fmt)[0]


def _field(fmt: BlockFormat, high: bool) -> tuple[int, int]:
    """Mask of an integer level inside its byte, and its sign bit."""
    width, shift = (8, 0) if fmt.bits == 8 else (4, 4 if high else 0)
    return ((1 << width) - 1) << shift, 1 << (width - 1 + shift)


def magic(fmt: BlockFormat) -> np.ndarray:
    """The constants that `scaled_level` xors into a masked level: ``int32 [2]`` (low, high), or ``[1]`` for 8 bits.

    A kernel takes them as an operand: a constant in a register lets the assembler mask and xor in one instruction.
    """
    places = (False, True) if fmt.bits == 4 else (False,)
    return np.array([0x4B000000 | _field(fmt, high)[1] for high in places], np.int32)


def scaled_level(
    code: jax.Array, fmt: BlockFormat, high: bool = False, constant: jax.Array | None = None
) -> tuple[jax.Array, float]:
    """The level of a code held in an int32 whose other bits are arbitrary, up to a power of two.

    Args:
        code: int32; the low 8 bits (8-bit formats), or the low (``high=False``) or next (``high=True``) 4 bits count.
        fmt: the format.
        high: for 4 bits, read bits 4..7.
        constant: the entry of `magic`, if it is at hand as a value.

    Returns:
        ``(value, factor)`` with level = value * factor; the factor may go into the scale, exactly.
    """
    if fmt.levels == "integer":
        mask, sign = _field(fmt, high)
        # 2**23 + (code + half) by logic alone; the subtraction is exact.
        known = np.int32(0x4B000000 | sign) if constant is None else constant
        return float_of((code & np.int32(mask)) ^ known) - np.float32(8388608.0 + sign), 0.0625 if mask == 0xF0 else 1.0
    nibble = lax.shift_right_logical(code, np.int32(4)) if high else code
    small = nibble & np.int32(7)
    normal = float_of(lax.shift_left(small, np.int32(22)) + np.int32(126 << 23))
    value = jnp.where(small < 2, small.astype(jnp.float32) * np.float32(0.5), normal)
    return float_of(bits_of(value) | lax.shift_left(nibble & np.int32(8), np.int32(28))), 1.0


def butterfly(parts: list[jax.Array]) -> list[jax.Array]:
    """The orthonormal Walsh-Hadamard transform over a list of 2**k equal arrays; its own inverse."""
    # Scaled before the sums, so that only a coordinate that is itself out of range overflows.
    width = len(parts)
    parts = [part * np.float32(width**-0.5) for part in parts]
    stride = 1
    while stride < width:
        for i in range(width):
            if not i & stride:
                a, b = parts[i], parts[i + stride]
                parts[i], parts[i + stride] = a + b, a - b
        stride *= 2
    return parts
