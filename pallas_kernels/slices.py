"""Slices of a leaf in destination order, and whole blocks of a slice.

A leaf cut along one dimension into D destinations becomes ``[D, slice]``; destination d owns the d-th contiguous range
of that dimension. A tuple (D0, D1) cuts range d0 * D1 + d1, which is the local-major order of a two-hop reduction:
lead dimensions (local, node) of a leaf need no reordering between the hops. Pure shape work: no values are computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.array import QuantFormat


def slice_shape(
    shape: Sequence[int], dim: int, num_slices: int | Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The lead dimensions and the logical shape of one slice.

    Args:
        shape: the leaf's shape.
        dim: the dimension to cut; negative counts from the end.
        num_slices: destinations, or a tuple of them, outermost first.

    Returns:
        ``(lead, shape_of_one_slice)``.

    Raises:
        ValueError: ``dim`` is out of range, or its size is no multiple of the number of slices.

    >>> slice_shape((6, 8), 1, (2, 2))
    ((2, 2), (6, 2))
    """
    lead = (num_slices,) if isinstance(num_slices, int) else tuple(num_slices)
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"dim must be in {-len(shape)}..{len(shape) - 1} for an array of shape {tuple(shape)}, got {dim}"
        )
    dim, total = dim % len(shape), math.prod(lead)
    if min(lead, default=0) < 1:
        raise ValueError(f"num_slices must be one or more positive integers, got {num_slices!r}")
    if shape[dim] % total:
        raise ValueError(
            f"dimension {dim} of shape {tuple(shape)} has size {shape[dim]}, which {total} slices do not divide; "
            "pad that dimension first"
        )
    return lead, (*shape[:dim], shape[dim] // total, *shape[dim + 1 :])


def to_slices(x: jax.Array, dim: int, num_slices: int | Sequence[int]) -> jax.Array:
    """The leaf as ``[*lead, *slice]``, destination order."""
    lead, one = slice_shape(x.shape, dim, num_slices)
    dim = dim % x.ndim
    split = x.reshape(*x.shape[:dim], math.prod(lead), *one[dim:])
    return jnp.moveaxis(split, dim, 0).reshape(*lead, *one)


def from_slices(x: jax.Array, dim: int, num_lead: int) -> jax.Array:
    """The inverse of `to_slices`: merges ``num_lead`` lead dimensions into dimension ``dim`` of the slice.

    >>> import jax.numpy as jnp
    >>> x = jnp.arange(24).reshape(4, 6)
    >>> bool((from_slices(to_slices(x, 1, 3), 1, 1) == x).all())
    True
    """
    one = x.shape[num_lead:]
    if not -len(one) <= dim < len(one):
        raise ValueError(f"dim must be in {-len(one)}..{len(one) - 1} for slices of shape {tuple(one)}, got {dim}")
    dim = dim % len(one)
    flat = jnp.moveaxis(x.reshape(-1, *one), 0, dim)
    return flat.reshape(*one[:dim], -1 if flat.size else math.prod(x.shape[:num_lead]) * one[dim], *one[dim + 1 :])


def to_blocks(x: jax.Array, fmt: QuantFormat, num_lead: int) -> jax.Array:
    """``[*lead, *slice]`` as ``[*lead, blocks, block_size]``, the tail padded with zeros."""
    lead, size = x.shape[:num_lead], math.prod(x.shape[num_lead:])
    flat = x.reshape(*lead, size)
    pad = fmt.padded_size(size) - size
    if pad:
        flat = jnp.pad(flat, [(0, 0)] * num_lead + [(0, pad)])
    return flat.reshape(*lead, fmt.num_blocks(size), fmt.block_size)


def from_blocks(blocks: jax.Array, shape: Sequence[int]) -> jax.Array:
    """``[*lead, blocks, block_size]`` as ``[*lead, *shape]``, the padding dropped."""
    lead, size = blocks.shape[:-2], math.prod(shape)
    flat = blocks.reshape(*lead, blocks.shape[-2] * blocks.shape[-1])
    return flat[..., :size].reshape(*lead, *shape)
