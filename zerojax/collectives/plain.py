"""How a placed leaf moves: gather a weight, reduce a gradient, over the data axes of `shard_map`.

`Collectives` is a record of pure functions over (local array, Placement), so that plain and quantised versions are
interchangeable values. The plain gather runs over "node" first and then over "local": with slices in local-major order
each hop concatenates contiguous chunks, and every byte crosses into a node once. The reduction is its mirror image.
Where the library's rings follow the topology, whatever the order of the ranks (NCCL), a gather is flat: one message
over both axes, whose hops overlap inside the collective; each byte still enters a node once. A ring in the order of
the ranks (gloo) would change node at every step and bring each byte in twice. Costs stand beside the code, in bytes
received per device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.layout.placement import Placement, is_two_bits, pad, unpad

Sizes = Mapping[str, int]
BytesByAxes = dict[tuple[str, ...], int]
Held = Any


class Collectives(NamedTuple):
    """Movement of one leaf, as values.

    Attributes:
        gather: (local shard, placement) -> the full logical leaf on this device, in the shard's dtype.
        secondary: (local shard, placement, stack) -> the node-local secondary partition, as a pytree whose arrays have
            the first `stack` dims of the shard as leading dims; or None where there is no secondary. Gathered over all
            data axes but the innermost (arXiv 2306.10209, section 3.2).
        gather_secondary: (secondary, placement) -> the full logical leaf, over the innermost axis only.
        reduce: (full logical leaf, placement) -> this device's shard of the sum over all devices; for a replicated leaf
            the sum itself.
        reduce_with_feedback: (full logical leaf, what earlier reductions lost, placement) -> (shard of the sum, what
            this one lost); the losses are those of this device's chunk in the hop between nodes, zero if unquantised.
        gather_bytes: (placement, axis sizes) -> bytes received per device by one gather, by the axes of each hop:
            ("node",) and ("local",), or ("node", "local") where one collective runs over both.
        reduce_bytes: the same for `reduce`.
        unit: (placement) -> elements of which a leaf's shard holds a multiple, so that it can travel in one message
            with others (`zerojax.collectives.packed`) and its blocks stay its own; 0: it travels by itself.
        gathers: whether a gather moves anything: not where parameters are replicated on every device.
        reduces: whether a reduction moves anything.
    """

    gather: Callable[[jax.Array, Placement], jax.Array]
    secondary: Callable[[jax.Array, Placement, int], Held] | None
    gather_secondary: Callable[[Held, Placement], jax.Array]
    reduce: Callable[[jax.Array, Placement], jax.Array]
    reduce_with_feedback: Callable[[jax.Array, jax.Array, Placement], tuple[jax.Array, jax.Array]]
    gather_bytes: Callable[[Placement, Sizes], BytesByAxes]
    reduce_bytes: Callable[[Placement, Sizes], BytesByAxes]
    unit: Callable[[Placement], int]
    gathers: bool = True
    reduces: bool = True


def plain_collectives(
    other_axes: tuple[str, ...] = (), grad_dtype: str | None = None, *, secondary: bool = False, flat: bool = False
) -> Collectives:
    """Unquantised collectives; the wire carries the dtype of the operand.

    A gather of two-byte floats sends two bytes on every backend: it travels as integers. A reduction has to add on the
    way: GPUs reduce bfloat16 in two bytes, XLA on CPU widens it to float32 and sends four.

    Args:
        other_axes: mesh axes left to the compiler. A collective on an array that the compiler has split over such an
            axis would gather it there first, so each one runs in a nested `shard_map` over these axes.
        grad_dtype: dtype on the wire of `reduce`; None, and a complex gradient, keep the gradient's own.
        secondary: whether weights keep a node-local secondary partition for the backward pass.
        flat: whether a gather is one collective over all data axes rather than one for each. Reductions keep their
            hops: a ring of all devices would round a two-byte sum at each of them.
    """

    def gather(shard: jax.Array, placement: Placement) -> jax.Array:
        return _gather_over(placement.axes, shard, placement)

    def make_secondary(shard: jax.Array, placement: Placement, stack: int) -> jax.Array:
        held = within_other_axes(lambda x: gather_over(x, placement, hops(placement.axes[:-1])), placement, other_axes)
        return held(shard)

    def gather_secondary(held: jax.Array, placement: Placement) -> jax.Array:
        return _gather_over(placement.axes[-1:], held, placement)

    def _gather_over(axes: tuple[str, ...], shard: jax.Array, placement: Placement) -> jax.Array:
        if not placement.is_sharded:
            return shard
        full = within_other_axes(lambda x: gather_over(x, placement, hops(axes)), placement, other_axes)(shard)
        return unpad(full, placement)

    def hops(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
        return [axes] if flat else [(axis,) for axis in axes]

    def bytes_of_gather(placement: Placement, sizes: Sizes) -> BytesByAxes:
        return grown_bytes(placement.shard_bytes, placement, sizes, hops(placement.axes))

    def wire_dtype(dtype: np.dtype) -> np.dtype:
        real = jnp.issubdtype(dtype, jnp.floating)  # a complex gradient would lose its imaginary part
        return jnp.dtype(grad_dtype) if grad_dtype is not None and real else dtype

    def reduce(full: jax.Array, placement: Placement) -> jax.Array:
        if not placement.axes:  # replicated, as it is
            return full
        dtype = full.dtype
        wire = full.astype(wire_dtype(dtype))
        summed = within_other_axes(lambda x: _reduce(x, placement), placement, other_axes)(pad(wire, placement))
        return summed.astype(dtype)

    def reduce_bytes(placement: Placement, sizes: Sizes) -> BytesByAxes:
        return _reduce_bytes(placement.with_dtype(wire_dtype(placement.dtype)), sizes)

    def reduce_with_feedback(full: jax.Array, feedback: jax.Array, placement: Placement) -> tuple[jax.Array, jax.Array]:
        return reduce(full, placement), jnp.zeros_like(feedback)

    def unit(placement: Placement) -> int:
        # A leaf with a split of its own over other axes keeps its shape, and so does an integer.
        apart = any(entry is not None for entry in placement.spec)
        real = placement.dtype.kind in "fuV" and placement.dtype.itemsize > 1
        return int(placement.is_sharded and real and not apart and math.prod(placement.shard_shape) > 0)

    return Collectives(
        gather, make_secondary if secondary else None, gather_secondary, reduce, reduce_with_feedback,
        bytes_of_gather, reduce_bytes, unit,
    )  # fmt: skip


def identity_gather(collectives: Collectives) -> Collectives:
    """The same reductions for parameters that are replicated (stages 1 and 2)."""
    return collectives._replace(
        gather=lambda full, placement: full, secondary=None, gather_bytes=lambda placement, sizes: {}, gathers=False
    )


def unreduced(collectives: Collectives) -> Collectives:
    """The same gathers for gradients that stay full on each device, to be summed and reduced later."""
    return collectives._replace(
        reduce=lambda full, placement: full, reduce_bytes=lambda placement, sizes: {}, reduces=False
    )


def within_other_axes(
    fn: Callable[[Any], Any],
    placement: Placement,
    other_axes: tuple[str, ...],
    in_spec: Any = None,
    out_spec: Any = None,
) -> Callable[[Any], Any]:
    """Makes the compiler-managed axes manual too, each device keeping its own part of the leaf along them.

    Args:
        fn: the movement, of one array or pytree.
        placement: of the leaf.
        other_axes: the axes; with none, `fn` is returned as it is.
        in_spec: PartitionSpec of the argument over these axes; None: the leaf's own.
        out_spec: the same of the result.
    """
    if not other_axes:
        return fn
    spec = placement.model_spec
    return jax.shard_map(
        fn,
        in_specs=(spec if in_spec is None else in_spec,),
        out_specs=spec if out_spec is None else out_spec,
        axis_names=set(other_axes),
        check_vma=False,
    )


def gather_linearly(shard: jax.Array, placement: Placement, other_axes: tuple[str, ...]) -> jax.Array:
    """The gather of values rather than bits, which JAX can transpose: for derivatives of gradients."""
    if not placement.is_sharded:
        return shard

    def move(x: jax.Array) -> jax.Array:
        assert placement.dim is not None
        for axis in placement.axes:
            x = lax.all_gather(x, axis, axis=placement.dim, tiled=True)
        return x

    return unpad(within_other_axes(move, placement, other_axes)(shard), placement)


def reduce_linearly(full: jax.Array, placement: Placement, other_axes: tuple[str, ...]) -> jax.Array:
    """The reduction in the dtype of its operand: the transpose of `gather_linearly`."""
    return within_other_axes(lambda x: _reduce(x, placement), placement, other_axes)(pad(full, placement))


def gather_over(shard: jax.Array, placement: Placement, hops: Sequence[str | tuple[str, ...]]) -> jax.Array:
    """All-gather along the placement's dim, hop by hop, outermost axis first; local to local (padded)."""
    assert placement.dim is not None
    bits = _as_bits(shard)
    for axes in hops:  # slices are in local-major order
        names = axes if isinstance(axes, str) else tuple(reversed(axes))
        bits = lax.all_gather(bits, names, axis=placement.dim, tiled=True)
    return _from_bits(bits, shard.dtype)


def _reduce(full: jax.Array, placement: Placement) -> jax.Array:
    """Reduce-scatter along the placement's dim, innermost axis first; an all-reduce for a replicated leaf."""
    if placement.dim is None:
        return lax.psum(full, placement.axes)
    for axis in reversed(placement.axes):
        full = lax.psum_scatter(full, axis, scatter_dimension=placement.dim, tiled=True)
    return full


def _as_bits(x: jax.Array) -> jax.Array:
    """Two-byte floats as uint16: the wire stays 2 bytes wide and no cast can move across the collective.

    Integers of 2 bits travel as bytes: XLA's collectives of them on the CPU end the process.
    """
    if is_two_bits(x.dtype):
        return x.astype(jnp.int8)
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2:
        return lax.bitcast_convert_type(x, jnp.uint16)
    return x


def _from_bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    if is_two_bits(dtype):
        return x.astype(dtype)
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def gather_bytes(placement: Placement, sizes: Sizes) -> BytesByAxes:
    """An all-gather over an axis of size n receives (n - 1) parts of what the device holds before it."""
    return grown_bytes(placement.shard_bytes, placement, sizes)


def grown_bytes(
    held: int, placement: Placement, sizes: Sizes, hops: Sequence[tuple[str, ...]] | None = None
) -> BytesByAxes:
    """Bytes received per device, by axes, when `held` bytes are gathered hop by hop; None: an axis a hop."""
    received: BytesByAxes = {}
    if placement.is_sharded:
        for axes in [(axis,) for axis in placement.axes] if hops is None else hops:
            many = math.prod(sizes[axis] for axis in axes)
            received[axes] = held * (many - 1)
            held *= many
    return received


def _reduce_bytes(placement: Placement, sizes: Sizes) -> BytesByAxes:
    """A reduce-scatter mirrors the gather; an all-reduce of n devices receives 2 (n - 1) / n of the leaf."""
    if placement.is_sharded:
        return gather_bytes(placement, sizes)
    n = math.prod(sizes[axis] for axis in placement.axes)
    return {placement.axes: 2 * placement.full_bytes * (n - 1) // n}
