"""Quantised movement of a leaf: the weight gather and the two-hop gradient reduction of ZeRO++.

Weights (arXiv 2306.10209, section 3.1): each device quantises its shard in blocks once, levels and scales are gathered
over "node" and then over "local", and every device, the owner included, computes with the same dequantised values.
Gradients (section 3.3): hop 1 sends each device of the node its slices by all-to-all and sums what arrives in float32;
hop 2 does the same between nodes. Slices are in local-major order, so nothing is reordered between the hops. Levels and
scales travel as one message of bytes, large ones as two, whether XLA or a kernel wrote them. The only importer of
the kernels here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from pallas_kernels import (
    QuantFormat,
    QuantizedArray,
    dequantize,
    dequantize_sum,
    dequantize_sum_quantize,
    from_slices,
    kernel_policy,
    quantize_slices,
    to_messages,
    to_slices,
    unpack_bytes,
)
from pallas_kernels.choice import Policy
from zerojax.collectives.plain import BytesByAxes, Collectives, Sizes, grown_bytes, within_other_axes
from zerojax.layout.placement import Placement, pad, trimmed_spec, unpad

Pair = tuple[QuantFormat, QuantFormat]


def quantized_weights(
    plain: Collectives, fmt: QuantFormat, other_axes: tuple[str, ...] = (), kernels: Policy = "auto"
) -> Collectives:
    """`plain` with the weight gathers of large leaves quantised; other leaves move as before.

    Args:
        plain: unquantised collectives, with or without a secondary partition.
        fmt: format on the wire; the result has the dtype of the shard.
        other_axes: mesh axes left to the compiler.
        kernels: who quantises, see `ZeroConfig`.
    """

    def gather(shard: jax.Array, placement: Placement) -> jax.Array:
        if not placement.is_quantized:
            return plain.gather(shard, placement)

        def move(x: jax.Array) -> jax.Array:
            return dequantized(quantized_over(x, placement.axes, fmt, stack=0), placement)

        return unpad(within_other_axes(move, placement, other_axes)(shard), placement)

    def secondary(shard: jax.Array, placement: Placement, stack: int) -> Any:
        assert plain.secondary is not None
        if not _layer(placement, stack).is_quantized:
            return plain.secondary(shard, placement, stack)
        move = within_other_axes(
            lambda x: quantized_over(x, placement.axes[:-1], fmt, stack),
            placement, other_axes, out_spec=_held_spec(placement, stack),
        )  # fmt: skip
        return move(shard)

    def gather_secondary(held: Any, placement: Placement) -> jax.Array:
        if not isinstance(held, QuantizedArray):
            if not placement.is_quantized:
                return plain.gather_secondary(held, placement)
            # A replica, kept as values: quantised inside the node alone.
            inner = within_other_axes(
                lambda x: dequantized(quantized_over(x, placement.axes[-1:], fmt, stack=0), placement),
                placement, other_axes,
            )  # fmt: skip
            return unpad(inner(held), placement)
        move = within_other_axes(
            lambda q: dequantized(_gathered(q, placement.axes[-1:], 0), placement),
            placement, other_axes, in_spec=_held_spec(placement, 0),
        )  # fmt: skip
        return unpad(move(held), placement)

    def gather_bytes(placement: Placement, sizes: Sizes) -> BytesByAxes:
        if not placement.is_quantized:
            return plain.gather_bytes(placement, sizes)
        return grown_bytes(fmt.message_bytes(math.prod(placement.shard_shape)), placement, sizes)

    return plain._replace(
        gather=under_policy(kernels, gather),
        secondary=None if plain.secondary is None else under_policy(kernels, secondary),
        gather_secondary=under_policy(kernels, gather_secondary),
        gather_bytes=gather_bytes,
        unit=_whole_units(plain, (fmt,)),
    )


def quantized_gradients(
    plain: Collectives, formats: Pair, axes: tuple[str, ...], rounding: str = "nearest",
    other_axes: tuple[str, ...] = (), kernels: Policy = "auto",
) -> Collectives:  # fmt: skip
    """`plain` with the reduction of large leaves quantised; other leaves are reduced as before.

    Args:
        plain: unquantised collectives.
        formats: (inside the node, between nodes). A mesh with one node or one device a node has a single hop, in the
            format of the axis that is there.
        axes: the configured data axes, outermost first.
        rounding: "nearest" or "stochastic"; the seed is taken from the gradient's own bits.
        other_axes: mesh axes left to the compiler.
        kernels: who quantises, see `ZeroConfig`.
    """
    inside, between = formats
    rotates = inside.rotate is not None or between.rotate is not None

    def hops(placement: Placement) -> list[tuple[str, QuantFormat]]:
        """Axes and formats of the hops, innermost first."""
        outermost = axes[0]
        return [(axis, between if axis == outermost else inside) for axis in reversed(placement.axes)]

    def reduce(full: jax.Array, placement: Placement) -> jax.Array:
        if not placement.is_quantized:
            return plain.reduce(full, placement)

        def move(x: jax.Array) -> jax.Array:
            return _reduced(x, None, placement, hops(placement), rounding)[0].astype(full.dtype)

        shard = within_other_axes(move, placement, other_axes)(pad(full, placement))
        return _without_padding(shard, placement, placement.axes) if rotates else shard

    def reduce_with_feedback(full: jax.Array, feedback: jax.Array, placement: Placement) -> tuple[jax.Array, jax.Array]:
        if not placement.is_quantized:
            return plain.reduce_with_feedback(full, feedback, placement)

        def move(pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            shard, lost = _reduced(pair[0], pair[1], placement, hops(placement), rounding)
            assert lost is not None
            return shard.astype(full.dtype), lost.astype(feedback.dtype)

        specs = (placement.model_spec, placement.model_spec)
        moved = within_other_axes(move, placement, other_axes, in_spec=specs, out_spec=specs)
        shard, lost = moved((pad(full, placement), feedback))
        if not rotates:
            return shard, lost
        inner = placement.axes[-1:]
        return _without_padding(shard, placement, placement.axes), _without_padding(lost, placement, inner)

    def reduce_bytes(placement: Placement, sizes: Sizes) -> BytesByAxes:
        if not placement.is_quantized:
            return plain.reduce_bytes(placement, sizes)
        received: BytesByAxes = {}
        slices = placement.num_shards
        for axis, fmt in hops(placement):
            message = fmt.message_bytes(math.prod(placement.shard_shape))
            received[axis,] = message * slices // sizes[axis] * (sizes[axis] - 1)
            slices //= sizes[axis]
        return received

    return plain._replace(
        reduce=under_policy(kernels, reduce),
        reduce_with_feedback=under_policy(kernels, reduce_with_feedback),
        reduce_bytes=reduce_bytes,
        unit=_whole_units(plain, formats),
    )


def _whole_units(plain: Collectives, formats: Sequence[QuantFormat]) -> Callable[[Placement], int]:
    """Rows that hold whole blocks, and tiles where these have a scale, of every format: a leaf of whole rows has the
    same values and bytes in company as by itself."""

    def unit(placement: Placement) -> int:
        found = plain.unit(placement)
        if not found or not placement.is_quantized:
            return found
        largest = max(found, *(f.padded_size(1) for f in formats))  # all are powers of two
        return 0 if math.prod(placement.shard_shape) % largest else largest

    return unit


def under_policy(kernels: Policy, move: Callable[..., Any]) -> Callable[..., Any]:
    """The movement, traced under a policy of kernels."""

    @functools.wraps(move)
    def moved(*args: Any, **kwargs: Any) -> Any:
        with kernel_policy(kernels):
            return move(*args, **kwargs)

    return moved


def quantized_over(shard: jax.Array, axes: tuple[str, ...], fmt: QuantFormat, stack: int) -> QuantizedArray:
    """The shard quantised and gathered over some axes: lead dims (*stack, *axes), the last axis gathered last."""
    lead, one = shard.shape[:stack], shard.shape[stack:]
    flat = shard.reshape(math.prod(lead), *one) if stack else shard[None]
    q = quantize_slices(flat, fmt, dim=0, num_slices=flat.shape[0])
    qvalue, scale, tile_scale = (
        None if a is None else a.reshape(*lead, *a.shape[1:]) for a in (q.qvalue, q.scale, q.tile_scale)
    )
    assert qvalue is not None and scale is not None  # noqa: PT018
    return _gathered(QuantizedArray(qvalue, scale, tile_scale, q.format, tuple(one), q.dtype), axes, stack)


def dequantized(q: QuantizedArray, placement: Placement) -> jax.Array:
    """The full padded leaf from its quantised shards."""
    assert placement.dim is not None
    return dequantize(q, merge_dim=placement.dim)


def _gathered(q: QuantizedArray, axes: tuple[str, ...], position: int) -> QuantizedArray:
    """All-gathers over some axes into new lead dims, one message an axis (two where they are large)."""
    if not axes:
        return q
    # As the dtype of a level, so that a compiled program shows what travels.
    messages = [lax.bitcast_convert_type(m, q.qvalue.dtype) for m in to_messages(q)]
    for axis in axes:
        messages = [lax.all_gather(m, axis, axis=position) for m in messages]
    return unpack_bytes(tuple(lax.bitcast_convert_type(m, jnp.uint8) for m in messages), q)


def _reduced(
    full: jax.Array,
    feedback: jax.Array | None,
    placement: Placement,
    hops: list[tuple[str, QuantFormat]],
    rounding: str,
) -> tuple[jax.Array, jax.Array | None]:
    """This device's shard of the sum, float32, and what the last hop lost: one all-to-all of byte messages per hop."""
    assert placement.dim is not None
    sizes = tuple(lax.axis_size(axis) for axis, _ in hops)
    seed = _seed(full) if rounding == "stochastic" else None
    how = {"rounding": rounding, "seed": seed}
    q, lost = quantize_slices(full, hops[0][1], dim=placement.dim, num_slices=sizes, **how), None
    for (axis, _), following in zip(hops, [*hops[1:], None], strict=True):
        q = _exchanged(q, axis)
        if following is None:
            return dequantize_sum(q, axis=0), lost
        # Another seed: the draws of two hops must not depend on each other.
        how |= {"axis": 0, "fmt": following[1], "seed": None if seed is None else seed + jnp.uint32(1)}
        if feedback is None:
            q = dequantize_sum_quantize(q, **how)
        else:
            addend = to_slices(feedback.astype(jnp.float32), placement.dim, lax.axis_size(following[0]))
            q, lost = dequantize_sum_quantize(q, addend=addend, with_residual=True, **how)
            lost = from_slices(lost, placement.dim, 1)
    raise AssertionError("a sharded leaf has at least one hop")


def _exchanged(q: QuantizedArray, axis: str) -> QuantizedArray:
    """Slice i of the first lead dim to device i of the axis, as bytes, one message (two where they are large)."""

    def to_all(message: jax.Array) -> jax.Array:
        return lax.all_to_all(message, axis, split_axis=0, concat_axis=0, tiled=True)

    return unpack_bytes(tuple(to_all(message) for message in to_messages(q)), q)


def _without_padding(part: jax.Array, placement: Placement, axes: tuple[str, ...]) -> jax.Array:
    """This device's part of a padded leaf, split over `axes`, with zeros in the padding.

    Without rotation zeros are quantised to zeros; a rotation mixes a block's padding with its values, and what is lost
    of them comes back in both.
    """
    if not placement.padding:
        return part
    assert placement.dim is not None
    index = jnp.zeros((), jnp.int32)
    for axis in reversed(axes):
        index = index * lax.axis_size(axis) + lax.axis_index(axis)
    rows = lax.broadcasted_iota(jnp.int32, part.shape, placement.dim) + index * part.shape[placement.dim]
    return jnp.where(rows < placement.shape[placement.dim], part, jnp.zeros_like(part))


def _seed(x: jax.Array) -> jax.Array:
    """A seed that differs from step to step and leaf to leaf without state: a hash of some of the gradient's bits."""
    sample = x.reshape(-1)[:: max(1, x.size // 1024)][:1024].astype(jnp.float32)
    bits = lax.bitcast_convert_type(sample, jnp.uint32)
    mixed = (bits * jnp.uint32(2654435761)) ^ (bits >> 15)
    return jnp.sum(mixed + jnp.arange(mixed.size, dtype=jnp.uint32) * mixed, dtype=jnp.uint32)


def _layer(placement: Placement, stack: int) -> Placement:
    for _ in range(stack):
        placement = placement.without_leading_dim()
    return placement


def _held_spec(placement: Placement, stack: int) -> PartitionSpec:
    """Specs of a quantised part over the other axes: lead dims, then blocks, which the leaf's own axes split."""
    names: list[str] = []
    for entry in placement.spec:
        names += [] if entry is None else [entry] if isinstance(entry, str) else list(entry)
    gathered = len(placement.axes) - 1
    return trimmed_spec([*(None,) * (stack + gathered), tuple(names) or None])
