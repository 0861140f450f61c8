"""The Hadamard rotation inside a kernel: the reference's butterflies, over registers and, between lanes, by exchange.

A thread holds vectors of consecutive elements, and its registers are the higher bits of an element's index (see
`mosaic_layout`). A stage pairs elements whose indices differ in one bit: inside a vector, between registers or between
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
from pallas_kernels.mosaic_layout import LANES, WARPS, layout, split_threads


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
    before_addition: bool,
    interpret: bool,
) -> list[jax.Array]:
    """Rotates the parts of a chunk and multiplies them by ``factor``; equals `reference.rotate` bit for bit.

    Args:
        parts: float32 ``dims`` in the layout of ``dims`` and ``vec``.
        dims: of one part.
        vec: consecutive elements of a lane.
        plan: from `stages`.
        factor: multiplies the result.
        before_addition: whether the result may be added to something, see `numerics.scaled`.
        interpret: run the network on arrays instead of registers.
    """
    if not plan:
        return [numerics.scaled(part, factor, before_addition) for part in parts]
    parts = [part * np.float32(numerics.BEFORE_ROTATION) for part in parts]
    run = _on_arrays if interpret else _on_registers
    factor *= numerics.after_rotation(2 ** len(plan))
    return [numerics.scaled(part, factor, before_addition) for part in run(parts, dims, vec, plan)]


def _network(
    values: Any,
    plan: Sequence[Stage],
    xp: Any,
    add: Callable[..., Any],
    subtract: Callable[..., Any],
    exchange: Callable[..., Any],
) -> Any:
    """All stages on ``values [parts, *registers, vec, ...]`` (of NumPy or JAX, as ``xp`` says).

    ``exchange(values, distance)`` returns mine + partner's on the lower lane of a pair, and partner's - mine on the
    upper one.
    """
    for stage in plan:
        if stage.axis is None:
            values = exchange(values, stage.distance)
            continue
        shape, axis, distance = values.shape, stage.axis, stage.distance
        pairs = values.reshape(*shape[:axis], shape[axis] // (2 * distance), 2, distance, *shape[axis + 1 :])
        before = (slice(None),) * (axis + 1)
        low, high = pairs[(*before, 0)], pairs[(*before, 1)]
        values = xp.stack([add(low, high), subtract(low, high)], axis + 1).reshape(shape)
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
    values = _network(values, plan, jnp, jnp.add, jnp.subtract, exchange)
    return [from_threads(value, dims, vec) for value in values]


def _on_registers(parts: list[jax.Array], dims: tuple[int, ...], vec: int, plan: Sequence[Stage]) -> list[jax.Array]:
    target: Any = layout(dims, vec)
    result: Any = plgpu.ShapeDtypeStruct(dims, jnp.float32, layout=target)
    inline = plgpu.inline_mgpu(arg_types=(target,) * len(parts), return_type=(result,) * len(parts))
    return list(inline(lambda _, *arrays: _rotated_registers(arrays, plan))(*parts))


def _rotated_registers(arrays: Sequence[Any], plan: Sequence[Stage]) -> tuple[Any, ...]:
    """The network in the compiler's own operations, on the registers of one thread."""
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    one = ir.VectorType.get((1,), f32)
    signs: dict[int, Any] = {}

    def sign(distance: int) -> Any:
        if distance not in signs:
            bit = arith.andi(utils.thread_idx(), utils.c(distance, i32))
            upper = arith.cmpi(arith.CmpIPredicate.ne, bit, utils.c(0, i32))
            signs[distance] = arith.select(upper, utils.c(-1.0, f32), utils.c(1.0, f32))
        return signs[distance]

    def exchanged(value: Any, distance: int) -> Any:
        scalar = utils.bitcast(utils.bitcast(value, i32), f32)
        partner = utils.bitcast(utils.shfl_bfly(utils.bitcast(value, i32), distance), f32)
        # The product is exact, so a fused multiply-add changes nothing.
        total = arith.addf(arith.mulf(scalar, sign(distance)), partner)
        return utils.bitcast(utils.bitcast(total, i32), one)

    values = np.empty((len(arrays), *arrays[0].registers.shape, arrays[0].layout.vector_length), dtype=object)
    for where in np.ndindex(values.shape[:-1]):
        register = arrays[where[0]].registers[where[1:]]
        for i in range(values.shape[-1]):
            values[(*where, i)] = utils.vector_slice(register, slice(i, i + 1))
    # Registers of a layout are indexed by the tiles along each dim, then by dims of size one.
    rank = len(arrays[0].shape)
    cut = (len(arrays), *values.shape[1 : 1 + rank], values.shape[-1])
    rotated = _network(
        values.reshape(cut), plan, np, np.frompyfunc(arith.addf, 2, 1), np.frompyfunc(arith.subf, 2, 1),
        np.frompyfunc(exchanged, 2, 1),
    ).reshape(values.shape)  # fmt: skip
    results = []
    for array, scalars in zip(arrays, rotated, strict=True):
        registers = np.empty_like(array.registers)
        for where in np.ndindex(registers.shape):
            registers[where] = utils.vector_concat(list(scalars[where]))
        results.append(mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None))
    return tuple(results)
