"""The public ops: quantise an array into blocks, and from received blocks back to values.

An op checks its arguments, describes the call in static terms, and hands it to the resolver with the reference and the
kernel. Rounding, scales and layouts are defined in `reference` and `array`; nothing here computes a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import backend, mosaic, numerics, reference, slices
from pallas_kernels.array import QuantFormat, QuantizedArray, Rounding, check_float, check_output_dtype
from pallas_kernels.backend import Plan
from pallas_kernels.variants import Variant

INT8, INT4 = QuantFormat(8, 128), QuantFormat(4, 128)


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
    fmt: QuantFormat = INT8,
    *,
    rounding: Rounding = "nearest",
    seed: jax.Array | int | None = None,
    with_residual: bool = False,
    implementation: backend.Implementation | None = None,
    interpret: bool = False,
) -> Any:
    """Quantises an array in blocks of its row-major order.

    Args:
        x: local array of any shape, float32, bfloat16 or float16.
        fmt: the format; the tail is padded with zeros to whole blocks.
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
    >>> q = quantize(jnp.array([0.0, -1.0, 0.25]), QuantFormat(8, 16))
    >>> q.qvalue.shape, dequantize(q).shape
    ((1, 16), (3,))
    """
    return _quantize(jnp.asarray(x), None, (), fmt, rounding, seed, with_residual, implementation, interpret)


def quantize_slices(
    x: jax.Array,
    fmt: QuantFormat = INT8,
    *,
    dim: int,
    num_slices: int | Sequence[int],
    rounding: Rounding = "nearest",
    seed: jax.Array | int | None = None,
    with_residual: bool = False,
    implementation: backend.Implementation | None = None,
    interpret: bool = False,
) -> Any:
    """Quantises the slices of a leaf, written in destination order: ready for an all-to-all over the lead dimension.

    Args:
        x: local leaf, float32, bfloat16 or float16; its dimension ``dim`` is cut.
        fmt: the format; blocks never cross a slice.
        dim: the dimension to cut.
        num_slices: destinations D, or a tuple of them (local, node): lead dimensions of the result, outermost first.
            Slice ``d0 * D1 + d1`` is the contiguous range of that index.
        rounding: see `quantize`, as for all other arguments.

    Returns:
        A `QuantizedArray` with lead ``num_slices`` whose ``shape`` is that of one slice, or
        ``(QuantizedArray, residual)`` with a residual shaped like ``x``.

    Raises:
        ValueError: as `quantize`, or the slices do not divide the dimension.
        NotImplementedError: as `quantize`.

    >>> import jax.numpy as jnp
    >>> from pallas_kernels import dequantize
    >>> q = quantize_slices(jnp.ones((4, 64)), QuantFormat(8, 32), dim=1, num_slices=2)
    >>> q.lead, q.shape, dequantize(q, merge_dim=1).shape
    ((2,), (4, 32), (4, 64))
    """
    x = jnp.asarray(x)
    lead, _ = slices.slice_shape(x.shape, dim, num_slices)
    return _quantize(x, dim % x.ndim, lead, fmt, rounding, seed, with_residual, implementation, interpret)


def _quantize(
    x: jax.Array,
    dim: int | None,
    lead: tuple[int, ...],
    fmt: QuantFormat,
    rounding: Rounding,
    seed: jax.Array | int | None,
    with_residual: bool,
    implementation: str | None,
    interpret: bool,
) -> Any:
    hashed_seed = hashed_seed_of(rounding, seed)
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

    stochastic = hashed_seed is not None
    variant = Variant("quantize", fmt, x.dtype.name, stochastic, with_residual, slices=dim is not None)
    plan = mosaic.plan_quantize(x.shape, x.dtype, dim, lead, fmt, stochastic, with_residual)
    qvalue, scale, tile_scale, residual = backend.run(
        "quantize", variant, implementation, interpret, plan.problems, plain, plan.run, x, hashed_seed
    )
    q = QuantizedArray(qvalue, scale, tile_scale, fmt, tuple(shape), x.dtype.name)
    return (q, residual) if with_residual else q


def dequantize(
    q: QuantizedArray,
    *,
    dtype: Any = None,
    merge_dim: int | None = None,
    implementation: backend.Implementation | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Levels times scales, rotated back, without the padding.

    Args:
        q: a record with any lead dimensions.
        dtype: float32, bfloat16 or float16; default: the dtype that was quantised. Values that rounding pushed past
            the largest finite number of the dtype are that number.
        merge_dim: if given, merge all lead dimensions into this dimension of the slice (the inverse of
            `quantize_slices`; the leaf of a gather of shards).
        implementation: see `quantize`. Without a rotation XLA's program moves the ideal bytes already and there is no
            kernel.
        interpret: see `quantize`.

    Returns:
        ``[*lead, *shape]``, or the leaf if ``merge_dim`` is given. NaN throughout a block that held NaN or Inf.

    Raises:
        ValueError: the record is inconsistent (say, a scale of the wrong shape) or the dtype is not a float.
        NotImplementedError: as `quantize`.

    >>> import jax.numpy as jnp
    >>> from pallas_kernels import quantize
    >>> dequantize(quantize(jnp.array([127.0, -3.0])), dtype="float32").tolist()
    [127.0, -3.0]
    """
    q.validate()
    dtype = check_output_dtype(q.dtype if dtype is None else dtype)

    def plain(qvalue: jax.Array, scale: jax.Array, tile_scale: jax.Array | None) -> jax.Array:
        blocks = reference.dequantize_blocks(qvalue, scale, tile_scale, q.format)
        values = slices.from_blocks(reference.rotate(blocks, q.format.rotate), q.shape)
        largest = np.float32(jnp.finfo(dtype).max)
        values = jnp.minimum(jnp.maximum(values, -largest), largest)
        return values.astype(dtype)

    if q.format.rotate is None:
        plan = Plan(("without a rotation XLA already moves the ideal bytes, there is no kernel; use 'xla'",))
    else:
        # A sum of one contribution.
        plan = mosaic.plan_sum((1, *q.lead), q.shape, q.format, dtype, 1.0, clamp=True)
    stored = (q.qvalue, q.scale, q.tile_scale)
    variant = Variant("dequantize", q.format, dtype.name, source=q.format, count=8)

    def kernel(*stored: jax.Array | None, interpret: bool) -> jax.Array:
        return plan.run(*jax.tree.map(lambda a: a[None], stored), interpret=interpret)

    values = backend.run("dequantize", variant, implementation, interpret, plan.problems, plain, kernel, *stored)
    return values if merge_dim is None else slices.from_slices(values, merge_dim, len(q.lead))


def _contributions(q: QuantizedArray, axis: int) -> tuple[QuantizedArray, int]:
    """The record with the summed lead dimension first, and its size."""
    q.validate()
    if not q.lead:
        raise ValueError("q has no lead dimension to sum over; stack the contributions first")
    if not -len(q.lead) <= axis < len(q.lead):
        raise ValueError(f"axis must be in {-len(q.lead)}..{len(q.lead) - 1} for lead dimensions {q.lead}, got {axis}")
    axis %= len(q.lead)
    if q.lead[axis] < 1:
        raise ValueError(f"there is nothing to sum: lead dimension {axis} of {q.lead} is empty")
    return (q if axis == 0 else jax.tree.map(lambda a: jnp.moveaxis(a, axis, 0), q)), q.lead[axis]


def dequantize_sum(
    q: QuantizedArray,
    *,
    axis: int = 0,
    dtype: Any = "float32",
    mean: bool = False,
    implementation: backend.Implementation | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Sum over one lead dimension (the received contributions), accumulated in float32 in index order.

    Args:
        q: a record with at least one lead dimension; typically 2-64 contributions.
        axis: the lead dimension to sum.
        dtype: of the result.
        mean: divide by the number of contributions (multiply by its float32 reciprocal).
        implementation: see `quantize`.
        interpret: see `quantize`.

    Returns:
        ``[*other_lead, *shape]``, rotated back once, after the sum. NaN wherever any contribution is.

    Raises:
        ValueError: the record is inconsistent, has no such lead dimension, or the dtype is not a float.
        NotImplementedError: as `quantize`.

    >>> import jax.numpy as jnp
    >>> from pallas_kernels import quantize_slices
    >>> q = quantize_slices(jnp.full((4, 16), 127.0), QuantFormat(8, 16), dim=0, num_slices=4)
    >>> dequantize_sum(q).shape, float(dequantize_sum(q)[0, 0])
    ((1, 16), 508.0)
    """
    q, count = _contributions(q, axis)
    dtype = check_output_dtype(dtype)
    factor = 1.0 / count if mean else 1.0

    def plain(qvalue: jax.Array, scale: jax.Array, tile_scale: jax.Array | None) -> jax.Array:
        total = reference.sum_blocks(qvalue, scale, tile_scale, q.format)
        return slices.from_blocks(reference.rotate(total, q.format.rotate, factor), q.shape).astype(dtype)

    plan = mosaic.plan_sum(q.lead, q.shape, q.format, dtype, factor)
    variant = Variant("sum", q.format, dtype.name, source=q.format, count=count)
    return backend.run(
        "dequantize_sum",
        variant,
        implementation,
        interpret,
        plan.problems,
        plain,
        plan.run,
        q.qvalue,
        q.scale,
        q.tile_scale,
    )


def dequantize_sum_quantize(
    q: QuantizedArray,
    fmt: QuantFormat = INT4,
    *,
    axis: int = 0,
    rounding: Rounding = "nearest",
    seed: jax.Array | int | None = None,
    mean: bool = False,
    addend: jax.Array | None = None,
    with_residual: bool = False,
    implementation: backend.Implementation | None = None,
    interpret: bool = False,
) -> Any:
    """The middle of the two-hop reduction: sum the contributions of hop 1, quantise the sum for hop 2.

    Equals ``quantize(dequantize_sum(q, axis=axis, mean=mean) + addend, fmt)`` slice by slice, without writing the sum
    to memory; when both formats rotate alike, the sum is not rotated back and forth either.

    Args:
        q: contributions, as in `dequantize_sum`.
        fmt: the format of the result.
        axis: the lead dimension to sum; the others stay and become the slices of hop 2.
        rounding: of the result, as is ``seed``; see `quantize`.
        mean: divide the sum by the number of contributions.
        addend: ``[*other_lead, *shape]`` float, added before quantising (the carried residual of error feedback).
        with_residual: also return what quantising lost, float32 ``[*other_lead, *shape]``.
        implementation: see `quantize`.
        interpret: see `quantize`.

    Returns:
        A `QuantizedArray` with the other lead dimensions and dtype float32, or ``(QuantizedArray, residual)``.

    Raises:
        ValueError: as `dequantize_sum` and `quantize`, or ``addend`` has the wrong shape or dtype.
        NotImplementedError: as `quantize`.

    >>> import jax.numpy as jnp
    >>> from pallas_kernels import quantize_slices
    >>> q = quantize_slices(jnp.ones((8, 32)), QuantFormat(8, 32), dim=0, num_slices=(2, 4))
    >>> dequantize_sum_quantize(q, QuantFormat(4, 32)).lead
    (4,)
    """
    hashed_seed = hashed_seed_of(rounding, seed)
    q, count = _contributions(q, axis)
    factor = 1.0 / count if mean else 1.0
    if addend is not None:
        check_float(addend, "addend")
        if addend.shape != (*q.lead[1:], *q.shape):
            raise ValueError(f"addend must have shape {(*q.lead[1:], *q.shape)}, got {addend.shape}")

    def plain(
        qvalue: jax.Array,
        scale: jax.Array,
        tile_scale: jax.Array | None,
        addend: jax.Array | None,
        hashed_seed: jax.Array | None,
    ) -> tuple[Any, ...]:
        total = reference.sum_blocks(qvalue, scale, tile_scale, q.format)
        return reference.requantize_blocks(total, q.shape, q.format, fmt, factor, addend, hashed_seed, with_residual)

    addend_dtype = None if addend is None else addend.dtype
    variant = Variant(
        "sum_quantize", fmt, "float32", hashed_seed is not None, with_residual, source=q.format, count=count,
        addend=addend is not None,
    )  # fmt: skip
    stochastic = hashed_seed is not None
    plan = mosaic.plan_sum_quantize(q.lead, q.shape, q.format, fmt, factor, stochastic, addend_dtype, with_residual)
    qvalue, scale, tile_scale, residual = backend.run(
        "dequantize_sum_quantize", variant, implementation, interpret, plan.problems, plain, plan.run,
        q.qvalue, q.scale, q.tile_scale, addend, hashed_seed,
    )  # fmt: skip
    result = QuantizedArray(qvalue, scale, tile_scale, fmt, q.shape, "float32")
    return (result, residual) if with_residual else result
