"""Formats that the tests of the kernels share, and what NumPy needs to know of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import reference

E4M3 = "float8_e4m3fn"
FORMATS = [
    pk.QuantFormat(8, 128),
    pk.QuantFormat(8, 16, E4M3),
    pk.QuantFormat(4, 64),
    pk.QuantFormat(4, 32, E4M3),
    pk.QuantFormat(4, 16, E4M3, "e2m1"),
    pk.QuantFormat(4, 64, rotate=32),
    pk.QuantFormat(8, 2048),
]
PLAIN = [fmt for fmt in FORMATS if fmt.rotate is None]
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)
by_plain_format = pytest.mark.parametrize("fmt", PLAIN, ids=str)

# Tests of values compile many programs and run each once: LLVM's optimiser would take most of their time. Values do not
# depend on it: no product that is rounded feeds an addition, so there is nothing to fuse.
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def scales_of(q):
    """Effective scale of every element of the padded slice, float64."""
    effective = np.asarray(reference.effective_scale(q.scale, q.tile_scale, q.format), np.float64)
    return np.repeat(effective, q.format.block_size, axis=-1)


def round_up(x, dtype):
    """The smallest value of ``dtype`` that is >= x, by stepping from the nearest one."""
    near = np.asarray(x).astype(dtype)
    bits = near.view(np.uint8 if near.itemsize == 1 else np.uint16)
    return np.where(near.astype(np.float64) < x, (bits + 1).view(dtype), near).astype(np.float64)


def assert_same_bits(wanted, got):
    assert jax.tree.structure(wanted) == jax.tree.structure(got)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(np.atleast_1d(a).view(np.uint8), np.atleast_1d(b).view(np.uint8))


# What the kernels are run on, as arguments of the ops.
INT8 = pk.QuantFormat(8, 128)
INT4 = pk.QuantFormat(4, 256)
INT4_TILED = pk.QuantFormat(4, 32, E4M3)
INT8_ONE_BLOCK_A_TILE = pk.QuantFormat(8, 1024, E4M3)
FP4 = pk.QuantFormat(4, 64, levels="e2m1")
FP4_TILED = pk.QuantFormat(4, 16, E4M3, "e2m1")
ROTATED = pk.QuantFormat(8, 128, rotate=32)
ROTATED_TILED = pk.QuantFormat(4, 32, E4M3, rotate=32)
STOCHASTIC = {"rounding": "stochastic", "seed": 11}


def hard_values(rng, shape, dtype):
    """Wide-ranging values with a zero block, NaN, Inf, subnormals and the largest finite number."""
    x = rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape))
    flat = x.reshape(-1)
    flat[:2048] = 0
    bad = np.zeros(shape).reshape(-1)
    bad[2500], bad[4000] = np.nan, -np.inf
    info = jnp.finfo(dtype)
    flat[5000:5100] = float(info.smallest_subnormal) * 3
    flat[6144], flat[7168] = float(info.max), float(info.min)
    return jnp.asarray((np.clip(x, -float(info.max), float(info.max)) + bad.reshape(shape)).astype(np.float32), dtype)


def contributions(rng, count, fmt):
    x = hard_values(rng, (count * 2, 4, 1024), "float32")
    cut = functools.partial(pk.quantize_slices, fmt=fmt, dim=0, num_slices=(count, 2), implementation="xla")
    return quick(cut)(x)
