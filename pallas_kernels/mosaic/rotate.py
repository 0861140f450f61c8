"""The Hadamard rotation inside a kernel: the reference's butterflies, over registers and, between lanes, by exchange.

A thread holds vectors of consecutive elements, and its registers are the higher bits of an element's index (see
`layout`). A stage pairs elements whose indices differ in one bit: inside a vector, between registers or between
the two halves of a block it is an addition and a subtraction; between lanes each sends its value to the other. Stages
run in the reference's order, so the bits are the reference's. One network is written once: compiled it works on
registers, interpreted on arrays cut into the same 128 threads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels import numerics
from pallas_kernels.mosaic.layout import LANES, WARPS, layout, split_threads

MOST_FUSED = 32
"""Values of a thread up to which an exchange multiplies and adds at once; with more of them in flight, both of every
pair, the assembler runs out of registers."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One butterfly stage.

    Attributes:
        axis: of the values ``[parts, *registers, vec]`` of a thread, or None: the lanes of a warp.
        distance: between partners along it, a power of two.
    """

    axis: int | None
    distance: int


def stages(dims: Sequence[int], vec: int, num_parts: int, block: int, width: int) -> tuple[Stage, ...] | None:
    """The stages of a rotation, in order; None if one would cross warps.

    Args:
        dims: of one part, ``(outer, *middle, cols)``; the inner ones are powers of two.
        vec: consecutive elements of a lane.
        num_parts: parts a row of ``cols * num_parts`` elements is held in.
        block: elements of the rotated block: a row, or several rows along the innermost middle dims.
        width: of the rotation; the pairs are ``block / width``, twice that, ... ``block / 2`` apart.

    >>> stages((128, 32), 8, 1, 32, 32)[0]
    Stage(axis=3, distance=1)
    """
    rank, (warps, lanes) = len(dims), split_threads(dims, vec)
    # The bits of an element's index in its block, lowest first: (size, what to do with a distance inside it).
    places: list[tuple[int, int | str | None, int]] = []
    for dim in reversed(range(1, rank)):
        inner = math.prod(lanes[dim + 1 :])
        if dim == rank - 1:
            places.append((vec, rank + 1, 1))
        places += [(lanes[dim], None, inner), (warps[dim], "warps", 1)]
        here = vec * lanes[dim] * warps[dim] if dim == rank - 1 else lanes[dim] * warps[dim]
        places.append((dims[dim] // here, 1 + dim, 1))
        if dim == rank - 1:
            places.append((num_parts, 0, 1))
    found, stride = [], 1
    for size, axis, unit in places:
        local = 1
        while local < size:
            if block // width <= stride * local < block:
                if axis == "warps":
                    return None
                assert not isinstance(axis, str)
                found.append(Stage(axis, local * unit))
            local *= 2
        stride *= size
    assert 2 ** len(found) == width, (dims, vec, block, width)
    return tuple(found)


def rotate_parts(
    parts: list[jax.Array],
    dims: tuple[int, ...],
    vec: int,
    plan: Sequence[Stage],
    factor: float,
    interpret: bool,
    unit: float = 1.0,
    before_addition: bool = True,
) -> list[jax.Array]:
    """Rotates the parts of a chunk and multiplies them by ``factor``; equals `reference.rotate` bit for bit.

    Args:
        parts: float32 ``dims`` in the layout of ``dims`` and ``vec``.
        dims: of one part.
        vec: consecutive elements of a lane.
        plan: from `stages`.
        factor: multiplies the result.
        interpret: run the network on arrays instead of registers.
        unit: what the parts have been multiplied by already, a power of two; the result is not.
        before_addition: whether the result may be added to something, see `numerics.scaled`.
    """
    if not plan:
        return [numerics.scaled(part, factor / unit, before_addition) for part in parts]
    before = numerics.BEFORE_ROTATION / unit
    factor *= numerics.after_rotation(2 ** len(plan))
    if interpret:
        parts = _on_arrays([part * np.float32(before) for part in parts], dims, vec, plan)
        return [numerics.scaled(part, factor, before_addition) for part in parts]
    return _on_registers(parts, dims, vec, plan, before, factor)


def _network(
    values: Any,
    plan: Sequence[Stage],
    xp: Any,
    butterfly: Callable[..., Any],
    exchange: Callable[..., Any],
) -> Any:
    """All stages on ``values [parts, *registers, vec, ...]`` (of NumPy or JAX, as ``xp`` says).

    ``butterfly(low, high)`` returns their sum and difference. ``exchange(values, distance)`` returns mine + partner's
    on the lower lane of a pair, and partner's - mine on the upper one.
    """
    for stage in plan:
        if stage.axis is None:
            values = exchange(values, stage.distance)
            continue
        shape, axis, distance = values.shape, stage.axis, stage.distance
        pairs = values.reshape(*shape[:axis], shape[axis] // (2 * distance), 2, distance, *shape[axis + 1 :])
        before = (slice(None),) * (axis + 1)
        values = xp.stack(butterfly(pairs[(*before, 0)], pairs[(*before, 1)]), axis + 1).reshape(shape)
    return values


def to_threads(part: jax.Array, vec: int) -> jax.Array:
    """A part cut as its layout cuts it: ``[*registers, vec, threads]``."""
    dims, rank = part.shape, part.ndim
    warps, lanes = split_threads(dims, vec)
    inner = [*[1] * (rank - 1), vec]
    cut = [(d // (w * t * v), w, t, v) for d, w, t, v in zip(dims, warps, lanes, inner, strict=True)]
    order = [4 * d + k for k in (0, 3, 1, 2) for d in range(rank)]
    registers = [c[0] for c in cut]
    return part.reshape([n for c in cut for n in c]).transpose(order).reshape(*registers, vec, WARPS * LANES)


def from_threads(values: jax.Array, dims: tuple[int, ...], vec: int) -> jax.Array:
    """The inverse of `to_threads`."""
    rank = len(dims)
    warps, lanes = split_threads(dims, vec)
    inner = [*[1] * (rank - 1), vec]
    cut = [(d // (w * t * v), w, t, v) for d, w, t, v in zip(dims, warps, lanes, inner, strict=True)]
    order = [4 * d + k for k in (0, 3, 1, 2) for d in range(rank)]
    moved = values.reshape([[n for c in cut for n in c][i] for i in order])
    return moved.transpose(np.argsort(order).tolist()).reshape(dims)


def _on_arrays(parts: list[jax.Array], dims: tuple[int, ...], vec: int, plan: Sequence[Stage]) -> list[jax.Array]:
    def exchange(values: jax.Array, distance: int) -> jax.Array:
        pairs = values.reshape(*values.shape[:-1], -1, 2, distance)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        return jnp.stack([low + high, high * np.float32(-1.0) + low], axis=-2).reshape(values.shape)

    values = jnp.stack([to_threads(part, vec) for part in parts])
    values = _network(values, plan, jnp, lambda low, high: (low + high, low - high), exchange)
    return [from_threads(value, dims, vec) for value in values]


def _on_registers(
    parts: list[jax.Array], dims: tuple[int, ...], vec: int, plan: Sequence[Stage], before: float, after: float
) -> list[jax.Array]:
    target: Any = layout(dims, vec)
    result: Any = plgpu.ShapeDtypeStruct(dims, jnp.dtype("float32"), layout=target)
    inline = plgpu.inline_mgpu(arg_types=(target,) * len(parts), return_type=(result,) * len(parts))
    return list(inline(lambda _, *arrays: _rotated_registers(arrays, plan, before, after))(*parts))


def _rotated_registers(arrays: Sequence[Any], plan: Sequence[Stage], before: float, after: float) -> tuple[Any, ...]:
    """``before`` times the values, through the network, times ``after``, on the registers of one thread.

    In the compiler's own operations: it fuses no product of these with a sum unless it is told to. Where it is told to
    (`fma`) the product is exact, by a sign or a power of two, so that nothing changes but the count.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith
    from jaxlib.mlir.dialects import math as mlir_math

    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    one = ir.VectorType.get((1,), f32)
    signs: dict[int, Any] = {}

    def scalar(value: Any) -> Any:
        return utils.bitcast(utils.bitcast(value, i32), f32)

    def vector(value: Any) -> Any:
        return utils.bitcast(utils.bitcast(value, i32), one)

    def sign(distance: int) -> Any:
        if distance not in signs:
            bit = arith.andi(utils.thread_idx(), utils.c(distance, i32))
            upper = arith.cmpi(arith.CmpIPredicate.ne, bit, utils.c(0, i32))
            signs[distance] = arith.select(upper, utils.c(-1.0, f32), utils.c(1.0, f32))
        return signs[distance]

    def exchange(value: Any, distance: int) -> Any:
        partner = utils.bitcast(utils.shfl_bfly(utils.bitcast(value, i32), distance), f32)
        if values.size > MOST_FUSED:
            return arith.addf(arith.mulf(value, sign(distance)), partner)
        return mlir_math.fma(value, sign(distance), partner)

    def times(factor: float) -> Callable[[Any], Any]:
        return lambda value: arith.mulf(value, utils.c(factor, f32))

    def butterfly(low: Any, high: Any) -> tuple[Any, Any]:
        return arith.addf(low, high), arith.subf(low, high)

    def scaled_butterfly(low: Any, high: Any) -> tuple[Any, Any]:
        scale, high = utils.c(before, f32), times(before)(high)
        return mlir_math.fma(low, scale, high), mlir_math.fma(low, scale, arith.negf(high))

    values = np.empty((len(arrays), *arrays[0].registers.shape, arrays[0].layout.vector_length), dtype=object)
    for where in np.ndindex(values.shape[:-1]):
        register = arrays[where[0]].registers[where[1:]]
        for i in range(values.shape[-1]):
            values[(*where, i)] = scalar(utils.vector_slice(register, slice(i, i + 1)))
    # Registers of a layout are indexed by the tiles along each dim, then by dims of size one.
    rank = len(arrays[0].shape)
    rotated = values.reshape(len(arrays), *values.shape[1 : 1 + rank], values.shape[-1])
    exchanges = np.frompyfunc(exchange, 2, 1)
    if before != 1.0 and plan[0].axis is not None:
        rotated = _network(rotated, plan[:1], np, np.frompyfunc(scaled_butterfly, 2, 2), exchanges)
        plan = plan[1:]
    elif before != 1.0:
        rotated = np.frompyfunc(times(before), 1, 1)(rotated)
    rotated = _network(rotated, plan, np, np.frompyfunc(butterfly, 2, 2), exchanges)
    rotated = np.frompyfunc(lambda value: vector(times(after)(value)), 1, 1)(rotated).reshape(values.shape)
    results = []
    for array, scalars in zip(arrays, rotated, strict=True):
        registers = np.empty_like(array.registers)
        for where in np.ndindex(registers.shape):
            registers[where] = utils.vector_concat(list(scalars[where]))
        results.append(mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None))
    return tuple(results)
