"""Formats that the tests of the kernels share, and what NumPy needs to know of them."""

import functools

import jax
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import reference

E4M3 = "float8_e4m3fn"
FORMATS = [
    pk.BlockFormat(bits=8, block_size=128),
    pk.BlockFormat(bits=8, block_size=16, scale_dtype=E4M3),
    pk.BlockFormat(bits=4, block_size=64),
    pk.BlockFormat(bits=4, block_size=32, scale_dtype=E4M3),
    pk.BlockFormat(bits=4, block_size=16, scale_dtype=E4M3, levels="e2m1"),
    pk.BlockFormat(bits=4, block_size=64, rotate=32),
    pk.BlockFormat(bits=8, block_size=2048),
]
PLAIN = [fmt for fmt in FORMATS if fmt.rotate is None]
by_format = pytest.mark.parametrize(
    "fmt", FORMATS, ids=lambda f: f"{f.bits}-{f.block_size}-{f.scale_dtype}-{f.levels}-{f.rotate}"
)
by_plain_format = pytest.mark.parametrize(
    "fmt", PLAIN, ids=lambda f: f"{f.bits}-{f.block_size}-{f.scale_dtype}-{f.levels}"
)

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
