"""Register layouts of the Mosaic kernels: who holds which element.

A program (four warps) works on a chunk ``[outer, *middle, cols]`` whose reductions run over ``cols`` (one block) and
sometimes ``middle`` (one tile). Lanes fill ``cols`` first, with ``vec`` consecutive elements (16 bytes) each, then
``middle``, then ``outer``; warps divide ``outer`` first, so that reductions leave a warp only where one row is all
there is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array as mgpu

WARPS, LANES = 4, 32
SEGMENT = 32
"""Consecutive elements that neighbouring lanes hold at least: whole sectors of 32 bytes, at a byte an element."""


def split_threads(dims: Sequence[int], vec: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``(warps, lanes)`` along each dimension of ``[outer, *middle, cols]``; the products are 4 and 32."""
    rest, lanes, left = [*dims[:-1], dims[-1] // vec], [1] * len(dims), LANES
    share = math.prod(dims) // (WARPS * LANES)
    wanted = max(dims[-1] // share, SEGMENT // vec)
    cols = len(dims) - 1
    for d, most in [(cols, wanted), *((d, left) for d in reversed(range(cols))), (cols, left)]:
        taken = max(1, min(left, rest[d], most))
        lanes[d] *= taken
        left //= taken
        rest[d] //= taken
    warps, wanted = [1] * len(dims), WARPS
    for d in range(len(dims)):
        warps[d] = min(wanted, rest[d])
        wanted //= warps[d]
    if left * wanted != 1:
        raise ValueError(f"a chunk of {tuple(dims)} in vectors of {vec} leaves threads idle")
    return tuple(warps), tuple(lanes)


@functools.cache
def layout(dims: tuple[int, ...], vec: int) -> Any:
    """The layout of a chunk whose sizes are powers of two and hold at least ``128 * vec`` elements."""
    rank, (warps, lanes) = len(dims), split_threads(dims, vec)
    warp_tile = (*lanes[:-1], lanes[-1] * vec)
    tiling = mgpu.Tiling((tuple(w * t for w, t in zip(warps, warp_tile, strict=True)), warp_tile, (vec,)))
    warp_dims, lane_dims = tuple(range(-2 * rank - 1, -rank - 1)), tuple(range(-rank - 1, -1))
    tiled = mgpu.TiledLayout(tiling, warp_dims, lane_dims, -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiled.tiling.tiles),
        warp_dims=tiled.warp_dims,
        lane_dims=tiled.lane_dims,
        vector_dim=tiled.vector_dim,
    )


def reduced(full: Any, axes: Sequence[int]) -> Any:
    """The layout after reducing ``axes``."""
    return full.reduce(tuple(axes)) if axes else full


def spread(value: jax.Array, dims: tuple[int, ...], target: Any) -> jax.Array:
    """Broadcasts ``value`` along new trailing dimensions to ``dims``, in the layout ``target``."""
    wide = lax.broadcast_in_dim(value, dims, tuple(range(value.ndim)))
    return plgpu.layout_cast(wide, target)


def flat_index(dims: tuple[int, ...], strides: Sequence[int], start: jax.Array, target: Any) -> jax.Array:
    """uint32 index ``start + sum(i_d * strides[d])`` of every element, in the layout ``target``."""
    total = start.astype(jnp.uint32)
    for dim, stride in enumerate(strides):
        iota = plgpu.broadcasted_iota(jnp.uint32, dims, dim, layout=target)
        total = total + (iota if stride == 1 else iota * np.uint32(stride))
    return total


def chunk_rows(rows: int, inner: Sequence[int], vec: int, elements: int, least: int = 1) -> int | None:
    """Outer rows of one program, a power of two.

    Args:
        rows: outer rows there are.
        inner: the chunk's other dimensions, powers of two.
        vec: consecutive elements of a lane.
        elements: wanted elements of one program.
        least: rows of one program at least.

    Returns:
        About ``elements`` elements' worth of rows, at most ``rows``; None if ``rows`` cannot keep 128 threads busy.
    """
    row = math.prod(inner)
    least = max(least, WARPS * LANES * vec // row)
    if rows < least:
        return None
    return min(max(least, elements // row), 1 << (rows.bit_length() - 1))
