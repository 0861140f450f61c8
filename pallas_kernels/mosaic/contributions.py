"""The contributions of the sum kernels: read, dequantised and added, in registers.

A program walks over the contributions in index order, a few per loop step so that their loads overlap while the
registers stay few. Levels come out of a logic instruction and an exact subtraction, and level x scale is exact, so the
sum has the reference's bits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import _compat, numerics, scale_rounding
from pallas_kernels.array import QuantFormat
from pallas_kernels.backend import Programs
from pallas_kernels.mosaic.blocks import Chunk, cut
from pallas_kernels.mosaic.layout import reduced, spread

CONTRIBUTIONS_PER_STEP = 4
"""Contributions whose loads are in flight together."""


@dataclasses.dataclass(frozen=True)
class Sum:
    """Static description of a sum.

    Attributes:
        count: contributions.
        rows: outer rows of all slices together; a row is one source block, or one tile where either format has tiles.
        split: source blocks in a row, (1,) or (tile / source block,); empty where a row is one source block.
        source: format of the contributions.
        chunk: what one program makes; its ``dims`` are ``(rows, *split, [source block / block,] block)``.
        factor: multiplies the sum.
        clamp: whether a sum beyond the largest finite number of the result's dtype becomes that number.
    """

    count: int
    rows: int
    split: tuple[int, ...]
    source: QuantFormat
    chunk: Chunk
    factor: float
    clamp: bool = False

    @property
    def inner(self) -> tuple[int, ...]:
        """Dims of a row."""
        return self.chunk.dims[1:]

    @property
    def grid(self) -> int:
        """Programs."""
        return -(-self.rows // self.chunk.dims[0])

    @property
    def unrolled(self) -> int:
        """Contributions before the loop, which takes `CONTRIBUTIONS_PER_STEP` at a time."""
        return (self.count - 1) % CONTRIBUTIONS_PER_STEP + 1

    @property
    def programs(self) -> Programs:
        """What its machine code is counted with."""
        return Programs(
            count=self.grid,
            elements=math.prod(self.chunk.dims),
            trips=max(1, (self.count - self.unrolled) // CONTRIBUTIONS_PER_STEP),
            loads_shared=self.chunk.sharing(self.source, 1 + len(self.split)),
            stores_shared=self.chunk.sharing(self.chunk.fmt, len(self.chunk.dims) - 1),
        )


def add_all(refs: dict[str, Any], call: Sum, where: Any, interpret: bool) -> list[jax.Array]:
    """The sum of all contributions to the chunk, in index order."""
    step = CONTRIBUTIONS_PER_STEP
    first = call.unrolled

    def add(total: list[jax.Array], index: Any) -> list[jax.Array]:
        return [a + b for a, b in zip(total, _contribution(refs, call, where, index, interpret), strict=True)]

    total = _contribution(refs, call, where, 0, interpret)
    for index in range(1, first):
        total = add(total, index)
    if first == call.count:
        return total

    def steps(i: jax.Array, total: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        parts = list(total)
        for offset in range(step):
            parts = add(parts, first + i * step + offset)
        return tuple(parts)

    return list(lax.fori_loop(0, (call.count - first) // step, steps, tuple(total)))


def _contribution(refs: dict[str, Any], call: Sum, where: Any, index: Any, interpret: bool) -> list[jax.Array]:
    """One contribution to the chunk: level times scale, in parts."""
    source, chunk = call.source, call.chunk
    target, rank = chunk.part_layout, len(chunk.dims)
    axes = tuple(range(1 + len(call.split), rank))
    rows = reduced(target, axes)
    scale = _compat.load(refs["source_scale"].at[index, where], rows)
    if source.tiled:
        tile_layout = reduced(target, tuple(range(1, rank)))
        tile = _compat.load(refs["source_tile_scale"].at[index, where], tile_layout)
        scale = spread(tile.astype(jnp.float32), chunk.dims[: 1 + len(call.split)], rows) * scale_rounding.e4m3_value(
            scale.astype(jnp.int32)
        )
    else:
        scale = scale.astype(jnp.float32)
    payload = refs["source_qvalue"].at[index, where]
    pieces = cut(payload, chunk.num_parts) if source.bits == 8 else [payload]
    codes = [_compat.load(piece, target).astype(jnp.int32) for piece in pieces]
    if source.bits == 4:
        codes = codes * 2
    parts = []
    for i, code in enumerate(codes):
        high = source.bits == 4 and i == 1
        constant = refs["magic"][int(high)] if "magic" in refs else None
        level, factor = numerics.scaled_level(code, source, high, constant, subnormals=not interpret)
        scaled = scale if factor == 1.0 else scale * np.float32(factor)
        parts.append(level * spread(scaled, chunk.part_dims, target))
    return parts
