"""The Mosaic kernels have the reference's bits: interpreted, and compiled for an H100 and run by `ptx_machine`.

Interpretation does not see what the compiler makes of a kernel, nor whether it takes it, nor what a kernel says in the
compiler's own terms; execution does, and takes a GPU's freedoms too: products fused into additions, reciprocals a unit
off. Interpretation is what runs without the CUDA plugin, and inside `shard_map` (`test_kernels_shard_map`).
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import ptx_machine
import pytest
from kernel_formats import (
    FP4,
    FP4_TILED,
    INT4,
    INT4_TILED,
    INT8,
    INT8_ONE_BLOCK_A_TILE,
    ROTATED,
    ROTATED_TILED,
    STOCHASTIC,
    assert_same_bits,
    contributions,
    hard_values,
    quick,
)

import pallas_kernels as pk
from pallas_kernels import _compat, backend, sass, target_gpu

compile_kernel = _compat.mosaic_kernel
codes: dict[str, ptx_machine.Code] = {}


def code_of(kernel, shapes):
    """What the compiler makes of a kernel for an H100; one that it has seen before it does not dump again."""
    with sass.dumping() as place:
        program = target_gpu.compile_for(kernel, shapes, "h100").as_text()
        # A jaxpr would not do as a key: it does not show what `inline_mgpu` says.
        (key,) = re.findall(r'custom_call_target="mosaic_gpu.*backend_config=(.*)', program)
        if key not in codes:
            codes[key] = ptx_machine.read(place)
    return codes[key]


def on_the_machine(body, out_type, grid, interpret):
    """Stands in for `_compat.mosaic_kernel`."""

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


def comparable(x):
    """Without what is the device's choice: which NaN an operation gives, and subnormal numbers, which a CPU drops."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize == 1:
        return x
    x = np.asarray(x)
    nan = np.isnan(x)
    subnormal = np.abs(np.where(nan, x.dtype.type(1), x)) < jnp.finfo(x.dtype).tiny
    return np.where(nan, x.dtype.type(np.nan), np.where(subnormal, x.dtype.type(0), x))


def reference(op, args, kw, compiler):
    return compiler(functools.partial(op, implementation="xla", **kw))(*args)


def executed(monkeypatch):
    """Runs an op by the reference and by its kernel's compiled code, and compares."""
    monkeypatch.setattr(_compat, "mosaic_kernel", on_the_machine)
    monkeypatch.setattr(backend, "device_problems", list)
    monkeypatch.setattr(backend, "_concrete_on_cpu", lambda operands: [])

    def run(op, *args, **kw):
        got = op(*args, implementation="mosaic_gpu", **kw)
        results = reference(op, args, kw, quick), got
        assert_same_bits(*(jax.tree.map(comparable, result) for result in results))

    return run


@pytest.fixture(params=["interpreted", pytest.param("executed", marks=pytest.mark.aot)])
def both(request, monkeypatch):
    """Runs an op by the reference and by the kernel, and compares."""
    if request.param == "executed":
        return executed(monkeypatch)
    if not _compat.MOSAIC_INTERPRETS:
        pytest.skip("JAX 0.10 cannot interpret Mosaic GPU kernels; they are executed there")

    def interpreted(op, *args, **kw):
        """The reference as XLA optimises it, the interpreted kernel without: no value may depend on that.

        Except with rotations, whose additions, some hundreds, take XLA's optimiser most of a minute in all.
        """
        rotates = ("fmt" in kw and kw["fmt"].rotate) or any(
            isinstance(a, pk.QuantizedArray) and a.format.rotate for a in args
        )
        wanted = reference(op, args, kw, quick if rotates else jax.jit)
        kernel = functools.partial(op, implementation="mosaic_gpu", interpret=True, **kw)
        assert_same_bits(wanted, quick(kernel)(*args))

    return interpreted


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        *[(INT8, dtype) for dtype in ("float32", "bfloat16", "float16")],
        (INT4, "float16"),
        (INT4_TILED, "float32"),
        (INT4_TILED, "bfloat16"),
        (pk.QuantFormat(8, 16), "bfloat16"),
        (pk.QuantFormat(8, 2048), "float32"),
        (INT8_ONE_BLOCK_A_TILE, "bfloat16"),
        (pk.QuantFormat(4, 16), "bfloat16"),
        (pk.QuantFormat(4, 64), "bfloat16"),
        (pk.QuantFormat(4, 2048), "bfloat16"),
        (FP4_TILED, "bfloat16"),
        (ROTATED, "float32"),
        (ROTATED, "bfloat16"),
        (ROTATED_TILED, "float16"),
        (pk.QuantFormat(8, 2048, rotate=64), "bfloat16"),
    ],
    ids=str,
)
def test_quantize_equals_the_reference(fmt, dtype, both, rng):
    both(pk.quantize, hard_values(rng, (24, 1024), dtype), fmt=fmt)


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        *[(fmt, dtype) for dtype in ("float32", "bfloat16") for fmt in (INT8, INT4_TILED, FP4_TILED, ROTATED_TILED)],
        (INT4, "float32"),
        (FP4, "float16"),
        (pk.QuantFormat(8, 1024, "float8_e4m3fn", rotate=32), "bfloat16"),
    ],
    ids=str,
)
def test_stochastic_rounding_and_residual_equal_the_reference(fmt, dtype, both, rng):
    both(pk.quantize, hard_values(rng, (24, 1024), dtype), fmt=fmt, **STOCHASTIC, with_residual=True)


@pytest.mark.parametrize("fmt", [INT8, INT4, FP4_TILED], ids=str)
def test_stochastic_rounding_without_residual_equals_the_reference(fmt, both, rng):
    both(pk.quantize, hard_values(rng, (24, 1024), "bfloat16"), fmt=fmt, **STOCHASTIC)


@pytest.mark.parametrize("fmt", [INT8, FP4_TILED], ids=str)
def test_a_residual_of_the_nearest_level_equals_the_reference(fmt, both, rng):
    both(pk.quantize, hard_values(rng, (24, 1024), "bfloat16"), fmt=fmt, with_residual=True)


def test_a_last_program_that_overlaps_its_neighbour_writes_the_same(both, rng):
    x = jnp.asarray(rng.standard_normal(37 * 256), jnp.float32)
    both(pk.quantize, x, fmt=INT4, **STOCHASTIC, with_residual=True)


@pytest.mark.parametrize(("dim", "num_slices"), [(0, 3), (1, (4, 2)), (1, 7)])
def test_slices_are_written_in_destination_order(dim, num_slices, both, rng):
    x = jnp.asarray(rng.standard_normal((3, 56, 1024)), jnp.bfloat16)
    how = {"fmt": ROTATED_TILED if dim == 0 else INT4_TILED, **STOCHASTIC, "with_residual": True}
    both(pk.quantize_slices, x, dim=dim, num_slices=num_slices, **how)


@pytest.mark.parametrize(
    ("fmt", "count", "dtype"),
    [
        (INT8, 1, "float32"),
        (INT8, 2, "float32"),
        (INT8, 13, "bfloat16"),
        (INT4, 3, "bfloat16"),
        (INT4_TILED, 2, "float32"),
        (INT4_TILED, 7, "float32"),
        (INT4_TILED, 64, "float32"),
        (INT8_ONE_BLOCK_A_TILE, 3, "bfloat16"),
        (FP4_TILED, 3, "bfloat16"),
        (ROTATED, 16, "float32"),
        (ROTATED_TILED, 7, "bfloat16"),
    ],
    ids=str,
)
def test_dequantize_sum_equals_the_reference(fmt, count, dtype, both, rng):
    both(pk.dequantize_sum, contributions(rng, count, fmt), dtype=dtype, mean=count == 7)


@pytest.mark.parametrize(
    ("source", "out"),
    [
        (INT8, INT4_TILED),
        (INT8, INT8),
        (INT4, INT4),
        (INT4_TILED, INT4_TILED),
        (INT8_ONE_BLOCK_A_TILE, INT8_ONE_BLOCK_A_TILE),
        (INT8_ONE_BLOCK_A_TILE, INT4_TILED),
        (pk.QuantFormat(8, 1024), INT4_TILED),
        (INT8, FP4_TILED),
        (ROTATED, ROTATED),
        (ROTATED, INT4_TILED),
        (INT8, ROTATED_TILED),
        (ROTATED, ROTATED_TILED),
    ],
    ids=str,
)
def test_dequantize_sum_quantize_equals_the_reference(source, out, both, rng):
    both(pk.dequantize_sum_quantize, contributions(rng, 3, source), fmt=out)


def test_nine_contributions_are_one_and_twice_four(both, rng):
    both(pk.dequantize_sum_quantize, contributions(rng, 9, INT8), fmt=FP4_TILED, **STOCHASTIC)


@pytest.mark.parametrize(("source", "out"), [(INT8, INT4_TILED), (ROTATED, ROTATED), (ROTATED, ROTATED_TILED)], ids=str)
def test_error_feedback_between_the_hops_equals_the_reference(source, out, both, rng):
    q = contributions(rng, 3, source)
    carried = jnp.asarray(rng.standard_normal((2, 1, 4, 1024)) * 0.01, jnp.float32)
    # A mean over three: its product is rounded before the carried residual is added.
    both(pk.dequantize_sum_quantize, q, fmt=out, **STOCHASTIC, mean=True, addend=carried, with_residual=True)


@pytest.mark.parametrize("fmt", [ROTATED, ROTATED_TILED], ids=str)
def test_dequantize_with_a_rotation_equals_the_reference(fmt, both, rng):
    both(pk.dequantize, contributions(rng, 2, fmt), dtype="bfloat16", merge_dim=0)


@pytest.mark.needs_cuda_plugin
def test_the_compiled_code_of_each_op_equals_the_reference(monkeypatch, rng):
    """What ZeRO++ sends by default, in the first tier; all formats are executed in the second."""
    run = executed(monkeypatch)
    run(pk.quantize, hard_values(rng, (24, 1024), "bfloat16"), fmt=INT8)
    run(pk.dequantize_sum, contributions(rng, 2, INT4_TILED), dtype="float32")
    run(pk.dequantize_sum_quantize, contributions(rng, 3, INT8), fmt=INT4_TILED)
