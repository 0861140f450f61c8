"""The quantise kernel: one pass from a leaf in global memory to payload and scales, in destination order.

The leaf is seen as ``[before, slices, run]``: a run is the contiguous part of one slice. A program reads a chunk of
one run in 16-byte loads, reduces inside its warps, and writes levels, scales and perhaps the residual; the slice
reordering is only the address it writes to. Knows the formats and the geometry, not the collectives around it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import _compat, numerics
from pallas_kernels.array import TILE, QuantFormat
from pallas_kernels.backend import Plan, Programs
from pallas_kernels.mosaic.blocks import (
    NO_2_BITS,
    STORED,
    Chunk,
    blocks_of_tile,
    cut,
    make_chunk,
    num_parts,
    run_quantizing,
    store_quantized,
    stored_arrays,
)
from pallas_kernels.mosaic.registers import widened

ELEMENTS = 4096
"""Elements of one program at most: 32 a thread."""


def _elements(fmt: QuantFormat, stochastic: bool, with_residual: bool) -> int:
    """Elements of one program.

    Half where the arithmetic would take more than 64 registers a thread; but whole where what every thread does once,
    shared by half as many elements, would take longer than the memory: rotations, and e2m1 with all else.
    """
    if with_residual:
        half = fmt.rotate is None or fmt.block_size <= 64
    elif fmt.rotate is not None:
        half = False
    elif fmt.levels == "e2m1":
        half = not (stochastic and fmt.tiled)
    else:
        half = stochastic and fmt.tiled
    return ELEMENTS // 2 if half else ELEMENTS


@dataclasses.dataclass(frozen=True)
class _Geometry:
    """The leaf as ``[before, slices, rows, *inner]`` with ``inner`` one block, or the blocks of one tile."""

    before: int
    slices: int
    rows: int
    inner: tuple[int, ...]
    chunk: Chunk

    @property
    def rows_per_program(self) -> int:
        return self.chunk.dims[0]

    @property
    def programs_per_run(self) -> int:
        return -(-self.rows // self.rows_per_program)

    @property
    def programs(self) -> int:
        return self.before * self.slices * self.programs_per_run


def plan(
    shape: tuple[int, ...],
    dtype: Any,
    dim: int | None,
    lead: tuple[int, ...],
    fmt: QuantFormat,
    stochastic: bool,
    with_residual: bool,
) -> Plan:
    """The kernel for one call of `quantize` or `quantize_slices`, or the reasons why there is none."""
    if fmt.bits == 2:
        return Plan((NO_2_BITS,))
    problems = []
    num_slices = math.prod(lead)
    before = 1 if dim is None else math.prod(shape[:dim])
    run = math.prod(shape) // max(1, before * num_slices)
    unit = TILE if fmt.tiled else fmt.block_size
    what = "tile" if fmt.tiled else "block"
    if run % unit or not run:
        problems.append(
            f"a contiguous run of one slice has {run} elements, no positive multiple of the {what} of {unit}"
        )
    itemsize = np.dtype(dtype).itemsize
    inner = (*blocks_of_tile(fmt.block_size), fmt.block_size) if fmt.tiled else (fmt.block_size,)
    parts = num_parts(fmt, stochastic)
    vec = min(16 // itemsize, fmt.block_size // parts)
    elements = _elements(fmt, stochastic, with_residual)
    chunk = None if problems else make_chunk(fmt, run // unit, inner, vec, parts, elements, fmt)
    if chunk is None:
        if not problems:
            problems.append(f"a contiguous run of {run} elements is shorter than one program's share")
        return Plan(tuple(problems))
    geometry = _Geometry(before, num_slices, run // unit, inner, chunk)
    programs = Programs(
        count=geometry.programs, elements=math.prod(chunk.dims), stores_shared=chunk.sharing(fmt, len(chunk.dims) - 1)
    )
    return Plan((), functools.partial(_run, geometry=geometry, lead=lead, with_residual=with_residual), programs)


def _run(
    x: jax.Array,
    hashed_seed: jax.Array | None,
    *,
    geometry: _Geometry,
    lead: tuple[int, ...],
    with_residual: bool,
    interpret: bool,
) -> tuple[Any, ...]:
    g, fmt = geometry, geometry.chunk.fmt
    # All rows in one dim: one index, so one address, for what is read and one for what is written.
    all_rows = g.before * g.slices * g.rows
    out = run_quantizing(
        functools.partial(_body, g=g, interpret=interpret), {"x": x.reshape(all_rows, *g.inner)}, hashed_seed, fmt,
        (all_rows, *g.inner), x.dtype if with_residual else None, g.programs, interpret,
    )  # fmt: skip
    residual = out["residual"].reshape(x.shape) if with_residual else None
    return (*stored_arrays(out, fmt, lead, g.before * g.rows, g.inner), residual)


def _body(refs: dict[str, Any], g: _Geometry, interpret: bool) -> None:
    chunk = g.chunk
    program = lax.axis_index("i")
    piece, run = lax.rem(program, np.int32(g.programs_per_run)), lax.div(program, np.int32(g.programs_per_run))
    row, dest = lax.rem(run, np.int32(g.before)), lax.div(run, np.int32(g.before))
    # The last program of a run overlaps its neighbour and writes the same bytes again: no masks.
    start = jnp.minimum(piece * g.rows_per_program, g.rows - g.rows_per_program)
    source = pl.ds((row * np.int32(g.slices) + dest) * np.int32(g.rows) + start, g.rows_per_program)
    target = pl.ds(run * np.int32(g.rows) + start, g.rows_per_program)
    parts = [
        widened(_compat.load(ref, chunk.part_layout), chunk.part_layout, chunk.vec, interpret)
        for ref in cut(refs["x"].at[source], chunk.num_parts)
    ]
    out = {name: refs[name].at[target] for name in STORED if name in refs}
    residual = refs["residual"].at[source] if "residual" in refs else None
    first = (run * g.rows + start) * np.int32(math.prod(g.inner))
    # The residual is rotated back, which starts by taking this factor out: here it costs nothing.
    unit = numerics.BEFORE_ROTATION if residual is not None and chunk.fmt.rotate else 1.0
    parts = chunk.rotated(parts, interpret, factor=unit)
    seed = refs["seed"][0] if "seed" in refs else None
    store_quantized(parts, chunk, first, seed, out, residual, interpret, unit)
