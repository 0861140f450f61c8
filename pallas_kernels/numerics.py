"""The arithmetic of one block, written once for every backend.

Only elementwise operations that mean the same bits on CPU, in XLA's GPU code and in a Mosaic kernel: integer tricks in
place of ceil and floor, a multiplication by a constant in place of a division, products that are exact in float32
(level x scale has at most 15 significant bits, so a fused multiply-add changes nothing). Functions take arrays of any
shape and know nothing of blocks, tiles, slices or memory.
"""

from __future__ import annotations

import math

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


def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x in float32, rounded once: what every kernel's reciprocal equals."""
    return np.float32(1.0) / x


def tile_inverse(one_over_tile_scale: jax.Array) -> jax.Array:
    """What turns needed scales into ratios to their tile's scale; the hair below 1 is that of `needed_scale`."""
    return one_over_tile_scale * np.float32(_DEFLATE)


def e4m3_code(needed: jax.Array, tile_inverse: jax.Array, magnitude: jax.Array) -> jax.Array:
    """The float8_e4m3fn code (int32, 1..0x7F) of needed / tile_scale rounded up; 0x7F (NaN) for a non-finite block."""
    ratio = needed * tile_inverse
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
    """32 random bits (uint32) for a counter: a Weyl sequence from the seed, each term mixed by one multiplication.

    Neighbouring counters of a thread differ by constants, so that their terms cost an addition each.
    """
    h = index * np.uint32(0x9E3779B1) + hashed_seed
    h = (h ^ lax.shift_right_logical(h, np.uint32(13))) * np.uint32(0x21F0AAAD)
    return h ^ lax.shift_right_logical(h, np.uint32(16))


def hash_seed(seed: jax.Array | int) -> jax.Array:
    """A uint32 scalar that decorrelates neighbouring seeds: MurmurHash3's finaliser, once, outside any kernel."""
    h = jnp.asarray(seed).astype(jnp.uint32) ^ np.uint32(0x9E3779B9)
    h = (h ^ lax.shift_right_logical(h, np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ lax.shift_right_logical(h, np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ lax.shift_right_logical(h, np.uint32(16))


def dither(random: jax.Array, upper: bool) -> jax.Array:
    """Noise in (-1/2, 1/2) from the upper or lower 16 bits of a hash: odd multiples of 2**-17. For 8 bits and e2m1.

    Sixteen bits, because then level + noise is exact in float32 up to 127, so a value on the grid always stays there;
    and because one hash then serves two elements, the j-th of either half of a block.
    """
    moved = lax.shift_right_logical(random, np.uint32(9)) if upper else lax.shift_left(random, np.uint32(7))
    kept = (moved & np.uint32(0x7FFF80)) | np.uint32(0x3F800040)
    return lax.bitcast_convert_type(kept, jnp.float32) - np.float32(1.5)


def rounded_down(y: jax.Array, random: jax.Array, upper: bool) -> tuple[jax.Array, jax.Array]:
    """The largest whole number up to y + u, with u in [0, 1) the upper or lower 16 bits of a hash.

    160 + u has these bits as they are for the lower half of its float32, and 160 + u + y, for y within 32, its whole
    part in the upper half: nothing is converted. The sum is rounded to 2**-16, so that a y that is off a whole number
    by less than half of that stays on it.

    Returns:
        ``(code, level)``: int32 whose bits 16..19 are those of the number, and the number in float32.
    """
    fraction = lax.shift_right_logical(random, np.uint32(16)) if upper else random & np.uint32(0xFFFF)
    total = bits_of(y + lax.bitcast_convert_type(fraction | np.uint32(0x43200000), jnp.float32))
    return total, float_of(total & np.int32(-0x10000)) - np.float32(160.0)


def code_place(fmt: BlockFormat, stochastic: bool) -> int:
    """The lowest bit of a code from `encode`."""
    return 16 if stochastic and fmt.bits == 4 and fmt.levels == "integer" else 0


def packed(low: jax.Array, high: jax.Array, place: int) -> jax.Array:
    """Two 4-bit codes that stand at ``place`` as the low byte of an int32 with arbitrary bits above."""
    pair = (low & np.int32(0xF << place)) | (lax.shift_left(high, np.int32(4)) & np.int32(~(0xF << place)))
    return lax.shift_right_logical(pair, np.int32(place)) if place else pair


def encode(
    y: jax.Array, fmt: BlockFormat, random: jax.Array | None = None, upper: bool = True, level_wanted: bool = True
) -> tuple[jax.Array, jax.Array | None]:
    """Rounds x / scale to a level, half to even, or stochastically with one half of ``random`` from `hash_bits`.

    Without ``level_wanted`` an addition does the rounding, which is the same number. y must not be a product that the
    compiler could fuse into an addition.

    Returns:
        ``(code, level)``: an int32 that holds the stored code (two's complement, or the e2m1 nibble) from bit
        `code_place` on and arbitrary bits around it, and its value in float32, or None if it is not wanted.
    """
    if random is not None and code_place(fmt, True):
        total, level = rounded_down(y, random, upper)
        return total, level if level_wanted else None
    noise = None if random is None else dither(random, upper)
    if fmt.levels == "integer":
        level = y if noise is None else y + noise
        if level_wanted:
            level = lax.round(level, lax.RoundingMethod.TO_NEAREST_EVEN)
        # At 4 bits nothing leaves the range: even under the ceiling of `round_scale` |y| stays below 7.1.
        if fmt.bits == 8:
            level = jnp.minimum(jnp.maximum(level, np.float32(-fmt.qmax)), np.float32(fmt.qmax))
        # Adding 1.5 * 2**23 puts the integer into the low mantissa bits: no float-to-integer conversion.
        return bits_of(level + np.float32(12582912.0)), level if level_wanted else None
    # e2m1 has two levels per power of two, at steps of 1/2, 1 and 2. Adding 1.5 * 2**23 steps rounds to a whole number
    # k of steps in the low bits; the code is k plus twice the index of the power. Its low three bits are all it has, so
    # the constants of both exponents count modulo 8.
    # Below 7, which all of them are, sizes round to at most 6.
    size = jnp.abs(y)
    if noise is not None:
        size = jnp.minimum(size, np.float32(6.0))
    power = jnp.maximum(bits_of(size) & _INF_BITS, np.int32(0x3F800000))
    if noise is not None:
        size = jnp.minimum(size + noise * (float_of(power) * np.float32(0.5)), np.float32(6.0))
    steps = bits_of(size + float_of(power + np.int32((22 << 23) + (1 << 22) + 2)))
    code = (steps + lax.shift_right_logical(power, np.int32(22))) & np.int32(7)
    code = code | (lax.shift_right_logical(bits_of(y), np.int32(28)) & np.int32(~7))
    return code, scaled_level(code, fmt)[0] if level_wanted else None


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


def inverse_scale(
    one_over_scale: jax.Array, effective: jax.Array, magnitude: jax.Array, fmt: BlockFormat, stochastic: bool
) -> jax.Array:
    """1 / scale, or less where a 4-bit level plus what `rounded_down` adds would reach 8.

    The most it adds is 1 - 2**-16, and sums round to 2**-16: levels may reach 7 + 2**-17. Scales are too small by
    2**-21 of themselves at most, for the two hairs that `needed_scale` and `tile_inverse` take off, and products round
    by 2**-24; but under the ceiling of `round_scale`, where blocks reach float32's largest numbers, by up to 2**-7.
    """
    if not stochastic or fmt.bits == 8 or fmt.levels != "integer":
        return one_over_scale
    over = float_of(magnitude) > effective * np.float32(fmt.qmax * (1 + 1.5 * 2.0**-21))
    return jnp.where(over, one_over_scale * np.float32(1 - 2.0**-7), one_over_scale)


def e2m1_bits(code: jax.Array, high: bool) -> jax.Array:
    """An e2m1 nibble as the float32 that is 2**-126 of it, subnormal for a level of 1/2, as int32 bits."""
    # One product moves the sign to the top, and the other bits to the lowest of the exponent and the highest below it.
    shift = 4 if high else 0
    wide = (code & np.int32(0xF << shift)) * np.int32((1 << (22 - shift)) + (1 << (28 - shift)))
    return wide & np.int32(0x81C00000 - (1 << 32))


def scaled_level(
    code: jax.Array,
    fmt: BlockFormat,
    high: bool = False,
    constant: jax.Array | None = None,
    subnormals: bool = False,
) -> tuple[jax.Array, float]:
    """The level of a code held in an int32 whose other bits are arbitrary, up to a power of two.

    Args:
        code: int32; the low 8 bits (8-bit formats), or the low (``high=False``) or next (``high=True``) 4 bits count.
        fmt: the format.
        high: for 4 bits, read bits 4..7.
        constant: the entry of `magic`, if it is at hand as a value.
        subnormals: whether the device keeps subnormal numbers, as GPUs do and XLA on a CPU does not: e2m1 is then a
            float32 with few bits, subnormals included, and costs half as much.

    Returns:
        ``(value, factor)`` with level = value * factor; the factor may go into the scale, exactly.
    """
    if fmt.levels == "integer":
        mask, sign = _field(fmt, high)
        # 2**23 + (code + half) by logic alone; the subtraction is exact.
        known = np.int32(0x4B000000 | sign) if constant is None else constant
        return float_of((code & np.int32(mask)) ^ known) - np.float32(8388608.0 + sign), 0.0625 if mask == 0xF0 else 1.0
    if subnormals:
        return float_of(e2m1_bits(code, high)) * np.float32(2.0**126), 1.0
    nibble = lax.shift_right_logical(code, np.int32(4)) if high else code
    small = nibble & np.int32(7)
    normal = float_of(lax.shift_left(small, np.int32(22)) + np.int32(126 << 23))
    value = jnp.where(small < 2, small.astype(jnp.float32) * np.float32(0.5), normal)
    return float_of(bits_of(value) | lax.shift_left(nibble & np.int32(8), np.int32(28))), 1.0


BEFORE_ROTATION = 0.125
"""Taken out before the butterflies of a rotation: an exact product, and only a coordinate that is itself out of range
overflows."""


def after_rotation(width: int) -> float:
    """What makes the butterflies of `BEFORE_ROTATION` times the values orthonormal."""
    return 1.0 / (BEFORE_ROTATION * math.sqrt(width))


def scaled(x: jax.Array, factor: float, before_addition: bool = True) -> jax.Array:
    """``x * factor`` rounded once, also when an addition follows.

    A compiler may fuse a product into the addition after it, and one may where another does not. It cannot see through
    a choice between the product and ``x``, which are equal where ``x`` is not finite.
    """
    if factor == 1.0:
        return x
    product = x * np.float32(factor)
    if math.frexp(factor)[0] == 0.5 or not before_addition:
        return product
    return jnp.where(is_finite_bits(abs_bits(x)), product, x)
