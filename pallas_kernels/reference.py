"""The meaning of every op, in plain jnp on ``[*lead, blocks, block_size]``; also the "xla" backend.

    scale = roundup(absmax / reach)        q = round(x / scale)        x ~ q * scale

The scale is rounded up to bfloat16, or to float8_e4m3fn under one bfloat16 scale per tile of 1024 elements. A block
with NaN or Inf gets the scale NaN (and zero levels), so it dequantises to NaN. Scales have a floor of 2**-100: blocks
below about 1e-28 keep that absolute step, subnormals and zeros become zeros. A block whose rotated coordinates exceed
float32 counts as non-finite. Kernels equal this file bit for bit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import numerics, scale_rounding
from pallas_kernels.array import TILE, QuantFormat
from pallas_kernels.slices import from_blocks, to_blocks

# Contributions of a sum that are decoded one by one, and those that one pass of a loop adds up.
MOST_DECODED_ALONE = 8
MOST_AT_ONCE = 64


def rotate(blocks: jax.Array, width: int | None, factor: float = 1.0) -> jax.Array:
    """Orthonormal Hadamard rotation inside each block, its own inverse; then times ``factor``.

    ``width`` elements at a stride of ``block_size / width`` form one group: element ``k * block_size / width + j`` is
    coordinate k of group j. Pairs are added and subtracted at distances ``block_size / width``, twice that, and so on.

    >>> import jax.numpy as jnp
    >>> x = jnp.eye(2, 64)
    >>> bool(jnp.allclose(rotate(rotate(x, 32), 32), x, atol=1e-6))
    True
    """
    if width is None:
        return numerics.scaled(blocks, factor)
    values, apart = blocks * np.float32(numerics.BEFORE_ROTATION), blocks.shape[-1] // width
    # One array per coordinate: XLA fuses this form best.
    parts = [values[..., k * apart : (k + 1) * apart] for k in range(width)]
    stride = 1
    while stride < width:
        for k in range(width):
            if not k & stride:
                low, high = parts[k], parts[k + stride]
                parts[k], parts[k + stride] = low + high, low - high
        stride *= 2
    return numerics.scaled(jnp.concatenate(parts, axis=-1), factor * numerics.after_rotation(width))


def block_scales(magnitude: jax.Array, fmt: QuantFormat) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Scales from the integer absmax of each block, ``[*lead, blocks]``.

    Returns:
        ``(effective, scale, tile_scale)``: the finite float32 scale to divide by, and the two stored arrays.
    """
    needed = scale_rounding.needed_scale(magnitude, fmt.reach)
    finite = numerics.is_finite_bits(magnitude)
    if not fmt.tiled:
        effective = scale_rounding.round_scale(needed, fmt.reach)
        return effective, jnp.where(finite, effective, np.float32(np.nan)).astype(jnp.bfloat16), None
    per_tile = TILE // fmt.block_size
    grouped = needed.reshape(*needed.shape[:-1], needed.shape[-1] // per_tile, per_tile)
    tile = scale_rounding.round_tile_scale(grouped.max(axis=-1, initial=0.0), fmt.reach)
    spread = jnp.repeat(tile, per_tile, axis=-1)
    inverse = jnp.repeat(scale_rounding.tile_inverse(numerics.reciprocal(tile)), per_tile, axis=-1)
    code = scale_rounding.e4m3_code(needed, inverse, magnitude)
    value = jnp.where(finite, scale_rounding.e4m3_value(code), np.float32(1.0))
    scale = jax.lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e4m3fn)
    return spread * value, scale, tile.astype(jnp.bfloat16)


def effective_scale(scale: jax.Array, tile_scale: jax.Array | None, fmt: QuantFormat) -> jax.Array:
    """The float32 scale of each block; NaN for a block that held NaN or Inf."""
    if tile_scale is None:
        return scale.astype(jnp.float32)
    code = jax.lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
    spread = jnp.repeat(tile_scale.astype(jnp.float32), TILE // fmt.block_size, axis=-1)
    return spread * scale_rounding.e4m3_value(code)


def pack(code: jax.Array, fmt: QuantFormat, place: int = 0) -> jax.Array:
    """Codes (int32, from bit ``place`` on) as stored bytes: int8, or uint8 with element j low and element
    j + block_size / 2 high; for 2 bits the four quarters, lowest first."""
    if fmt.bits == 8:
        return code.astype(jnp.int8)
    if fmt.bits == 2:
        quarters = jnp.split(code & np.int32(3), 4, axis=-1)
        return sum(part << np.int32(2 * k) for k, part in enumerate(quarters)).astype(jnp.uint8)  # type: ignore[union-attr]
    half = fmt.block_size // 2
    return numerics.packed(code[..., :half], code[..., half:], place).astype(jnp.uint8)


def unpack(qvalue: jax.Array, fmt: QuantFormat) -> list[jax.Array]:
    """Stored bytes as levels in float32: the whole blocks, their halves for 4 bits, or their quarters for 2."""
    if fmt.bits == 8:
        return [qvalue.astype(jnp.float32)]
    code = qvalue.astype(jnp.int32)
    if fmt.bits == 2:
        return [numerics.level_at(code, 2, 2 * k) * np.float32(4.0**-k) for k in range(4)]
    (low, _), (high, factor) = (numerics.scaled_level(code, fmt, high=high) for high in (False, True))
    return [low, high * np.float32(factor)]


def random_like(blocks: jax.Array, hashed_seed: jax.Array) -> jax.Array:
    """32 random bits for every pair (j, j + block_size / 2) of a block, ``[..., block_size / 2]``.

    The counter is the row-major index, over lead, block and position, of the pair's first element.
    """
    index = jnp.arange(blocks.size, dtype=jnp.uint32).reshape(blocks.shape)[..., : blocks.shape[-1] // 2]
    return numerics.hash_bits(index, hashed_seed)


def quantize_blocks(
    blocks: jax.Array, fmt: QuantFormat, hashed_seed: jax.Array | None, with_residual: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Quantises float32 blocks that are already rotated.

    Args:
        blocks: ``[*lead, blocks, block_size]`` float32.
        fmt: the format.
        hashed_seed: uint32 scalar from `numerics.hash_seed` for stochastic rounding, or None for half to even.
        with_residual: also return ``blocks - dequantised`` in float32.

    Returns:
        ``(qvalue, scale, tile_scale or None, residual or None)``.
    """
    magnitude = numerics.abs_bits(blocks).max(axis=-1, initial=0)
    effective, scale, tile_scale = block_scales(magnitude, fmt)
    finite = numerics.is_finite_bits(magnitude)[..., None]
    inverse = numerics.reciprocal(effective)
    inverse = scale_rounding.inverse_scale(inverse, effective, magnitude, fmt, hashed_seed is not None)
    y = jnp.where(finite, blocks * inverse[..., None], 0.0)
    if hashed_seed is None:
        code, level = numerics.encode(y, fmt)
    else:
        random = random_like(blocks, hashed_seed)
        halves = jnp.split(y, 2, axis=-1)
        parts = [numerics.encode(half, fmt, random, upper=i == 0) for i, half in enumerate(halves)]
        code, level = (jnp.concatenate(both, axis=-1) for both in zip(*parts, strict=True))
    residual = None
    if with_residual:
        assert level is not None
        residual = jnp.where(finite, blocks - level * effective[..., None], np.float32(np.nan))
    return pack(code, fmt, numerics.code_place(fmt, hashed_seed is not None)), scale, tile_scale, residual


def dequantize_blocks(qvalue: jax.Array, scale: jax.Array, tile_scale: jax.Array | None, fmt: QuantFormat) -> jax.Array:
    """Levels times scales in float32, ``[*lead, blocks, block_size]``, still rotated if the format rotates."""
    return _whole(_decoded(qvalue, scale, tile_scale, fmt))


def _decoded(qvalue: jax.Array, scale: jax.Array, tile_scale: jax.Array | None, fmt: QuantFormat) -> list[jax.Array]:
    effective = effective_scale(scale, tile_scale, fmt)[..., None]
    return [part * effective for part in unpack(qvalue, fmt)]


def _whole(parts: list[jax.Array]) -> jax.Array:
    # As late as can be: XLA computes what follows a concatenation element by element on a CPU.
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def sum_blocks(qvalue: jax.Array, scale: jax.Array, tile_scale: jax.Array | None, fmt: QuantFormat) -> jax.Array:
    """Sum over the leading dimension in index order, float32; still rotated if the format rotates."""
    stored = (qvalue, scale, tile_scale)
    count = qvalue.shape[0]
    total: list[jax.Array] | None
    looped = count - count % MOST_AT_ONCE if count > MOST_AT_ONCE else 0
    total = None
    if looped:
        groups = jax.tree.map(lambda a: a[:looped].reshape(-1, MOST_AT_ONCE, *a.shape[1:]), stored)
        total = _add_in_order(None, jax.tree.map(lambda a: a[0], groups), fmt)
        total, _ = jax.lax.scan(
            lambda total, group: (_add_in_order(total, group, fmt), None), total, jax.tree.map(lambda a: a[1:], groups)
        )
    if looped < count:
        total = _add_in_order(total, jax.tree.map(lambda a: a[looped:], stored), fmt)
    assert total is not None, "the public op refuses an empty sum"
    return _whole(total)


def _add_in_order(total: list[jax.Array] | None, stored: Any, fmt: QuantFormat) -> list[jax.Array]:
    """``total`` and the contributions, one after the other, in the parts of `unpack`.

    Each decoded by itself, the compiler makes one pass of it, but its program, and the time to compile it, grow by some
    thirty operations a contribution: worth it for the few of one node.
    """
    qvalue, scale, tile_scale = stored
    count = qvalue.shape[0]
    if count > MOST_DECODED_ALONE:
        together = _decoded(qvalue, scale, tile_scale, fmt)
        contributions = [[part[i] for part in together] for i in range(count)]
    else:
        tiles = [None] * count if tile_scale is None else [tile_scale[i] for i in range(count)]
        contributions = [_decoded(qvalue[i], scale[i], tiles[i], fmt) for i in range(count)]
    for parts in contributions:
        total = parts if total is None else [a + b for a, b in zip(total, parts, strict=True)]
    assert total is not None
    return total


def requantize_blocks(
    total: jax.Array,
    shape: tuple[int, ...],
    source: QuantFormat,
    fmt: QuantFormat,
    factor: float,
    addend: jax.Array | None,
    hashed_seed: jax.Array | None,
    with_residual: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """The second half of the fused op: float32 sums in ``source`` blocks times ``factor``, quantised in ``fmt`` blocks.

    When both formats rotate alike the sum is requantised as it stands, without rotating back and forth.
    ``addend`` is ``[*lead, *shape]`` and not rotated; the residual is returned as ``[*lead, *shape]``, not rotated.
    """
    num_lead = total.ndim - 2
    alike = source.rotates_like(fmt)
    total = rotate(total, None if alike else source.rotate, factor)
    blocks = total
    if total.shape[-1] != fmt.block_size or source.tiled != fmt.tiled or not alike:
        # Also drops what rotating back left in the padding.
        blocks = to_blocks(from_blocks(total, shape), fmt, num_lead)
    if addend is not None:
        more = to_blocks(addend.astype(jnp.float32), fmt, num_lead)
        blocks = blocks + (rotate(more, fmt.rotate) if alike else more)
    if not alike:
        blocks = rotate(blocks, fmt.rotate)
    qvalue, scale, tile_scale, residual = quantize_blocks(blocks, fmt, hashed_seed, with_residual)
    if residual is not None:
        residual = from_blocks(rotate(residual, fmt.rotate), shape)
    return qvalue, scale, tile_scale, residual
