"""The meaning of the ops: against NumPy written from the definition, then properties, then special values."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import pallas_kernels as pk
from pallas_kernels import numerics, reference

E4M3 = "float8_e4m3fn"
FORMATS = [
    pk.BlockFormat(bits=8, block_size=128),
    pk.BlockFormat(bits=8, block_size=16, scale_dtype=E4M3),
    pk.BlockFormat(bits=4, block_size=64),
    pk.BlockFormat(bits=4, block_size=32, scale_dtype=E4M3),
    pk.BlockFormat(bits=4, block_size=16, scale_dtype=E4M3, levels="e2m1"),
    pk.BlockFormat(bits=4, block_size=64, rotate=32),
    pk.BlockFormat(bits=8, block_size=2048, rotate=64),
]
PLAIN = [fmt for fmt in FORMATS if fmt.rotate is None]
by_format = pytest.mark.parametrize(
    "fmt", FORMATS, ids=lambda f: f"{f.bits}-{f.block_size}-{f.scale_dtype}-{f.levels}-{f.rotate}"
)
by_plain_format = pytest.mark.parametrize(
    "fmt", PLAIN, ids=lambda f: f"{f.bits}-{f.block_size}-{f.scale_dtype}-{f.levels}"
)


def scales_of(q):
    """Effective scale of every element of the padded slice, float64."""
    effective = np.asarray(reference.effective_scale(q.scale, q.tile_scale, q.format), np.float64)
    return np.repeat(effective, q.format.block_size, axis=-1)


def round_up(x, dtype):
    """The smallest value of ``dtype`` that is >= x, by stepping from the nearest one."""
    near = np.asarray(x).astype(dtype)
    bits = near.view(np.uint8 if near.itemsize == 1 else np.uint16)
    return np.where(near.astype(np.float64) < x, (bits + 1).view(dtype), near).astype(np.float64)


@by_plain_format
def test_quantize_equals_the_definition_in_float64(fmt, rng):
    x = (rng.standard_normal(4096) * np.exp(2 * rng.standard_normal(4096))).astype(np.float32)
    q = pk.quantize(jnp.asarray(x), **fmt.keywords())
    blocks = x.astype(np.float64).reshape(-1, fmt.block_size)
    needed = np.abs(blocks).max(-1) / fmt.qmax
    if fmt.tiled:
        per_tile = 1024 // fmt.block_size
        tile = np.repeat(round_up(needed.reshape(-1, per_tile).max(-1) / 448, ml_dtypes.bfloat16), per_tile)
        scale = tile * round_up(needed / tile, ml_dtypes.float8_e4m3fn)
    else:
        scale = round_up(needed, ml_dtypes.bfloat16)
    np.testing.assert_array_equal(scale, np.asarray(reference.effective_scale(q.scale, q.tile_scale, fmt)))
    grid = np.arange(-fmt.qmax, fmt.qmax + 1.0)
    if fmt.levels == "e2m1":
        grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        grid = np.concatenate([-grid[:0:-1], grid])
    y = blocks / scale[:, None]
    distance = np.abs(y[..., None] - grid)
    nearest = grid[distance.argmin(-1)]
    got = np.asarray(pk.dequantize(q), np.float64).reshape(blocks.shape) / scale[:, None]
    # The reciprocal and the product are each rounded to 24 bits: y may move by 127 * 2**-23, so only ties may differ.
    tie = np.sort(distance, -1)[..., 1] - np.sort(distance, -1)[..., 0] < 127 * 2.0**-21
    assert (got == nearest)[~tie].all()
    assert tie.mean() < 1e-3


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *[(shape, "float32") for shape in [(), (0,), (3, 0, 5), (1,), (16,), (3, 5, 7), (2, 1024)]],
        ((3, 5, 7), "bfloat16"),
        ((1000,), "float16"),
    ],
)
@by_format
def test_every_shape_and_dtype_round_trips_to_its_shape(fmt, shape, dtype, rng):
    x = jnp.asarray(rng.standard_normal(shape), dtype)
    q = pk.quantize(x, **fmt.keywords())
    back = pk.dequantize(q.validate())
    assert back.shape == shape
    assert back.dtype == jnp.dtype(dtype)
    assert q.message_bytes == pk.pack_bytes(q).shape[-1]
    flat = np.asarray(x, np.float64).ravel()
    # Half a scale per element; a rotation is orthonormal, so it bounds the norm of a block instead. 2**-7 relative:
    # rounding the result to bfloat16, twice.
    worst = scales_of(q)[: flat.size].max(initial=0) * (2 if fmt.levels == "e2m1" else 1) / 2
    worst *= np.sqrt(fmt.block_size) if fmt.rotate else 1
    np.testing.assert_allclose(np.asarray(back, np.float64).ravel(), flat, atol=worst * 1.001, rtol=2.0**-7)


finite_arrays = hnp.arrays(
    np.float32,
    st.integers(1, 300),
    elements=st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False),
)


@settings(deadline=None, max_examples=25)
@given(x=finite_arrays, fmt=st.sampled_from(PLAIN))
def test_round_trip_error_is_at_most_half_a_step(x, fmt):
    q = pk.quantize(jnp.asarray(x), **fmt.keywords())
    scale = scales_of(q)[: x.size]
    back = np.asarray(pk.dequantize(q), np.float64)
    step = np.ones_like(scale)
    if fmt.levels == "e2m1":
        step = np.select([np.abs(x) >= 4 * scale, np.abs(x) >= 2 * scale], [2.0, 1.0], 0.5)
    # y = x * (1 / scale) carries two roundings of 2**-24 relative and |y| <= 127, so 127 * 2**-22 of a scale.
    assert (np.abs(back - x) <= scale * (step / 2 + 127 * 2.0**-22)).all()


@settings(deadline=None, max_examples=25)
@given(data=st.data(), fmt=st.sampled_from(PLAIN))
def test_data_on_the_grid_of_a_block_comes_back_unchanged(data, fmt):
    levels = [0, 0.5, 1, 1.5, 2, 3, 4, 6] if fmt.levels == "e2m1" else list(range(fmt.qmax + 1))
    signed = st.sampled_from([s * v for s, v in itertools.product((1.0, -1.0), levels)])
    x = data.draw(hnp.arrays(np.float32, fmt.block_size, elements=signed))
    x[data.draw(st.integers(0, fmt.block_size - 1))] = fmt.qmax
    # Tile scales are the block's need over 448 rounded up, so only scales 7 * 2**k are met exactly.
    scale = 7.0 if fmt.tiled else data.draw(st.sampled_from([1.0, 1.5, 2.0**-20, 2.0**60]))
    x *= np.float32(scale)
    q = pk.quantize(jnp.asarray(x), **fmt.keywords())
    np.testing.assert_array_equal(np.asarray(pk.dequantize(q)), x)


@settings(deadline=None, max_examples=20)
@given(x=finite_arrays, fmt=st.sampled_from(FORMATS), stochastic=st.booleans())
def test_residual_plus_dequantised_is_the_input(x, fmt, stochastic):
    kw = {"rounding": "stochastic", "seed": 5} if stochastic else {}
    q, residual = pk.quantize(jnp.asarray(x), **fmt.keywords(), with_residual=True, **kw)
    total = np.asarray(pk.dequantize(q), np.float64) + np.asarray(residual, np.float64)
    # One rounding of the difference (2**-24 of it); a rotation adds log2(64) + 1 roundings each way in either term,
    # each relative to the largest element of the block times sqrt(block).
    slack = np.abs(x).max() * 2.0**-23
    slack *= 16 * np.sqrt(fmt.block_size) if fmt.rotate else 1
    np.testing.assert_allclose(total, x, atol=slack, rtol=0)


@by_plain_format
def test_stochastic_rounding_is_unbiased_and_depends_on_the_seed(fmt, rng):
    x = jnp.asarray(rng.standard_normal(1024), jnp.float32)
    draw = jax.jit(lambda seed: pk.dequantize(pk.quantize(x, **fmt.keywords(), rounding="stochastic", seed=seed)))
    draws = np.stack([np.asarray(draw(np.uint32(seed))) for seed in range(200)]).astype(np.float64)
    scale = scales_of(pk.quantize(x, **fmt.keywords()))[:1024]
    step = scale * (2 if fmt.levels == "e2m1" else 1)
    # A Bernoulli step has a standard deviation of at most half a step; the mean of 1024 x 200 independent draws then
    # has one of 0.5 / sqrt(204800) = 1.1e-3 steps. Five of them, and 2**-16 for the width of the noise.
    bias = (draws.mean(0) - np.asarray(x)) / step
    assert abs(bias.mean()) < 5 * 0.5 / np.sqrt(draws.size) + 2.0**-16
    # Per element: six standard deviations of 0.5 / sqrt(200).
    assert np.abs(bias).max() < 6 * 0.5 / np.sqrt(200)
    assert np.abs(draws - np.asarray(x)).max() <= step.max() * (1 + 1e-4)
    assert (draws[0] != draws[1]).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@by_format
def test_a_block_with_nan_or_inf_dequantises_to_nan_and_its_neighbours_do_not(fmt, bad):
    x = np.ones(4 * fmt.block_size, np.float32)
    x[fmt.block_size + 3] = bad
    back = np.asarray(pk.dequantize(pk.quantize(jnp.asarray(x), **fmt.keywords()))).reshape(4, -1)
    assert np.isnan(back[1]).all()
    assert np.isfinite(back[[0, 2, 3]]).all()
    q = pk.quantize_slices(jnp.asarray(x), dim=0, num_slices=2, **fmt.keywords())
    assert np.isnan(np.asarray(pk.dequantize_sum(q)).reshape(2, -1)[1]).all()
    fused = pk.dequantize_sum_quantize(q, **fmt.keywords())
    assert np.isnan(np.asarray(pk.dequantize(fused)).reshape(2, -1)[1]).all()


@by_format
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_zeros_subnormals_and_the_largest_numbers_stay_finite(fmt, dtype):
    info = jnp.finfo(dtype)
    for value in (0.0, -0.0, float(info.smallest_subnormal), float(info.tiny), float(info.max), float(info.min)):
        x = jnp.full(fmt.block_size, value, dtype)
        back = np.asarray(pk.dequantize(pk.quantize(x, **fmt.keywords())), np.float64)
        if fmt.rotate and abs(value) * np.sqrt(fmt.rotate) > np.finfo(np.float32).max:
            # The first coordinate of a constant group is sqrt(width) times its value: out of range, so never finite.
            assert np.isnan(back).all()
            continue
        assert np.isfinite(back).all()
        if abs(value) < 1e-30:
            # Below the floor of the scale, 2**-100: the error is at most half of it.
            assert np.abs(back - np.float64(value)).max() <= 2.0**-101 * np.sqrt(fmt.rotate or 1)
        elif fmt.rotate is None:
            # Half a step of the coarsest scale: rounded up by at most 2**-7 (bfloat16) and 2**-3 (e4m3).
            np.testing.assert_allclose(back, value, rtol=(1 + 2.0**-2) / (2 * fmt.qmax) + 2.0**-7)


@by_format
def test_the_padded_tail_is_zero_and_stays_zero(fmt, rng):
    size = fmt.block_size // 2 + 1
    x = jnp.asarray(rng.standard_normal(size), jnp.float32)
    q = pk.quantize(x, **fmt.keywords())
    blocks = reference.dequantize_blocks(q.qvalue, q.scale, q.tile_scale, fmt)
    tail = np.asarray(reference.rotate(blocks, fmt.rotate)).ravel()[size:]
    if fmt.rotate is None:
        assert (tail == 0).all()
    padded = jnp.zeros(fmt.padded_size(size)).at[:size].set(x)
    whole = pk.quantize(padded, **fmt.keywords())
    np.testing.assert_array_equal(np.asarray(whole.qvalue), np.asarray(q.qvalue))


@pytest.mark.parametrize(("width", "block"), [(32, 32), (32, 128), (64, 64), (64, 256)])
def test_the_rotation_is_orthonormal_and_its_own_inverse(width, block, rng):
    x = rng.standard_normal((3, block)).astype(np.float32)
    turned = np.asarray(reference.rotate(jnp.asarray(x), width))
    matrix = np.asarray(reference.rotate(jnp.eye(block), width), np.float64)
    # Six butterfly stages and a product, 2**-24 each, on sums of up to 64 terms.
    np.testing.assert_allclose(matrix @ matrix, np.eye(block), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(reference.rotate(jnp.asarray(turned), width)), x, atol=1e-5)
    assert (np.abs(matrix[matrix != 0]) > 0.99 * width**-0.5).all()
    assert ((matrix != 0).sum(-1) == width).all()


@pytest.mark.parametrize("width", [32, 64])
def test_a_rotation_tames_an_outlier(width, rng):
    x = rng.standard_normal(4096).astype(np.float32)
    x[::256] *= 100
    errors = [
        np.linalg.norm(np.asarray(pk.dequantize(pk.quantize(jnp.asarray(x), bits=4, block_size=256, rotate=r))) - x)
        for r in (None, width)
    ]
    assert errors[1] < errors[0]


@pytest.mark.parametrize("count", [1, 2, 7, 64])
@by_format
def test_dequantize_sum_adds_the_contributions_in_float32(fmt, count, rng):
    x = jnp.asarray(rng.standard_normal((count, 2, 300)), jnp.float32)
    q = pk.quantize_slices(x, dim=0, num_slices=count, **fmt.keywords())
    each = np.asarray(pk.dequantize(q), np.float64)
    # count additions of 2**-24 relative to the running sum; a rotation adds seven roundings.
    slack = (count + 14) * 2.0**-24 * np.abs(each).sum(0).max() * (8 if fmt.rotate else 1)
    np.testing.assert_allclose(np.asarray(pk.dequantize_sum(q)), each.sum(0), atol=slack, rtol=0)
    np.testing.assert_allclose(np.asarray(pk.dequantize_sum(q, mean=True)), each.mean(0), atol=slack, rtol=0)
    moved = jax.tree.map(lambda a: a[None], q)
    np.testing.assert_array_equal(np.asarray(pk.dequantize_sum(moved, axis=1)[0]), np.asarray(pk.dequantize_sum(q)))
    assert pk.dequantize_sum(q, dtype="bfloat16").dtype == jnp.bfloat16


@pytest.mark.parametrize("out", PLAIN[:4], ids=str)
@pytest.mark.parametrize("source", [FORMATS[0], FORMATS[3]], ids=str)
def test_the_fused_middle_equals_sum_then_quantise(source, out, rng):
    x = jnp.asarray(rng.standard_normal((6, 4, 300)), jnp.float32)
    q = pk.quantize_slices(x, dim=0, num_slices=(3, 2), **source.keywords())
    carried = jnp.asarray(rng.standard_normal((2, 1, 4, 300)) * 0.01, jnp.float32)
    fused, residual = pk.dequantize_sum_quantize(q, **out.keywords(), mean=True, addend=carried, with_residual=True)
    total = pk.dequantize_sum(q, mean=True) + carried
    apart = pk.quantize_slices(total, dim=0, num_slices=2, **out.keywords(), with_residual=True)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(
            np.asarray(a, np.float32).ravel(), np.asarray(b, np.float32).ravel()
        ),
        (fused.qvalue, fused.scale, fused.tile_scale, residual),
        (apart[0].qvalue, apart[0].scale, apart[0].tile_scale, apart[1]),
    )


def test_rotated_alike_on_both_hops_equals_rotating_back_and_forth(rng):
    fmt: dict[str, Any] = {"bits": 8, "block_size": 64, "rotate": 32}
    q = pk.quantize_slices(jnp.asarray(rng.standard_normal((4, 640)), jnp.float32), dim=0, num_slices=4, **fmt)
    fused = pk.dequantize(pk.dequantize_sum_quantize(q, **fmt))
    total = pk.dequantize_sum(q)
    # Two rotations of float32 in between may move a value across a tie: one step of the largest scale.
    step = float(np.asarray(pk.quantize(total, **fmt).scale, np.float32).max())
    np.testing.assert_allclose(np.asarray(fused), np.asarray(total), atol=step)


@pytest.mark.parametrize("num_slices", [1, 2, 3, 6, (3, 2), (2, 3)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_slices_are_the_contiguous_ranges_in_destination_order(dim, num_slices, rng):
    x = jnp.asarray(rng.standard_normal((6, 12, 18)), jnp.float32)
    q, residual = pk.quantize_slices(x, dim=dim, num_slices=num_slices, block_size=16, with_residual=True)
    pieces = np.split(np.asarray(x), int(np.prod(num_slices)), axis=dim)
    each = np.asarray(pk.dequantize(q)).reshape(-1, *q.shape)
    alone = np.stack([np.asarray(pk.dequantize(pk.quantize(jnp.asarray(p), block_size=16))) for p in pieces])
    np.testing.assert_array_equal(each, alone)
    whole = pk.dequantize(q, merge_dim=dim)
    np.testing.assert_array_equal(np.asarray(whole), np.concatenate(alone, axis=dim))
    np.testing.assert_allclose(np.asarray(whole + residual), np.asarray(x), atol=1e-6)


@by_format
def test_a_message_carries_payload_and_scales_exactly(fmt, rng):
    x = jnp.asarray(rng.standard_normal((4, 700)), jnp.bfloat16).at[1, 5].set(jnp.nan)
    q = pk.quantize_slices(x, dim=0, num_slices=4, **fmt.keywords())
    message = pk.pack_bytes(q)
    assert message.dtype == jnp.uint8
    assert message.shape == (4, fmt.message_bytes(700))
    for back in (pk.unpack_bytes(message, q), pk.unpack_bytes(message, format=fmt, shape=(1, 700), dtype="bfloat16")):
        assert jax.tree.structure(back) == jax.tree.structure(q)
        for a, b in zip(jax.tree.leaves(q), jax.tree.leaves(back), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(
    ("fmt", "bits"),
    [
        ({"bits": 8, "block_size": 128}, 8.125),
        ({"bits": 4, "block_size": 128}, 4.125),
        ({"bits": 4, "block_size": 32, "scale_dtype": E4M3}, 4.265625),
        ({"bits": 4, "block_size": 16, "scale_dtype": E4M3}, 4.515625),
    ],
)
def test_wire_bits_count_payload_and_scales(fmt, bits):
    q = pk.quantize(jnp.ones(4096), **fmt)
    assert q.wire_bits == q.format.bits_per_element == bits
    assert sum(a.nbytes for a in jax.tree.leaves(q)) == q.message_bytes


def test_the_record_is_a_pytree_with_static_metadata():
    q = pk.quantize(jnp.ones((2, 64)), block_size=32)
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), q)
    assert stacked.lead == (2,)
    assert pk.dequantize(stacked).shape == (2, 2, 64)
    traced = jax.jit(lambda q: q)(q)
    assert (traced.format, traced.shape, traced.dtype) == (q.format, q.shape, q.dtype)


def test_e4m3_codes_round_up_and_decode_exactly():
    codes = jnp.arange(128, dtype=jnp.int32)
    values = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(numerics.e4m3_value(codes)), values)
    between = jnp.asarray(np.linspace(2.0**-9, 448, 5000, dtype=np.float32))
    code = numerics.e4m3_code(between, jnp.float32(1.0), numerics.abs_bits(between))
    want = round_up(np.asarray(between, np.float64) * (1 - 2.0**-22), ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(numerics.e4m3_value(code)), want)
