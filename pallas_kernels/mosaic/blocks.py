"""The registers-to-memory half of every quantising kernel: scales, levels, payload, residual.

The values of a chunk arrive as parts, float32 ``[outer, *middle, part_cols]``: one part (8 bits), or the two halves of
every block (4 bits), so that packing two levels into a byte needs no move across lanes. Same arithmetic and same
order as `reference`, hence the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import _compat, numerics, scale_rounding
from pallas_kernels.array import TILE, QuantFormat
from pallas_kernels.bits import bits_of, float_of
from pallas_kernels.mosaic import registers
from pallas_kernels.mosaic.layout import WARPS, chunk_rows, flat_index, layout, reduced, split_threads, spread
from pallas_kernels.mosaic.rotate import Stage, rotate_parts, stages

NO_2_BITS = "there is no kernel for 2 bits; use 'xla'"


def num_parts(fmt: QuantFormat, stochastic: bool) -> int:
    """Parts a block is held in: its halves where they share a byte or a random number, else the whole."""
    return 2 if fmt.bits == 4 or stochastic else 1


def blocks_of_tile(block_size: int) -> tuple[int, ...]:
    """The dim of a tile's blocks; none for a single block, as the layouts of JAX 0.11 and 0.12 fail on dims of one."""
    return (TILE // block_size,) if block_size < TILE else ()


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Static geometry of what one program quantises.

    Attributes:
        fmt: the format written.
        dims: ``(outer, *middle, block_size)``; with tile scales ``outer`` counts tiles, else the middle is part of it.
        vec: consecutive elements of a lane.
        strides: elements between neighbours along each dim of ``dims`` in the flat order of the output.
        num_parts: pieces a block is held in, see `num_parts`.
    """

    fmt: QuantFormat
    dims: tuple[int, ...]
    vec: int
    strides: tuple[int, ...]
    num_parts: int

    @property
    def part_dims(self) -> tuple[int, ...]:
        """Shape of one part."""
        return (*self.dims[:-1], self.dims[-1] // self.num_parts)

    @property
    def part_layout(self) -> Any:
        """Register layout of one part."""
        return layout(self.part_dims, self.vec)

    @property
    def row_layout(self) -> Any:
        """Register layout of one number per block."""
        return reduced(self.part_layout, (len(self.dims) - 1,))

    def rotated(
        self,
        parts: list[jax.Array],
        interpret: bool,
        source: QuantFormat | None = None,
        factor: float = 1.0,
        unit: float = 1.0,
        before_addition: bool = True,
    ) -> list[jax.Array]:
        """The parts rotated as ``source`` (default: the format written) says, see `rotate_parts`."""
        plan = self.stages(source or self.fmt)
        assert plan is not None, "make_chunk keeps rotations within warps"
        return rotate_parts(parts, self.part_dims, self.vec, plan, factor, interpret, unit, before_addition)

    def sharing(self, fmt: QuantFormat, row_dims: int) -> dict[int, int]:
        """Lanes that hold the same scale, by its bytes; a block of ``fmt`` is one row of the first dims."""
        _, lanes = split_threads(self.part_dims, self.vec)
        block, tile = math.prod(lanes[row_dims:]), math.prod(lanes[1:])
        return {1: block, 2: tile} if fmt.tiled else {2: block}

    def stages(self, source: QuantFormat) -> tuple[Stage, ...] | None:
        """The stages of the rotation of a format, none without one; None if they would cross warps."""
        if source.rotate is None:
            return ()
        return stages(self.part_dims, self.vec, self.num_parts, source.block_size, source.rotate)


def make_chunk(
    fmt: QuantFormat, rows: int, inner: tuple[int, ...], vec: int, num_parts: int, elements: int, *rotated: QuantFormat
) -> Chunk | None:
    """The share of one program, of about ``elements`` elements.

    Args:
        fmt: the format written.
        rows: rows there are.
        inner: the other dims, the block innermost.
        vec: consecutive elements of a lane.
        num_parts: pieces a block is held in.
        elements: wanted elements.
        *rotated: formats whose rotations take place in the chunk.

    Returns:
        The chunk, or None if the rows are too few for 128 threads.
    """
    strides = (*(math.prod(inner[d:]) for d in range(len(inner))), 1)
    part = (*inner[:-1], inner[-1] // num_parts)
    # One row a program would be reduced across warps, which JAX 0.10 cannot compile here.
    for least in (2, WARPS):
        taken = chunk_rows(rows, part, vec, elements // num_parts, least)
        if taken is None:
            return None
        chunk = Chunk(fmt, (taken, *inner), vec, strides, num_parts)
        if all(chunk.stages(each) is not None for each in rotated):
            return chunk
    return None


STORED = ("qvalue", "scale", "tile_scale")


def stored_types(fmt: QuantFormat, lead: tuple[int, ...], inner: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """What a kernel writes, by name: arrays ``[*lead, *inner]`` with one block, or the blocks of a tile, in ``inner``.

    float8 scales are written as their codes.
    """
    payload = jnp.int8 if fmt.bits == 8 else jnp.uint8
    types = {
        "qvalue": jax.ShapeDtypeStruct((*lead, *inner[:-1], fmt.block_bytes), payload),
        "scale": jax.ShapeDtypeStruct((*lead, *inner[:-1]), jnp.uint8 if fmt.tiled else jnp.bfloat16),
    }
    if fmt.tiled:
        types["tile_scale"] = jax.ShapeDtypeStruct(lead, jnp.bfloat16)
    return types


def stored_arrays(
    out: dict[str, jax.Array], fmt: QuantFormat, lead: tuple[int, ...], rows: int, inner: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The record's arrays from what a kernel wrote; ``rows`` of ``inner`` make one slice."""
    blocks = (*lead, rows * math.prod(inner[:-1]))
    scale = out["scale"].reshape(blocks)
    tile_scale = None
    if fmt.tiled:
        scale = lax.bitcast_convert_type(scale, jnp.float8_e4m3fn)
        tile_scale = out["tile_scale"].reshape(*lead, rows)
    return out["qvalue"].reshape(*blocks, fmt.block_bytes), scale, tile_scale


def run_kernel(
    body: Callable[[dict[str, Any]], None],
    inputs: dict[str, jax.Array],
    outputs: dict[str, Any],
    grid: int,
    interpret: bool,
) -> dict[str, jax.Array]:
    """Runs a body that takes its refs by name, on ``grid`` programs."""
    names = [*inputs, *outputs]

    def by_name(*refs: Any) -> None:
        body(dict(zip(names, refs, strict=True)))

    # Inside shard_map the outputs vary over every mesh axis that any operand varies over.
    axes = frozenset[str]().union(*(_compat.varying_axes(value) for value in inputs.values()))
    operands = [_compat.vary(value, axes) for value in inputs.values()]
    results = _compat.mosaic_kernel(by_name, list(outputs.values()), (grid,), interpret)(*operands)
    return {name: _compat.vary(value, axes) for name, value in zip(outputs, results, strict=True)}


def run_quantizing(
    body: Callable[[dict[str, Any]], None],
    inputs: dict[str, jax.Array],
    hashed_seed: jax.Array | None,
    fmt: QuantFormat,
    shape: tuple[int, ...],
    residual_dtype: Any,
    grid: int,
    interpret: bool,
) -> dict[str, jax.Array]:
    """`run_kernel` of a body that quantises values of ``shape``, rows first; a residual where it has a dtype."""
    rows, *inner = shape
    seed = {} if hashed_seed is None else {"seed": hashed_seed.reshape(1)}
    outputs = stored_types(fmt, (rows,), tuple(inner))
    if residual_dtype is not None:
        outputs["residual"] = jax.ShapeDtypeStruct(shape, residual_dtype)
    return run_kernel(body, {**inputs, **seed}, outputs, grid, interpret)


def cut(ref: Any, pieces: int) -> list[Any]:
    """A ref cut along its last dimension into equal pieces."""
    *dims, cols = ref.shape
    width = cols // pieces
    return [ref.at[(*[slice(None)] * len(dims), pl.ds(i * width, width))] for i in range(pieces)]


def scales(
    parts: list[jax.Array], chunk: Chunk, unit: float, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """``(magnitude, effective, finite mask, stored scale, stored tile scale)`` of each block.

    The mask is an int32 of all ones, or zero.

    The stored scale is float32 (bfloat16 exactly, NaN for a non-finite block) or an int32 float8 code.
    """
    fmt, rank = chunk.fmt, len(chunk.dims)
    # Compiled, a float maximum keeps NaN and takes magnitudes, in one instruction an element; an integer one needs two.
    # Interpreted, it is XLA's for a CPU, which drops NaN.
    sizes = [numerics.abs_bits(part) if interpret else jnp.abs(part) for part in parts]
    largest = jnp.max(functools.reduce(jnp.maximum, sizes), axis=rank - 1)
    largest = float_of(largest) if interpret else largest
    magnitude = numerics.abs_bits(largest * np.float32(1 / unit))
    finite = numerics.is_finite_bits(magnitude)
    mask = jnp.where(finite, np.int32(-1), np.int32(0))
    needed = scale_rounding.needed_scale(magnitude, fmt.reach)
    if not fmt.tiled:
        effective = scale_rounding.round_scale(needed, fmt.reach)
        return magnitude, effective, mask, jnp.where(finite, effective, np.float32(np.nan)), None
    largest_needed = needed
    for axis in range(rank - 2, 0, -1):
        largest_needed = jnp.max(largest_needed, axis=axis)
    tile = scale_rounding.round_tile_scale(largest_needed, fmt.reach)
    wide = spread(tile, chunk.dims[:-1], chunk.row_layout)
    inverse = registers.reciprocal(tile, reduced(chunk.part_layout, range(1, rank)), interpret)
    inverse = spread(scale_rounding.tile_inverse(inverse), chunk.dims[:-1], chunk.row_layout)
    code = scale_rounding.e4m3_code(needed, inverse, magnitude)
    value = jnp.where(finite, scale_rounding.e4m3_value(code), np.float32(1.0))
    return magnitude, wide * value, mask, code, tile


def store_quantized(
    parts: list[jax.Array],
    chunk: Chunk,
    start: jax.Array,
    hashed_seed: jax.Array | None,
    refs: dict[str, Any],
    residual_ref: Any | None,
    interpret: bool,
    unit: float = 1.0,
) -> None:
    """Quantises the parts and writes them.

    Args:
        parts: float32 ``unit`` times the values, one or two arrays of ``chunk.part_dims``, rotated.
        chunk: the geometry.
        start: int32 flat index of the chunk's first element, for the dither.
        hashed_seed: uint32 scalar, or None.
        refs: ``qvalue``, ``scale`` and perhaps ``tile_scale``, already cut to the chunk.
        residual_ref: cut to the chunk, or None; the residual is rotated back.
        interpret: whether the kernel is interpreted.
        unit: a power of two, see ``parts``.
    """
    fmt, target = chunk.fmt, chunk.part_layout
    magnitude, effective, mask, stored, tile = scales(parts, chunk, unit, interpret)
    inverse = registers.reciprocal(effective, chunk.row_layout, interpret)
    inverse = scale_rounding.inverse_scale(inverse, effective, magnitude, fmt, hashed_seed is not None)
    inverse = spread(inverse * np.float32(1 / unit), chunk.part_dims, target)
    keep = spread(mask, chunk.part_dims, target)
    codes, losses = [], []
    lossy = None
    if residual_ref is not None:
        nan_mask = jnp.where(mask == 0, np.int32(0x7FC00000), np.int32(0))
        lossy = bits_of(effective * np.float32(unit)) & mask | nan_mask
        lossy = spread(float_of(lossy), chunk.part_dims, target)
    random = None
    if hashed_seed is not None:
        random = numerics.hash_bits(flat_index(chunk.part_dims, chunk.strides, start, target), hashed_seed)
    # The payload of a non-finite block is zero: levels are masked, or where two make a byte, the byte is.
    mask_bytes = fmt.bits == 4 and not interpret
    for i, part in enumerate(parts):
        if mask_bytes:
            y = registers.product(part, inverse, target)
        else:
            y = float_of(bits_of(part * inverse) & keep)
        # A part is kept for its residual, and y need not be.
        signs = part if mask_bytes and lossy is not None else None
        code, level = numerics.encode(y, fmt, random, i == 0, lossy is not None, signs, subnormals=not interpret)
        codes.append(code)
        if lossy is not None and level is not None:
            losses.append(part - level * lossy)
    if residual_ref is not None:
        losses = chunk.rotated(losses, interpret, unit=unit)
        for loss, ref in zip(losses, cut(residual_ref, len(parts)), strict=True):
            _compat.store(ref, loss.astype(ref.dtype))
    if fmt.bits == 8:
        for code, ref in zip(codes, cut(refs["qvalue"], len(parts)), strict=True):
            _compat.store(ref, code.astype(jnp.int8))
    else:
        payload = numerics.packed(codes[0], codes[1], numerics.code_place(fmt, hashed_seed is not None))
        if mask_bytes:
            payload = payload & keep
        _compat.store(refs["qvalue"], payload.astype(jnp.uint8))
    scale_dtype = jnp.uint8 if fmt.tiled else jnp.bfloat16
    _compat.store(refs["scale"], stored.astype(scale_dtype))
    if tile is not None:
        _compat.store(refs["tile_scale"], tile.astype(jnp.bfloat16))
