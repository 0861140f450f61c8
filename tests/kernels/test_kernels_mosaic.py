"""The Mosaic kernels in interpret mode equal the reference bit for bit, alone and inside shard_map."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from kernel_formats import (
    E4M3,
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
from pallas_kernels import _compat

pytestmark = pytest.mark.skipif(
    not _compat.MOSAIC_INTERPRETS,
    reason="JAX 0.10 cannot interpret Mosaic GPU kernels; they are compiled there instead",
)

KERNEL = {"implementation": "mosaic_gpu", "interpret": True}


def both(op, *args, **kw):
    """The reference as XLA optimises it, the interpreted kernel without: no value may depend on that.

    Except with rotations, whose additions, some hundreds, take XLA's optimiser most of a minute in all.
    """
    rotates = kw.get("rotate") or any(isinstance(a, pk.QuantizedArray) and a.format.rotate for a in args)
    wanted = (quick if rotates else jax.jit)(functools.partial(op, implementation="xla", **kw))(*args)
    assert_same_bits(wanted, quick(functools.partial(op, **KERNEL, **kw))(*args))


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        *[(INT8, dtype) for dtype in ("float32", "bfloat16", "float16")],
        *[(INT4_TILED, dtype) for dtype in ("float32", "float16")],
        ({"bits": 8, "block_size": 16}, "bfloat16"),
        ({"bits": 8, "block_size": 2048}, "bfloat16"),
        ({"bits": 8, "block_size": 1024, "scale_dtype": E4M3}, "bfloat16"),
        ({"bits": 4, "block_size": 16}, "bfloat16"),
        ({"bits": 4, "block_size": 64}, "bfloat16"),
        ({"bits": 4, "block_size": 2048}, "bfloat16"),
        (FP4_TILED, "bfloat16"),
        (ROTATED, "float32"),
        (ROTATED_TILED, "bfloat16"),
        ({"bits": 8, "block_size": 2048, "rotate": 64}, "float16"),
    ],
    ids=str,
)
def test_quantize_equals_the_reference(fmt, dtype, rng):
    both(pk.quantize, hard_values(rng, (24, 1024), dtype), **fmt)


@pytest.mark.parametrize("fmt", [INT8, INT4, INT4_TILED, FP4_TILED, ROTATED_TILED], ids=str)
def test_stochastic_rounding_and_residual_equal_the_reference(fmt, rng):
    both(pk.quantize, hard_values(rng, (24, 1024), "float32"), **fmt, **STOCHASTIC, with_residual=True)


def test_a_last_program_that_overlaps_its_neighbour_writes_the_same(rng):
    x = jnp.asarray(rng.standard_normal(37 * 256), jnp.float32)
    both(pk.quantize, x, **INT4, **STOCHASTIC, with_residual=True)


@pytest.mark.parametrize(("dim", "num_slices"), [(0, 3), (1, (4, 2)), (1, 7)])
def test_slices_are_written_in_destination_order(dim, num_slices, rng):
    x = jnp.asarray(rng.standard_normal((3, 56, 1024)), jnp.bfloat16)
    both(pk.quantize_slices, x, dim=dim, num_slices=num_slices, **INT4_TILED, **STOCHASTIC, with_residual=True)


@pytest.mark.parametrize(
    ("fmt", "count", "dtype"),
    [
        (INT8, 1, "float32"),
        (INT8, 7, "float32"),
        (INT8, 13, "float32"),
        (INT4_TILED, 2, "float32"),
        (INT4_TILED, 7, "float32"),
        (INT4, 3, "bfloat16"),
        (FP4_TILED, 3, "bfloat16"),
        (ROTATED, 3, "float32"),
        (ROTATED_TILED, 7, "bfloat16"),
    ],
    ids=str,
)
def test_dequantize_sum_equals_the_reference(fmt, count, dtype, rng):
    both(pk.dequantize_sum, contributions(rng, count, fmt), dtype=dtype, mean=count == 7)


@pytest.mark.parametrize(
    ("source", "out"),
    [
        (INT8, INT4_TILED),
        (INT8, INT8),
        (INT4, INT4),
        (INT4_TILED, INT4_TILED),
        (INT8, FP4_TILED),
        (ROTATED, ROTATED),
        (ROTATED, INT4_TILED),
        (INT8, ROTATED_TILED),
        (ROTATED, ROTATED_TILED),
    ],
    ids=str,
)
def test_dequantize_sum_quantize_equals_the_reference(source, out, rng):
    both(pk.dequantize_sum_quantize, contributions(rng, 3, source), **out)


@pytest.mark.parametrize(
    ("source", "out"), [(INT8, INT4_TILED), (ROTATED, ROTATED), (ROTATED, ROTATED_TILED)], ids=str
)
def test_error_feedback_between_the_hops_equals_the_reference(source, out, rng):
    q = contributions(rng, 3, source)
    carried = jnp.asarray(rng.standard_normal((2, 1, 4, 1024)) * 0.01, jnp.float32)
    # A mean over three: its product is rounded before the carried residual is added.
    both(pk.dequantize_sum_quantize, q, **out, **STOCHASTIC, mean=True, addend=carried, with_residual=True)


@pytest.mark.parametrize("fmt", [ROTATED, ROTATED_TILED], ids=str)
def test_dequantize_with_a_rotation_equals_the_reference(fmt, rng):
    both(pk.dequantize, contributions(rng, 2, fmt), dtype="bfloat16", merge_dim=0)


def two_hops(x, axis, count, **how):
    """The quantised reduction over one axis, one byte message per destination."""
    q = pk.quantize_slices(x, dim=0, num_slices=count, **INT8, **how)
    received = jax.lax.all_to_all(pk.pack_bytes(q), axis, 0, 0, tiled=True)
    total = pk.dequantize_sum_quantize(pk.unpack_bytes(received, q), mean=True, **ROTATED_TILED, **how)
    return pk.dequantize_sum(jax.tree.map(lambda a: jax.lax.all_gather(a, axis), total), dtype=x.dtype, **how)


@pytest.mark.parametrize(("count", "check_vma"), [(1, True), (3, False), (8, True)])
def test_kernels_run_inside_shard_map_with_real_collectives(count, check_vma, rng):
    mesh = jax.make_mesh((count,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:count])
    x = jnp.asarray(rng.standard_normal((count, count * 4, 1024)), jnp.float32)

    def program(how):
        body = lambda x: two_hops(x[0], "d", count, **how)[None]  # noqa: E731
        return quick(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check_vma))(x)

    assert_same_bits(program({"implementation": "xla"}), program(KERNEL))


def test_kernels_run_in_a_shard_map_nested_in_a_partly_manual_one(rng):
    mesh = jax.make_mesh((4, 2), ("d", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jnp.asarray(rng.standard_normal((4, 16, 2048)), jnp.float32)

    def program(how):
        def outer(x):
            inner = lambda x: two_hops(x[0], "d", 4, **how)[None]  # noqa: E731
            spec = P(None, None, "model")
            return jax.shard_map(inner, in_specs=spec, out_specs=spec, axis_names={"model"}, check_vma=False)(x)

        mapped = jax.shard_map(outer, mesh=mesh, in_specs=P("d"), out_specs=P("d"), axis_names={"d"}, check_vma=False)
        return quick(mapped)(x)

    assert_same_bits(program({"implementation": "xla"}), program(KERNEL))
