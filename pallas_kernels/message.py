"""What travels of quantised slices: payload and scales of a slice as one row of bytes, or as two.

A collective of several arrays is several collectives; one byte row per slice is one. XLA writes the row as part of
quantising, a kernel writes arrays of its own, and copying them into one row pays only where it costs less than the
latency of a message. Whether there is one row or two follows from the size alone, never from who writes it: all
processes of a job send alike (`to_messages`). Layout of a row, in order:

    payload | block scales | tile scales

16-bit scales travel as two planes (all low bytes, then all high bytes), so that a kernel that reads or writes bytes
needs no change of element width. Sizes are static: they follow from the format and the slice's shape.
"""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.array import TILE, QuantFormat, QuantizedArray


def _planes(scale: jax.Array) -> list[jax.Array]:
    """A scale array as byte planes, low byte first."""
    if scale.dtype.itemsize == 1:
        return [jax.lax.bitcast_convert_type(scale, jnp.uint8)]
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint16)
    return [(bits & 0xFF).astype(jnp.uint8), (bits >> 8).astype(jnp.uint8)]


def _from_planes(planes: list[jax.Array], dtype: str) -> jax.Array:
    if len(planes) == 1:
        return jax.lax.bitcast_convert_type(planes[0], jnp.dtype(dtype))
    bits = planes[0].astype(jnp.uint16) | (planes[1].astype(jnp.uint16) << 8)
    return jax.lax.bitcast_convert_type(bits, jnp.dtype(dtype))


APART_FROM = 64 << 20
"""Payload bytes from which payload and scales travel as two messages. XLA writes one message without a copy; a kernel
copies into one and out of it, written and read twice: 4 * 64 MiB / 3.35 TB/s = 80 microseconds on an H100, against the
some 20 of a second message's latency."""


def to_messages(q: QuantizedArray) -> tuple[jax.Array, ...]:
    """What is sent of ``q``: one message (`pack_bytes`), or two where it is large (`pack_apart`).

    `unpack_bytes` takes either. The choice depends on shapes alone.

    >>> import jax.numpy as jnp
    >>> from pallas_kernels import quantize
    >>> [message.shape for message in to_messages(quantize(jnp.ones(256)))]
    [(260,)]
    """
    return pack_apart(q) if q.qvalue.nbytes >= APART_FROM else (pack_bytes(q),)


def pack_apart(q: QuantizedArray) -> tuple[jax.Array, jax.Array]:
    """The slices of ``q`` as two messages, payload and scales: ``uint8 [*lead, payload_bytes]``, ``[*lead, the rest]``.

    The payload is sent as it is, without the copy into one message.

    Raises:
        ValueError: the arrays of ``q`` do not fit its metadata.

    >>> import jax.numpy as jnp
    >>> from pallas_kernels import quantize_slices
    >>> q = quantize_slices(jnp.ones((8, 64)), QuantFormat(4, 32), dim=0, num_slices=4)
    >>> [message.shape for message in pack_apart(q)]
    [(4, 64), (4, 8)]
    """
    q.validate()
    payload = q.qvalue.reshape(*q.lead, q.qvalue.shape[-2] * q.qvalue.shape[-1])
    scales = _planes(q.scale) if q.tile_scale is None else [*_planes(q.scale), *_planes(q.tile_scale)]
    return jax.lax.bitcast_convert_type(payload, jnp.uint8), jnp.concatenate(scales, axis=-1)


def pack_bytes(q: QuantizedArray) -> jax.Array:
    """The slices of ``q`` as messages: ``uint8 [*lead, message_bytes]``.

    Exact: `unpack_bytes` returns the same bytes, NaN scales included. Wire dtype is uint8 on every backend.

    Raises:
        ValueError: the arrays of ``q`` do not fit its metadata.

    >>> import jax.numpy as jnp
    >>> from pallas_kernels import quantize_slices
    >>> q = quantize_slices(jnp.ones((8, 64)), QuantFormat(4, 32), dim=0, num_slices=4)
    >>> pack_bytes(q).shape, q.message_bytes
    ((4, 72), 72)
    """
    return jnp.concatenate(pack_apart(q), axis=-1)


def unpack_bytes(
    message: jax.Array | tuple[jax.Array, ...],
    like: QuantizedArray | None = None,
    *,
    format: QuantFormat | None = None,
    shape: tuple[int, ...] | None = None,
    dtype: str = "float32",
) -> QuantizedArray:
    """Received messages, of `to_messages`, `pack_bytes` or `pack_apart`, as a record with their lead dimensions.

    Args:
        message: ``uint8 [*lead, message_bytes]``, or payload and scales apart; the lead dimensions may differ from
            those that were packed.
        like: a record with the same metadata (its arrays are not read), or else
        format: the format and
        shape: the shape of one slice.
        dtype: the dtype that was quantised (only with ``format``).

    Raises:
        ValueError: neither or both descriptions are given, or the rows have the wrong dtype or length.

    >>> import jax.numpy as jnp
    >>> from pallas_kernels import quantize
    >>> q = quantize(jnp.arange(100.0), QuantFormat(8, 32))
    >>> bool((unpack_bytes(pack_bytes(q), q).qvalue == q.qvalue).all())
    True
    """
    if (like is None) == (format is None) or (format is None) != (shape is None):
        raise ValueError("give either `like` or both `format` and `shape`")
    if like is not None:
        format, shape, dtype = like.format, like.shape, like.dtype
    assert format is not None
    assert shape is not None
    size = math.prod(shape)
    blocks, tiles = format.num_blocks(size), format.padded_size(size) // TILE
    want = [blocks * format.block_bytes, format.message_bytes(size) - blocks * format.block_bytes]
    messages = message if isinstance(message, tuple) else (message,)
    for one, width in zip(messages, want if len(messages) == 2 else [sum(want)], strict=True):
        if one.dtype != jnp.uint8 or one.ndim < 1 or one.shape[-1] != width:
            raise ValueError(
                f"message must be uint8[..., {width}] for a slice of shape {shape} in {format}, "
                f"got {one.dtype}{list(one.shape)}"
            )
    scale_widths = [blocks, tiles, tiles] if format.tiled else [blocks, blocks]
    if len(messages) == 1:
        messages = (messages[0][..., : want[0]], messages[0][..., want[0] :])
    ends = [sum(scale_widths[:i]) for i in range(len(scale_widths) + 1)]
    parts = [messages[1][..., a:b] for a, b in itertools.pairwise(ends)]
    lead = messages[0].shape[:-1]
    payload = messages[0].reshape(*lead, blocks, format.block_bytes)
    if format.bits == 8:
        payload = jax.lax.bitcast_convert_type(payload, jnp.int8)
    num_scale = 1 if format.tiled else 2
    scale = _from_planes(parts[:num_scale], format.scale_dtype)
    tile_scale = _from_planes(parts[1:], "bfloat16") if format.tiled else None
    return QuantizedArray(payload, scale, tile_scale, format, tuple(shape), dtype)
