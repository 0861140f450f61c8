"""The public ops `quantize` and `quantize_slices`: from an array to a record, whole or in destination order.

An op checks its arguments, describes the call in static terms, and hands it to the resolver with the reference and the
kernel. Rounding, scales and layouts are defined in `reference` and `array`; nothing here computes a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import backend, mosaic_gpu, numerics, reference, slices
from pallas_kernels.array import BlockFormat, Levels, QuantizedArray, Rounding, check_float


def hashed_seed_of(rounding: str, seed: jax.Array | int | None) -> jax.Array | None:
    """The seed of the dither, or None to round half to even; ValueError where the two arguments contradict."""
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding must be 'nearest' or 'stochastic', got {rounding!r}")
    if (rounding == "stochastic") != (seed is not None):
        state = "needs a seed (an integer or a uint32 scalar)" if seed is None else "takes no seed"
        raise ValueError(f"rounding={rounding!r} {state}, got seed={seed!r}")
    if seed is None:
        return None
    value = jnp.asarray(np.uint32(seed & 0xFFFFFFFF) if isinstance(seed, int) else seed)
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"seed must be an integer scalar, got {value.dtype}{list(value.shape)}")
    return numerics.hash_seed(value)


def quantize(
    x: jax.Array,
    *,
    bits: int = 8,
    block_size: int = 128,
    scale_dtype: Any = "bfloat16",
    levels: Levels = "integer",
    rotate: int | None = None,
    rounding: Rounding = "nearest",
    seed: jax.Array | int | None = None,
    with_residual: bool = False,
    implementation: backend.Implementation | None = None,
    interpret: bool = False,
) -> Any:
    """Quantises an array in blocks of its row-major order.

    Args:
        x: local array of any shape, float32, bfloat16 or float16.
        bits: 8 or 4.
        block_size: elements per scale, a power of two in 16..2048; the tail is padded with zeros.
        scale_dtype: bfloat16, or float8_e4m3fn under one bfloat16 scale per tile of 1024 elements.
        levels: "integer", or "e2m1" (fp4) with 4 bits.
        rotate: None, 32 or 64: Hadamard rotation inside each block before quantising.
        rounding: "nearest" (half to even) or "stochastic" (counter hash of seed and index).
        seed: integer scalar, required by (and only allowed with) stochastic rounding. Fold the device's index in where
            devices must draw differently.
        with_residual: also return ``x - dequantize(q)`` in ``x``'s dtype and shape.
        implementation: None (chosen at lowering), "xla" or "mosaic_gpu".
        interpret: run the kernel in interpret mode; only with "mosaic_gpu".

    Returns:
        A `QuantizedArray` without lead dimensions, or ``(QuantizedArray, residual)``.

    Raises:
        ValueError: an argument is outside its choices, or ``x`` is not a float array.
        NotImplementedError: the implementation asked for cannot do this call here.

    >>> import jax.numpy as jnp
    >>> from pallas_kernels import dequantize
    >>> q = quantize(jnp.array([0.0, -1.0, 0.25]), block_size=16)
    >>> q.qvalue.shape, dequantize(q).shape
    ((1, 16), (3,))
    """
    x = jnp.asarray(x)
    fmt = BlockFormat(bits=bits, block_size=block_size, scale_dtype=scale_dtype, levels=levels, rotate=rotate)
    hashed = hashed_seed_of(rounding, seed)
    q, residual = _quantize(x, None, (), fmt, hashed, with_residual, implementation, interpret)
    return (q, residual) if with_residual else q


def quantize_slices(
    x: jax.Array,
    *,
    dim: int,
    num_slices: int | Sequence[int],
    bits: int = 8,
    block_size: int = 128,
    scale_dtype: Any = "bfloat16",
    levels: Levels = "integer",
    rotate: int | None = None,
    rounding: Rounding = "nearest",
    seed: jax.Array | int | None = None,
    with_residual: bool = False,
    implementation: backend.Implementation | None = None,
    interpret: bool = False,
) -> Any:
    """Quantises the slices of a leaf, written in destination order: ready for an all-to-all over the lead dimension.

    Args:
        x: local leaf, float32, bfloat16 or float16; its dimension ``dim`` is cut.
        dim: the dimension to cut.
        num_slices: destinations D, or a tuple of them (local, node): lead dimensions of the result, outermost first.
            Slice ``d0 * D1 + d1`` is the contiguous range of that index. Blocks never cross a slice.
        bits: see `quantize`, as for all other arguments.

    Returns:
        A `QuantizedArray` with lead ``num_slices`` whose ``shape`` is that of one slice, or
        ``(QuantizedArray, residual)`` with a residual shaped like ``x``.

    Raises:
        ValueError: as `quantize`, or the slices do not divide the dimension.
        NotImplementedError: as `quantize`.

    >>> import jax.numpy as jnp
    >>> from pallas_kernels import dequantize
    >>> q = quantize_slices(jnp.ones((4, 64)), dim=1, num_slices=2, block_size=32)
    >>> q.lead, q.shape, dequantize(q, merge_dim=1).shape
    ((2,), (4, 32), (4, 64))
    """
    x = jnp.asarray(x)
    lead, _ = slices.slice_shape(x.shape, dim, num_slices)
    fmt = BlockFormat(bits=bits, block_size=block_size, scale_dtype=scale_dtype, levels=levels, rotate=rotate)
    hashed = hashed_seed_of(rounding, seed)
    q, residual = _quantize(x, dim % x.ndim, lead, fmt, hashed, with_residual, implementation, interpret)
    return (q, residual) if with_residual else q


def _quantize(
    x: jax.Array,
    dim: int | None,
    lead: tuple[int, ...],
    fmt: BlockFormat,
    hashed_seed: jax.Array | None,
    with_residual: bool,
    implementation: str | None,
    interpret: bool,
) -> tuple[QuantizedArray, jax.Array | None]:
    check_float(x)
    shape = x.shape if dim is None else slices.slice_shape(x.shape, dim, lead)[1]

    def plain(x: jax.Array, hashed_seed: jax.Array | None) -> tuple[Any, ...]:
        cut = x if dim is None else slices.to_slices(x, dim, lead)
        blocks = slices.to_blocks(cut.astype(jnp.float32), fmt, len(lead))
        blocks = reference.rotate(blocks, fmt.rotate)
        *stored, residual = reference.quantize_blocks(blocks, fmt, hashed_seed, with_residual)
        if residual is not None:
            residual = slices.from_blocks(reference.rotate(residual, fmt.rotate), shape).astype(x.dtype)
            residual = residual if dim is None else slices.from_slices(residual, dim, len(lead))
        return (*stored, residual)

    plan = mosaic_gpu.plan_quantize(x.shape, x.dtype, dim, lead, fmt, hashed_seed is not None, with_residual)
    qvalue, scale, tile_scale, residual = backend.run(
        "quantize", implementation, interpret, plan.problems, plain, plan.run, x, hashed_seed
    )
    return QuantizedArray(qvalue, scale, tile_scale, fmt, tuple(shape), x.dtype.name), residual
