"""The sum kernels: dequantise every contribution, add in float32, and write the sum or quantise it again.

A program owns a chunk of elements, adds up its contributions (`contributions`), rotates the sum once where a
format rotates, and writes or quantises it.
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
from pallas_kernels.backend import Plan
from pallas_kernels.mosaic.blocks import (
    NO_2_BITS,
    STORED,
    blocks_of_tile,
    cut,
    make_chunk,
    num_parts,
    run_kernel,
    run_quantizing,
    store_quantized,
    stored_arrays,
)
from pallas_kernels.mosaic.contributions import Sum, add_all

ELEMENTS = 2048
"""Elements of one program: 16 accumulators a thread, 64 to 80 registers."""

ELEMENTS_TO_4_BITS = 4096
"""The same where 4 bits are written: one scale then serves 16 elements of a lane, and the issue slots are what is
scarce (8 contributions of int4 on an H100: 0.29 clocks per element to issue, 0.32 to move)."""


def plan_sum(
    lead: tuple[int, ...], shape: tuple[int, ...], source: QuantFormat, dtype: Any, factor: float, clamp: bool = False
) -> Plan:
    """The kernel for one call of `dequantize_sum`, or the reasons why there is none.

    A sum of one contribution is `dequantize`, which clamps to the finite numbers of ``dtype``.
    """
    if source.bits == 2:
        return Plan((NO_2_BITS,))
    problems = []
    size = math.prod(shape)
    if source.padded_size(size) != size:
        problems.append(
            f"a slice of {size} elements is padded to {source.padded_size(size)}; the kernel writes whole blocks"
        )
    vec = 16 // np.dtype(dtype).itemsize
    described = _describe(lead, size, source, source, 8 // source.bits, vec, ELEMENTS, factor, problems)
    if described is None:
        return Plan(tuple(problems))
    call = dataclasses.replace(described, clamp=clamp)
    return Plan((), functools.partial(_run_sum, call=call, out=(lead[1:], shape, dtype)), call.programs)


def plan_sum_quantize(
    lead: tuple[int, ...],
    shape: tuple[int, ...],
    source: QuantFormat,
    fmt: QuantFormat,
    factor: float,
    stochastic: bool,
    addend_dtype: Any,
    with_residual: bool,
) -> Plan:
    """The kernel for one call of `dequantize_sum_quantize`, or the reasons why there is none."""
    if 2 in (source.bits, fmt.bits):
        return Plan((NO_2_BITS,))
    problems = []
    size = math.prod(shape)
    if source.padded_size(size) != fmt.padded_size(size):
        problems.append(f"a slice of {size} elements is padded differently in the two formats")
    if (addend_dtype is not None or with_residual) and source.padded_size(size) != size:
        problems.append(
            f"a slice of {size} elements is padded to {source.padded_size(size)}; addend and residual are not"
        )
    if source.rotate is not None and not source.rotates_like(fmt) and source.padded_size(size) != size:
        problems.append(f"a slice of {size} elements is padded, and rotating back leaves values in the padding")
    parts = 2 if source.bits == 4 else num_parts(fmt, stochastic)
    lean = fmt.bits == 4 and addend_dtype is None and not with_residual
    vec, elements = (16, ELEMENTS_TO_4_BITS) if lean else (8, ELEMENTS)
    described = _describe(lead, size, source, fmt, parts, min(vec, fmt.block_size // parts), elements, factor, problems)
    if described is None:
        return Plan(tuple(problems))
    run = functools.partial(_run_sum_quantize, call=described, lead=lead[1:], shape=shape, with_residual=with_residual)
    return Plan((), run, described.programs)


def _describe(
    lead: tuple[int, ...],
    size: int,
    source: QuantFormat,
    fmt: QuantFormat,
    parts: int,
    vec: int,
    elements: int,
    factor: float,
    problems: list[str],
) -> Sum | None:
    """The call, or None after adding to ``problems``."""
    ratio = source.block_size // fmt.block_size
    if ratio == 0 or (source.bits == 4 and ratio > 1):
        problems.append(
            f"blocks of {source.block_size} ({source.bits} bits) do not split into blocks of {fmt.block_size} "
            "within a lane's registers"
        )
    tiled = source.tiled or fmt.tiled
    if tiled and source.block_size > TILE:
        problems.append(f"blocks of {source.block_size} are larger than the tile of {TILE} that shares a scale")
    unit = TILE if tiled else source.block_size
    rows = math.prod(lead[1:]) * source.padded_size(size) // unit
    if not problems and source.padded_size(size) % unit:
        problems.append(f"a slice of {source.padded_size(size)} elements is no multiple of the tile of {TILE}")
    if problems:
        return None
    split = blocks_of_tile(source.block_size) if tiled else ()
    inner = (*split, *((ratio,) if ratio > 1 else ()), fmt.block_size)
    chunk = make_chunk(fmt, rows, inner, vec, parts, elements, source, fmt)
    if chunk is None:
        problems.append(f"{rows * unit} elements are fewer than one program's share")
        return None
    return Sum(lead[0], rows, split, source, chunk, factor)


def _inputs(call: Sum, qvalue: jax.Array, scale: jax.Array, tile_scale: jax.Array | None) -> dict[str, jax.Array]:
    source, rows = call.source, (call.count, call.rows)
    if source.tiled:
        scale = lax.bitcast_convert_type(scale, jnp.uint8)
    middle = call.inner[:-1]
    columns = call.inner[-1] * source.bits // 8
    inputs = {
        "source_qvalue": qvalue.reshape(*rows, *middle, columns),
        "source_scale": scale.reshape(*rows, *call.split),
    }
    if source.levels == "integer":
        inputs["magic"] = jnp.asarray(numerics.magic(source))
    if tile_scale is not None:
        inputs["source_tile_scale"] = tile_scale.reshape(rows)
    return inputs


def _run_sum(
    qvalue: jax.Array,
    scale: jax.Array,
    tile_scale: jax.Array | None,
    *,
    call: Sum,
    out: tuple[tuple[int, ...], tuple[int, ...], Any],
    interpret: bool,
) -> jax.Array:
    lead, shape, dtype = out
    outputs = {"total": jax.ShapeDtypeStruct((call.rows, *call.inner), dtype)}
    inputs = _inputs(call, qvalue, scale, tile_scale)
    body = functools.partial(_body, call=call, interpret=interpret)
    return run_kernel(body, inputs, outputs, call.grid, interpret)["total"].reshape(*lead, *shape)


def _run_sum_quantize(
    qvalue: jax.Array,
    scale: jax.Array,
    tile_scale: jax.Array | None,
    addend: jax.Array | None,
    hashed_seed: jax.Array | None,
    *,
    call: Sum,
    lead: tuple[int, ...],
    shape: tuple[int, ...],
    with_residual: bool,
    interpret: bool,
) -> tuple[Any, ...]:
    fmt, inputs = call.chunk.fmt, _inputs(call, qvalue, scale, tile_scale)
    if addend is not None:
        inputs["addend"] = addend.reshape(call.rows, *call.inner)
    out = run_quantizing(
        functools.partial(_body, call=call, interpret=interpret), inputs, hashed_seed, fmt, (call.rows, *call.inner),
        jnp.float32 if with_residual else None, call.grid, interpret,
    )  # fmt: skip
    residual = out["residual"].reshape(*lead, *shape) if with_residual else None
    return (*stored_arrays(out, fmt, lead, call.rows // max(1, math.prod(lead)), call.inner), residual)


def _body(refs: dict[str, Any], call: Sum, interpret: bool) -> None:
    chunk, taken = call.chunk, call.chunk.dims[0]
    # The last program overlaps its neighbour and writes the same bytes again: no masks.
    start = jnp.minimum(lax.axis_index("i") * taken, call.rows - taken)
    where = pl.ds(start, taken)
    total = add_all(refs, call, where, interpret)
    alike = "total" not in refs and call.source.rotates_like(chunk.fmt)
    if alike:
        total = [numerics.scaled(part, call.factor) for part in total]
    else:
        total = chunk.rotated(total, interpret, call.source, call.factor, before_addition="total" not in refs)
    if "total" in refs:
        for part, ref in zip(total, cut(refs["total"].at[where], len(total)), strict=True):
            if call.clamp:
                largest = np.float32(jnp.finfo(ref.dtype).max)
                part = jnp.minimum(jnp.maximum(part, -largest), largest)
            _compat.store(ref, part.astype(ref.dtype))
        return
    if "addend" in refs:
        pieces = cut(refs["addend"].at[where], len(total))
        more = [_compat.load(ref, chunk.part_layout).astype(jnp.float32) for ref in pieces]
        more = chunk.rotated(more, interpret) if alike else more
        total = [a + b for a, b in zip(total, more, strict=True)]
    if not alike:
        total = chunk.rotated(total, interpret)
    out = {name: refs[name].at[where] for name in STORED if name in refs}
    residual = refs["residual"].at[where] if "residual" in refs else None
    seed = refs["seed"][0] if "seed" in refs else None
    first = start * np.int32(math.prod(call.inner))
    store_quantized(total, chunk, first, seed, out, residual, interpret)
