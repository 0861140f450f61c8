"""The compiled kernels on real numbers: their PTX, run by `ptx_machine`, equals the reference bit for bit.

Interpretation does not see what the compiler makes of a kernel, nor what a kernel says in the compiler's own terms;
these tests do. A GPU's freedoms are taken too: products fused into additions, reciprocals a unit off.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import ptx_machine
import pytest
from kernel_formats import (
    FP4_TILED,
    INT4,
    INT4_TILED,
    INT8,
    ROTATED,
    ROTATED_TILED,
    STOCHASTIC,
    assert_same_bits,
    contributions,
    hard_values,
    quick,
)

import pallas_kernels as pk
from pallas_kernels import _compat, absent_gpu, backend, sass

pytestmark = pytest.mark.needs_cuda_plugin

compile_kernel = _compat.mosaic_kernel
codes: dict[str, ptx_machine.Code] = {}


def code_of(kernel, shapes):
    """What the compiler makes of a kernel for an H100; it is compiled, and its code dumped, once per process."""
    key = str(jax.make_jaxpr(kernel)(*shapes))
    if key not in codes:
        with sass.dumping() as place:
            absent_gpu.compile_for(kernel, shapes, "h100")
            codes[key] = ptx_machine.read(place)
    return codes[key]


@pytest.fixture
def machine(monkeypatch):
    """Sends every kernel that is asked for to the machine."""

    def on_the_machine(body, out_type, grid, interpret):
        def call(*operands):
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
            code = code_of(compile_kernel(body, out_type, grid, False), shapes)
            inputs = [np.asarray(x) for x in operands]
            # What the kernel does not write would show.
            results = [np.full(t.shape, 0x25, np.uint8).astype(t.dtype) for t in out_type]
            run = functools.partial(ptx_machine.run, code, inputs, results, math.prod(grid))
            exact, free = run(), run(fuse=True, reciprocal_ulps=1)
            assert_same_bits(exact, free)
            return [jnp.asarray(x) for x in exact]

        return call

    monkeypatch.setattr(_compat, "mosaic_kernel", on_the_machine)
    monkeypatch.setattr(backend, "device_problems", list)
    monkeypatch.setattr(backend, "_concrete_on_cpu", lambda operands: [])


def comparable(x):
    """Without what is the device's choice: which NaN an operation gives, and subnormal numbers, which a CPU drops."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize == 1:
        return x
    x = np.asarray(x)
    x = np.where(np.isnan(x), x.dtype.type(np.nan), x)
    return np.where(np.abs(x) < jnp.finfo(x.dtype).tiny, x.dtype.type(0), x)


def both(op, *args, **kw):
    wanted = quick(functools.partial(op, implementation="xla", **kw))(*args)
    got = op(*args, implementation="mosaic_gpu", **kw)
    assert_same_bits(*(jax.tree.map(comparable, result) for result in (wanted, got)))


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        (INT8, "float32"),
        (INT8, "bfloat16"),
        (INT4, "float16"),
        (INT4_TILED, "bfloat16"),
        ({"bits": 4, "block_size": 16}, "bfloat16"),
        ({"bits": 8, "block_size": 2048}, "float32"),
        (FP4_TILED, "bfloat16"),
        (ROTATED, "float32"),
        (ROTATED, "bfloat16"),
        (ROTATED_TILED, "float16"),
        ({"bits": 8, "block_size": 2048, "rotate": 64}, "bfloat16"),
    ],
    ids=str,
)
def test_quantize_equals_the_reference(fmt, dtype, machine, rng):
    both(pk.quantize, hard_values(rng, (24, 1024), dtype), **fmt)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fmt", [INT8, INT4, INT4_TILED, FP4_TILED, ROTATED_TILED], ids=str)
def test_stochastic_rounding_and_residual_equal_the_reference(fmt, dtype, machine, rng):
    both(pk.quantize, hard_values(rng, (24, 1024), dtype), **fmt, **STOCHASTIC, with_residual=True)


def test_a_last_program_that_overlaps_its_neighbour_writes_the_same(machine, rng):
    x = jnp.asarray(rng.standard_normal(37 * 256), jnp.float32)
    both(pk.quantize, x, **INT4, **STOCHASTIC, with_residual=True)


@pytest.mark.parametrize(("dim", "num_slices"), [(0, 3), (1, (4, 2)), (1, 7)])
def test_slices_are_written_in_destination_order(dim, num_slices, machine, rng):
    x = jnp.asarray(rng.standard_normal((3, 56, 1024)), jnp.bfloat16)
    how = {**ROTATED_TILED, **STOCHASTIC, "with_residual": True}
    both(pk.quantize_slices, x, dim=dim, num_slices=num_slices, **how)


@pytest.mark.parametrize(
    ("fmt", "count", "dtype"),
    [
        (INT8, 2, "float32"),
        (INT8, 13, "bfloat16"),
        (INT4_TILED, 7, "float32"),
        (INT4_TILED, 64, "float32"),
        (FP4_TILED, 3, "bfloat16"),
        (ROTATED, 16, "float32"),
        (ROTATED_TILED, 7, "bfloat16"),
    ],
    ids=str,
)
def test_dequantize_sum_equals_the_reference(fmt, count, dtype, machine, rng):
    both(pk.dequantize_sum, contributions(rng, count, fmt), dtype=dtype, mean=count == 7)


@pytest.mark.parametrize(
    ("source", "out"),
    [(INT8, INT4_TILED), (INT4, INT4), (INT4_TILED, INT4_TILED), (INT8, FP4_TILED), (ROTATED, ROTATED_TILED)],
    ids=str,
)
def test_dequantize_sum_quantize_equals_the_reference(source, out, machine, rng):
    both(pk.dequantize_sum_quantize, contributions(rng, 3, source), **out)


@pytest.mark.parametrize(("source", "out"), [(INT8, INT4_TILED), (ROTATED, ROTATED), (ROTATED, ROTATED_TILED)], ids=str)
def test_error_feedback_between_the_hops_equals_the_reference(source, out, machine, rng):
    q = contributions(rng, 3, source)
    carried = jnp.asarray(rng.standard_normal((2, 1, 4, 1024)) * 0.01, jnp.float32)
    # A mean over three: its product is rounded before the carried residual is added.
    both(pk.dequantize_sum_quantize, q, **out, **STOCHASTIC, mean=True, addend=carried, with_residual=True)


def test_dequantize_with_a_rotation_equals_the_reference(machine, rng):
    both(pk.dequantize, contributions(rng, 2, ROTATED_TILED), dtype="bfloat16", merge_dim=0)
