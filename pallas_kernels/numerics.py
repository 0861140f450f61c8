"""The arithmetic of one block, written once for every backend.

Only elementwise operations that mean the same bits on CPU, in XLA's GPU code and in a Mosaic kernel: integer tricks in
place of ceil and floor, a multiplication by a constant in place of a division, products that are exact in float32
(level x scale has at most 15 significant bits, so a fused multiply-add changes nothing). Functions take arrays of any
shape.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import e2m1
from pallas_kernels.array import QuantFormat
from pallas_kernels.bits import INF, bits_of, float_of, half_of

_ABS = np.int32(0x7FFFFFFF)


def abs_bits(x: jax.Array) -> jax.Array:
    """Magnitude as an int32 that orders like it; NaN and Inf are the largest, so an integer maximum keeps them."""
    return bits_of(x) & _ABS


def is_finite_bits(magnitude: jax.Array) -> jax.Array:
    """Whether a magnitude from `abs_bits` is finite."""
    return magnitude < INF


def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x in float32, rounded once: what every kernel's reciprocal equals."""
    return np.float32(1.0) / x


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
    """Noise in (-1/2, 1/2) from the upper or lower 16 bits of a hash: odd multiples of 2**-17. For 8 bits.

    Sixteen bits, because then level + noise is exact in float32 up to 127, so a value on the grid always stays there;
    and because one hash then serves two elements, the j-th of either half of a block.
    """
    kept = half_of(random, upper, 7) | np.uint32(0x3F800040)
    return lax.bitcast_convert_type(kept, jnp.float32) - np.float32(1.5)


def rounded_down(y: jax.Array, random: jax.Array, upper: bool) -> tuple[jax.Array, jax.Array]:
    """The largest whole number up to y + u, with u in [0, 1) the upper or lower 16 bits of a hash.

    160 + u has these bits as they are for the lower half of its float32, and 160 + u + y, for y within 32, its whole
    part in the upper half: nothing is converted. The sum is rounded to 2**-16, so that a y that is off a whole number
    by less than half of that stays on it.

    Returns:
        ``(code, level)``: int32 whose bits 16..19 are those of the number, and the number in float32.
    """
    total = bits_of(y + lax.bitcast_convert_type(half_of(random, upper, 0) | np.uint32(0x43200000), jnp.float32))
    return total, float_of(total & np.int32(-0x10000)) - np.float32(160.0)


def code_place(fmt: QuantFormat, stochastic: bool) -> int:
    """The lowest bit of a code from `encode`."""
    if fmt.bits != 4 or not stochastic:
        return 0
    return e2m1.PLACE if fmt.levels == "e2m1" else 16


def packed(low: jax.Array, high: jax.Array, place: int) -> jax.Array:
    """Two 4-bit codes that stand at ``place`` as the low byte of an int32 with arbitrary bits above."""
    pair = (low & np.int32(0xF << place)) | (lax.shift_left(high, np.int32(4)) & np.int32(~(0xF << place)))
    return lax.shift_right_logical(pair, np.int32(place)) if place else pair


def encode(
    y: jax.Array,
    fmt: QuantFormat,
    random: jax.Array | None = None,
    upper: bool = True,
    level_wanted: bool = True,
    signs: jax.Array | None = None,
    subnormals: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Rounds x / scale to a level, half to even, or stochastically with one half of ``random`` from `hash_bits`.

    Args:
        y: x / scale; no product that the compiler could fuse into an addition.
        fmt: the format.
        random: uint32, or None.
        upper: which half of it.
        level_wanted: whether the level is; without it an addition does the rounding, which is the same number.
        signs: float32 with the signs of y, if there is one that is kept anyway: a register less while e2m1 is rounded.
        subnormals: see `scaled_level`.

    Returns:
        ``(code, level)``: an int32 that holds the stored code (two's complement, or the e2m1 nibble) from bit
        `code_place` on and arbitrary bits around it, and its value in float32, or None if it is not wanted.
    """
    if fmt.levels == "e2m1":
        if random is None:
            return e2m1.nearest(y, level_wanted, subnormals)
        return e2m1.rounded_down(y, random, upper, y if signs is None else signs, level_wanted, subnormals)
    if fmt.bits == 4 and random is not None:
        total, level = rounded_down(y, random, upper)
        return total, level if level_wanted else None
    level = y if random is None else y + dither(random, upper)
    if level_wanted:
        level = lax.round(level, lax.RoundingMethod.TO_NEAREST_EVEN)
    # At 4 bits nothing leaves the range: even under the ceiling of `round_scale` |y| stays below 7.1.
    if fmt.bits != 4:
        level = jnp.minimum(jnp.maximum(level, np.float32(-fmt.qmax)), np.float32(fmt.qmax))
    # Adding 1.5 * 2**23 puts the integer into the low mantissa bits: no float-to-integer conversion.
    return bits_of(level + np.float32(12582912.0)), level if level_wanted else None


def _field(fmt: QuantFormat, high: bool) -> tuple[int, int]:
    """Mask of an integer level inside its byte, and its sign bit."""
    width, shift = (8, 0) if fmt.bits == 8 else (4, 4 if high else 0)
    return ((1 << width) - 1) << shift, 1 << (width - 1 + shift)


def magic(fmt: QuantFormat) -> np.ndarray:
    """The constants that `scaled_level` xors into a masked level: ``int32 [2]`` (low, high), or ``[1]`` for 8 bits.

    A kernel takes them as an operand: a constant in a register lets the assembler mask and xor in one instruction.
    """
    places = (False, True) if fmt.bits == 4 else (False,)
    return np.array([0x4B000000 | _field(fmt, high)[1] for high in places], np.int32)


def scaled_level(
    code: jax.Array,
    fmt: QuantFormat,
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
    return e2m1.level(code, 4 if high else 0, subnormals), 1.0


def level_at(code: jax.Array, width: int, shift: int) -> jax.Array:
    """The two's complement level in ``width`` bits of an int32 from bit ``shift`` on, times ``2**shift``."""
    mask, sign = ((1 << width) - 1) << shift, 1 << (width - 1 + shift)
    return float_of((code & np.int32(mask)) ^ np.int32(0x4B000000 | sign)) - np.float32(8388608.0 + sign)


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
