"""Where one array leaf lives: the sharded dim, the mesh axes, the padding, and the reason.

A Placement is the single record that the runtime executes and that memory, communication and plan read. Slices are in
local-major order: device (node n, local l) owns slice `l * num_nodes + n`, so that a gather over "node" yields one
contiguous chunk and the two-hop reduction needs no reordering.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

# A leaf that would more than double under padding stays replicated: the gather would move mostly zeros.
MAX_PADDED_RATIO = 2.0
# Padding an inner dim by up to this much is better than splitting the dim that may be a stack of layers.
MAX_INNER_RATIO = 1.125


@dataclasses.dataclass(frozen=True)
class Placement:
    """How one leaf is split over the data axes.

    Attributes:
        path: key path of the leaf, as `jax.tree_util.keystr` prints it.
        shape: global logical shape, without padding.
        dtype: dtype of the leaf.
        dim: the dim split over the data axes, or None for a replicated leaf.
        axes: data axes of the mesh of more than one device, outermost first.
        num_shards: product of the sizes of `axes`.
        padding: number of zero rows appended to `dim` so that it divides evenly.
        reason: why the leaf is placed so, in words for `Layout.describe`.
        spec: the leaf's own PartitionSpec over the other mesh axes, one entry per dim.
        trainable: whether the leaf gets gradients and optimizer state.
        quantize_above: fewest elements with which the leaf travels quantised where a technique quantises; None: never.

    What always holds (tests/layout/test_placement.py checks it for drawn shapes); with `dim` None, `padding == 0` and
    all shapes are `shape`:

        num_shards * shard_shape[dim] == padded_shape[dim] == shape[dim] + padding
        0 <= padding < num_shards
        shard_shape[d] == padded_shape[d] == shape[d]                       for every other dim d
        shard_bytes * num_shards == full_bytes * padded_shape[dim] / shape[dim]

    >>> placement = place("['w']", (7, 64), jnp.dtype("float32"), axes=("data",), num_shards=8, min_shard_size=0)
    >>> placement.dim, placement.shard_shape, tuple(placement.full_spec)
    (1, (7, 8), (None, 'data'))
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    dim: int | None
    axes: tuple[str, ...]
    num_shards: int
    padding: int
    reason: str
    spec: tuple[str | tuple[str, ...] | None, ...]
    trainable: bool = True
    quantize_above: int | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether the leaf may travel quantised: it has two dims or more and enough elements."""
        big = self.quantize_above is not None and math.prod(self.shape) >= self.quantize_above
        return big and len(self.shape) >= 2 and self.is_sharded and jnp.issubdtype(self.dtype, jnp.floating)

    @property
    def replica_dtype(self) -> np.dtype | None:
        """Dtype of the node-local replica that weight deltas keep: two bytes; None: the leaf can have none."""
        if not self.is_quantized or len(self.axes) < 2 or self.dtype.name not in ("float32", "bfloat16", "float16"):
            return None
        return self.dtype if self.dtype.itemsize == 2 else jnp.dtype(jnp.bfloat16)

    @property
    def is_sharded(self) -> bool:
        """Whether the leaf is split over the data axes."""
        return self.dim is not None

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Global shape with the padding of the sharded dim."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.shape[self.dim] + self.padding, *self.shape[self.dim + 1 :])

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of one device's part, as `shard_map` over the data axes sees it."""
        if self.dim is None:
            return self.shape
        padded = self.padded_shape
        return (*padded[: self.dim], padded[self.dim] // self.num_shards, *padded[self.dim + 1 :])

    @property
    def shard_bytes(self) -> int:
        """Bytes of one device's part, before any split over the other mesh axes."""
        return math.prod(self.shard_shape) * self.dtype.itemsize

    @property
    def full_bytes(self) -> int:
        """Bytes of the full logical leaf."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def data_spec(self) -> PartitionSpec:
        """PartitionSpec over the data axes only, for `shard_map`."""
        if self.dim is None:
            return PartitionSpec()
        return PartitionSpec(*(None,) * self.dim, self._shard_axes)

    @property
    def full_spec(self) -> PartitionSpec:
        """PartitionSpec over all axes of the mesh: the leaf's own, and the data axes on the sharded dim."""
        entries: list[str | tuple[str, ...] | None] = list(self.spec)
        if self.dim is not None:
            entries[self.dim] = self._shard_axes
        return trimmed_spec(entries)

    @property
    def _shard_axes(self) -> str | tuple[str, ...]:
        """The data axes in local-major order, in the form that jit returns them in."""
        return self.axes[0] if len(self.axes) == 1 else tuple(reversed(self.axes))

    @property
    def model_spec(self) -> PartitionSpec:
        """PartitionSpec over the other axes only."""
        return trimmed_spec(list(self.spec))

    def without_leading_dim(self) -> Placement:
        """The placement of one layer of a stacked leaf, as the body of a scan over dim 0 sees it."""
        assert self.dim != 0, "a leaf that is split along dim 0 cannot be scanned in stored form"
        assert self.shape, "only a leaf that is not sharded along dim 0 can be scanned in stored form"
        dim = None if self.dim is None else self.dim - 1
        return dataclasses.replace(self, shape=self.shape[1:], dim=dim, spec=self.spec[1:])

    def replicated(self) -> Placement:
        """The placement of the same leaf where every device holds all of it and nothing of it moves."""
        return dataclasses.replace(self, dim=None, padding=0, axes=(), num_shards=1, quantize_above=None)

    def with_shape(self, shape: tuple[int, ...]) -> Placement:
        """The placement of a part of the leaf that has the full extent of the sharded dim."""
        assert self.dim is None or shape[self.dim] == self.shape[self.dim]
        return dataclasses.replace(self, shape=tuple(shape))

    def unquantized(self) -> Placement:
        """The same split of a leaf that always travels in full precision."""
        return dataclasses.replace(self, quantize_above=None)

    def with_dtype(self, dtype: np.dtype) -> Placement:
        """The same split of a leaf of another dtype."""
        return dataclasses.replace(self, dtype=jnp.dtype(dtype))


def place(
    path: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    *,
    axes: tuple[str, ...],
    num_shards: int,
    min_shard_size: int,
    spec: PartitionSpec | None = None,
    trainable: bool = True,
    quantize_above: int | None = None,
) -> Placement:
    """Chooses the dim to split: the largest that divides evenly, else the one that padding wastes least on.

    For leaves of three dims or more, dim 0 comes after every other that divides or nearly does: it may be a stack of
    layers, and a stack that is split cannot be gathered one layer at a time.

    Args:
        path: key path of the leaf.
        shape: global logical shape.
        dtype: dtype of the leaf.
        axes: data axes of the mesh, outermost first.
        num_shards: product of their sizes.
        min_shard_size: leaves with fewer elements stay replicated.
        spec: the leaf's own PartitionSpec over the other mesh axes; its dims are not split again.
        trainable: recorded in the placement.
        quantize_above: recorded in the placement.

    >>> place("['w']", (50257, 768), jnp.dtype("float32"), axes=("data",), num_shards=8, min_shard_size=0).dim
    1
    """
    entries = tuple(spec or ()) + (None,) * (len(shape) - len(spec or ()))
    size = math.prod(shape)
    free = [d for d, entry in enumerate(entries) if entry is None]

    def record(dim: int | None, padding: int, reason: str) -> Placement:
        return Placement(
            path, tuple(shape), jnp.dtype(dtype), dim, axes, num_shards, padding, reason, entries, trainable,
            quantize_above,
        )  # fmt: skip

    if num_shards == 1:
        return record(None, 0, "one device along the data axes")
    if not shape or size == 0:
        return record(None, 0, "scalar" if not shape else "empty")
    if size < min_shard_size:
        return record(None, 0, f"{size} elements, fewer than min_shard_size {min_shard_size}")
    if not free:
        return record(None, 0, f"every dim is split over other mesh axes {PartitionSpec(*entries)}")
    # The leading dim of a leaf of three dims or more is often a stack of layers, unsplit in a scan: last choice.
    inner = free[1:] if len(shape) >= 3 and free[0] == 0 and len(free) > 1 else free
    for dims in (inner, free):
        even = [d for d in dims if shape[d] % num_shards == 0]
        if even:
            dim = max(even, key=lambda d: shape[d])
            return record(dim, 0, f"dim {dim} of {shape[dim]} divides by {num_shards}")
        dim = min(dims, key=lambda d: (_padded(shape[d], num_shards) / shape[d], -shape[d]))
        if _padded(shape[dim], num_shards) / shape[dim] <= MAX_INNER_RATIO:
            break
    padding = _padded(shape[dim], num_shards) - shape[dim]
    if (shape[dim] + padding) / shape[dim] > MAX_PADDED_RATIO:
        return record(None, 0, f"no dim is near a multiple of {num_shards}: padding would more than double the leaf")
    return record(dim, padding, f"dim {dim} of {shape[dim]} padded by {padding} to divide by {num_shards}")


def _padded(extent: int, num_shards: int) -> int:
    return -(-extent // num_shards) * num_shards


def trimmed_spec(entries: list[str | tuple[str, ...] | None]) -> PartitionSpec:
    """A PartitionSpec in the canonical form that JAX returns from jit: no trailing None."""
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return PartitionSpec(*entries)


def is_two_bits(dtype: np.dtype) -> bool:
    """Whether XLA has to be handed bytes instead when such values move between devices: int2 and uint2.

    >>> is_two_bits(jnp.dtype("int2")), is_two_bits(jnp.dtype("int4"))
    (True, False)
    """
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 4


def pad(x: jax.Array, placement: Placement) -> jax.Array:
    """Appends the zero rows of the placement to a logical array (global, or full on this device)."""
    if not placement.padding or x.shape != placement.shape:
        return x
    widths = [(0, 0)] * x.ndim
    widths[placement.dim or 0] = (0, placement.padding)
    return zero_padded(x, widths)


def zero_padded(x: Any, widths: Sequence[tuple[int, int]]) -> Any:
    """A NumPy or JAX array with rows of zero bits around it: also for dtypes that have no zero (float8_e8m0fnu)."""
    on_host = not isinstance(x, jax.Array)
    if x.dtype != jnp.float8_e8m0fnu:
        return (np if on_host else jnp).pad(x, widths)
    if on_host:
        return np.pad(np.ascontiguousarray(x).view(np.uint8), widths).view(x.dtype)
    bits = jnp.pad(jax.lax.bitcast_convert_type(x, jnp.uint8), widths)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


def unpad(x: jax.Array, placement: Placement) -> jax.Array:
    """Cuts the padding off a padded array (global, or full on this device)."""
    if not placement.padding or x.shape != placement.padded_shape:
        return x
    return jax.lax.slice_in_dim(x, 0, placement.shape[placement.dim or 0], axis=placement.dim or 0)
