"""Checksums of values, whatever the layout: a flipped bit on disk does not come back as a number.

The checksum of a leaf is the sum over its elements, modulo 2**32, of the element's bits times an odd number that
depends on its logical index alone. So it is the same under every sharding, each device sums what it holds (one pass
over the state, no traffic but a scalar for each leaf), and padding, which is zero, adds nothing. Any single flipped bit
changes it with certainty: an odd factor times a power of two below 2**32 is not a multiple of 2**32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax.layout.mesh import with_auto_axes


def checksums(values: Sequence[Any]) -> list[int]:
    """The checksum of each array (global, stored or logical form), an integer below 2**32; waits for the arrays.

    >>> checksums([jnp.arange(3), jnp.array([0, 1, 2, 0])])[0] == checksums([jnp.array([0, 1, 2, 0])])[0]
    True
    """
    return [int(total) for total in jax.device_get([_checksum(x) for x in values])]


def _checksum(x: Any) -> Any:
    sharding = getattr(x, "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return _program(mesh)(x)


@functools.cache
def _program(mesh: Any) -> Any:
    if mesh is None:
        return jax.jit(weighted_sum)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(with_auto_axes(weighted_sum, mesh, everywhere), out_shardings=everywhere)


def weighted_sum(x: jax.Array) -> jax.Array:
    """The checksum of an array of any dtype, a uint32 scalar."""
    words = _words(x)
    index = jnp.zeros(words.shape, jnp.uint32)
    for dim in range(words.ndim):
        index = (index ^ jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)) * jnp.uint32(0x9E3779B1 + 2 * dim)
        index = index ^ (index >> 15)
    return jnp.sum(words * (index * jnp.uint32(0x85EBCA6B) | 1), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """The bits of each element as uint32; a last dim of two for what is wider."""
    if _compat.is_prng_key(x):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = jnp.finfo(x.dtype).bits
        x = jax.lax.bitcast_convert_type(x, jnp.uint32 if bits > 32 else f"uint{bits}")
    elif x.dtype.itemsize == 8:
        x = jax.lax.bitcast_convert_type(x, jnp.uint32)
    signed = jnp.issubdtype(x.dtype, jnp.signedinteger)
    return (x.astype(jnp.int32) if signed else x).astype(jnp.uint32)
