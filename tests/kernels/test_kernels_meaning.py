"""The meaning of quantise and dequantise: against NumPy from the definition, then properties, then special values."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernel_formats import E4M3, FORMATS, FP4, by_format, by_plain_format, quick, round_up, scales_of

import pallas_kernels as pk
from pallas_kernels import e2m1, numerics, reference, scale_rounding

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


@by_plain_format
def test_quantize_equals_the_definition_in_float64(fmt, rng):
    x = (rng.standard_normal(4096) * np.exp(2 * rng.standard_normal(4096))).astype(np.float32)
    q, back = there_and_back(fmt)(jnp.asarray(x))[:2]
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
        grid = E2M1.astype(np.float64)
        grid = np.concatenate([-grid[:0:-1], grid])
    y = blocks / scale[:, None]
    distance = np.abs(y[..., None] - grid)
    nearest = grid[distance.argmin(-1)]
    got = np.asarray(back, np.float64).reshape(blocks.shape) / scale[:, None]
    # The reciprocal and the product are each rounded to 24 bits: y may move by 127 * 2**-23, so only ties may differ.
    tie = np.sort(distance, -1)[..., 1] - np.sort(distance, -1)[..., 0] < 127 * 2.0**-21
    assert (got == nearest)[~tie].all()
    assert tie.mean() < 1e-3


@functools.cache
def there_and_back(fmt):
    """``(q, dequantised, residual)`` to nearest, then stochastically."""

    def both_ways(x):
        results = []
        for how in ({}, {"rounding": "stochastic", "seed": 5}):
            q, residual = pk.quantize(x, fmt=fmt, with_residual=True, **how)
            results += [q.validate(), pk.dequantize(q), residual]
        return results

    return quick(both_ways)


SHAPES = [
    *[(shape, "float32") for shape in [(), (0,), (3, 0, 5), (1,), (16,), (3, 5, 7), (2, 1024)]],
    ((3, 5, 7), "bfloat16"),
    ((1000,), "float16"),
]


@by_format
def test_every_shape_and_dtype_round_trips_to_its_shape(fmt, rng):
    xs = [jnp.asarray(rng.standard_normal(shape), dtype) for shape, dtype in SHAPES]

    def round_trips(xs):
        qs = [pk.quantize(x, fmt=fmt) for x in xs]
        return [(q.validate(), pk.dequantize(q), pk.pack_bytes(q)) for q in qs]

    for x, (q, back, message) in zip(xs, quick(round_trips)(xs), strict=True):
        assert (back.shape, back.dtype) == (x.shape, x.dtype)
        assert q.message_bytes == message.shape[-1]
        flat = np.asarray(x, np.float64).ravel()
        # Half a scale per element; a rotation is orthonormal, so it bounds the norm of a block instead. 2**-7 relative:
        # rounding the result to bfloat16, twice.
        worst = scales_of(q)[: flat.size].max(initial=0) * (2 if fmt.levels == "e2m1" else 1) / 2
        worst *= np.sqrt(fmt.block_size) if fmt.rotate else 1
        np.testing.assert_allclose(np.asarray(back, np.float64).ravel(), flat, atol=worst * 1.001, rtol=2.0**-7)


SIZE = 300
finite_arrays = hnp.arrays(np.float32, SIZE, elements=st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False))
sampled = functools.partial(settings, deadline=None, derandomize=True, database=None)


@sampled(max_examples=30)
@given(x=finite_arrays, fmt=st.sampled_from(FORMATS))
def test_an_error_is_at_most_half_a_step_and_the_residual_gives_it_back(x, fmt):
    q, back, residual, _, stochastic, stochastic_residual = there_and_back(fmt)(x)
    back, stochastic = np.asarray(back, np.float64), np.asarray(stochastic, np.float64)
    # One rounding of the difference (2**-24 of it); a rotation adds log2(64) + 1 roundings each way in either term,
    # each relative to the largest element of the block times sqrt(block).
    slack = np.abs(x).max() * 2.0**-23
    slack *= 16 * np.sqrt(fmt.block_size) if fmt.rotate else 1
    np.testing.assert_allclose(back + np.asarray(residual, np.float64), x, atol=slack, rtol=0)
    np.testing.assert_allclose(stochastic + np.asarray(stochastic_residual, np.float64), x, atol=slack, rtol=0)
    if fmt.rotate:
        return
    scale = scales_of(q)[: x.size]
    step = np.ones_like(scale)
    if fmt.levels == "e2m1":
        step = np.select([np.abs(x) >= 4 * scale, np.abs(x) >= 2 * scale], [2.0, 1.0], 0.5)
    # y = x * (1 / scale) carries two roundings of 2**-24 relative and |y| <= 127, so 127 * 2**-22 of a scale.
    assert (np.abs(back - x) <= scale * (step / 2 + 127 * 2.0**-22)).all()


@by_plain_format
@sampled(max_examples=6)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1.0, 1.5, 2.0**-20, 2.0**60]))
def test_data_on_the_grid_of_a_block_comes_back_unchanged(fmt, seed, scale):
    levels = [0, 0.5, 1, 1.5, 2, 3, 4, 6] if fmt.levels == "e2m1" else list(range(fmt.qmax + 1))
    draw = np.random.default_rng(seed)
    x = (draw.choice(levels, fmt.block_size) * draw.choice([1.0, -1.0], fmt.block_size)).astype(np.float32)
    x[draw.integers(fmt.block_size)] = fmt.qmax
    # Tile scales are the block's need over 448 rounded up, so only scales 7 * 2**k are met exactly.
    scale = 7.0 if fmt.tiled else scale
    padded = np.zeros(max(SIZE, fmt.block_size), np.float32)
    padded[: x.size] = x * np.float32(scale)
    _, back, _, _, stochastic, _ = there_and_back(fmt)(padded)
    np.testing.assert_array_equal(np.asarray(back), padded)
    if fmt.levels == "integer":
        # Noise cannot move a value that is on the grid; e2m1's is as wide as the step below, which differs at a power.
        np.testing.assert_array_equal(np.asarray(stochastic), padded)


@by_plain_format
def test_stochastic_rounding_is_unbiased_and_depends_on_the_seed(fmt, rng):
    x = jnp.asarray(rng.standard_normal(1024), jnp.float32)

    def draw(seed):
        return pk.dequantize(pk.quantize(x, fmt=fmt, rounding="stochastic", seed=seed))

    draws = np.asarray(quick(lambda seeds: jax.lax.map(draw, seeds))(jnp.arange(200, dtype=jnp.uint32)), np.float64)
    scale = scales_of(there_and_back(fmt)(x)[0])[:1024]
    step = scale * (2 if fmt.levels == "e2m1" else 1)
    # A Bernoulli step has a standard deviation of at most half a step; the mean of 1024 x 200 independent draws then
    # has one of 0.5 / sqrt(204800) = 1.1e-3 steps. Five of them, and 2**-16 for the width of the noise.
    bias = (draws.mean(0) - np.asarray(x)) / step
    assert abs(bias.mean()) < 5 * 0.5 / np.sqrt(draws.size) + 2.0**-16
    # Per element: six standard deviations of 0.5 / sqrt(200).
    assert np.abs(bias).max() < 6 * 0.5 / np.sqrt(200)
    assert np.abs(draws - np.asarray(x)).max() <= step.max() * (1 + 1e-4)
    assert (draws[0] != draws[1]).any()


def test_the_noise_is_uniform_and_its_neighbours_are_independent():
    index = jnp.arange(1 << 16, dtype=jnp.uint32)
    for seed in (0, 1):
        random = numerics.hash_bits(index, numerics.hash_seed(seed))
        upper, lower = (np.asarray(numerics.dither(random, each), np.float64) for each in (True, False))
        size = index.size
        for noise in (upper, lower):
            # Variance 1/12, fourth moment 1/80: the variance's estimate has a standard deviation of 1 / sqrt(180 n).
            assert abs(noise.var() - 1 / 12) < 5 / np.sqrt(180 * size)
            for lag in (1, 2, 8, 32, 1024):
                assert abs((noise[:-lag] * noise[lag:]).mean()) < 5 / (12 * np.sqrt(size))
        assert abs((upper * lower).mean()) < 5 / (12 * np.sqrt(size))


@pytest.mark.parametrize("upper", [True, False])
def test_rounding_down_keeps_whole_numbers_and_goes_up_as_often_as_the_fraction_says(upper):
    random = jnp.arange(1 << 16, dtype=jnp.uint32) * np.uint32(0x10001)  # every 16-bit number once, in either half
    for y in (-7.0, -3.0, 0.0, 5.0, 7.0, 7.0 - 2.0**-18, -7.0 - 2.0**-20):
        total, level = numerics.rounded_down(jnp.float32(y), random, upper)
        assert (np.asarray(level) == round(y)).all()
        assert ((np.asarray(total) >> 16) & 0xF == round(y) & 0xF).all()
    for y in (-6.75, -0.1, 0.3, 6.5):
        _, level = numerics.rounded_down(jnp.float32(y), random, upper)
        assert set(np.asarray(level)) == {np.floor(y), np.floor(y) + 1}
        assert abs(np.asarray(level, np.float64).mean() - y) <= 2.0**-17


@pytest.mark.parametrize("upper", [True, False])
def test_e2m1_keeps_its_levels_and_goes_up_as_often_as_the_fraction_of_a_step_says(upper):
    random = jnp.arange(1 << 16, dtype=jnp.uint32) * np.uint32(0x10001)
    levels = E2M1.tolist()

    def rounded(y):
        code, level = numerics.encode(jnp.float32(y), FP4, random, upper)
        nibble = np.asarray(code) >> numerics.code_place(FP4, stochastic=True) & 0xF
        decoded = np.copysign(np.take(levels, nibble & 7), np.where(nibble & 8, -1.0, 1.0))
        np.testing.assert_array_equal(np.asarray(level), decoded)
        np.testing.assert_array_equal(np.signbit(level), np.signbit(decoded))
        return decoded

    for sign in (1.0, -1.0):
        for size in [*levels, 1.5 * (1 + 2.0**-20), 6 * (1 + 2.0**-20)]:
            assert (rounded(sign * size) == sign * min(levels, key=lambda level: abs(level - size))).all()
        for size in (0.1, 0.7, 1.1, 1.99, 2.3, 3.5, 4.1, 5.9):
            below = max(level for level in levels if level <= size)
            above = min(level for level in levels if level > size)
            got = rounded(sign * size)
            assert set(got) == {sign * below, sign * above}
            assert abs(got.mean() - sign * size) <= 2.0**-16


@by_format
def test_a_block_with_nan_or_inf_dequantises_to_nan_and_its_neighbours_do_not(fmt):
    def everything(x):
        q = pk.quantize_slices(x, dim=0, num_slices=2, fmt=fmt)
        fused = pk.dequantize_sum_quantize(q, fmt=fmt)
        return pk.dequantize(q), pk.dequantize_sum(q), pk.dequantize(fused)

    everything = quick(everything)
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((2, 2, fmt.block_size), np.float32)
        x[0, 1, 3] = bad
        each, total, fused = (np.asarray(a).reshape(-1, fmt.block_size) for a in everything(x))
        assert np.isnan(each[1]).all()
        assert np.isfinite(each[[0, 2, 3]]).all()
        for result in (total, fused):
            assert np.isnan(result[1]).all()
            assert np.isfinite(result[0]).all()


@by_format
def test_zeros_subnormals_and_the_largest_numbers_stay_finite(fmt):
    dtypes = ("float32", "bfloat16", "float16")
    values = [
        [0.0, -0.0, float(i.smallest_subnormal), float(i.tiny), float(i.max), float(i.min)]
        for i in map(jnp.finfo, dtypes)
    ]
    xs = [
        jnp.asarray(np.repeat(np.array(row)[:, None], fmt.block_size, axis=1), dtype)
        for row, dtype in zip(values, dtypes, strict=True)
    ]
    backs = quick(lambda xs: [pk.dequantize(pk.quantize_slices(x, dim=0, num_slices=6, fmt=fmt)) for x in xs])
    for row, result in zip(values, backs(xs), strict=True):
        for value, back in zip(row, np.asarray(result, np.float64).reshape(6, -1), strict=True):
            if fmt.rotate and abs(value) * np.sqrt(fmt.rotate) > np.finfo(np.float32).max:
                # The first coordinate of a constant group is sqrt(width) times its value: out of range, so not finite.
                assert np.isnan(back).all()
                continue
            assert np.isfinite(back).all()
            if abs(value) < 1e-30:
                # Below the floor of the scale, 2**-100: the error is at most half of it.
                assert np.abs(back - np.float64(value)).max() <= 2.0**-101 * np.sqrt(fmt.rotate or 1)
            elif fmt.rotate is None:
                # Half a step of the coarsest scale: rounded up by at most 2**-7 (bfloat16) and 2**-3 (e4m3).
                np.testing.assert_allclose(back, value, rtol=(1 + 2.0**-2) / (2 * fmt.qmax) + 2.0**-7)


@by_plain_format
def test_what_is_below_half_of_the_smallest_scale_is_zero(fmt):
    x = jnp.full((1024,), 2.0**-104)
    assert not np.asarray(quick(lambda x: pk.dequantize(pk.quantize(x, fmt=fmt)))(x)).any()


@by_format
def test_the_padded_tail_is_zero_and_stays_zero(fmt, rng):
    size = fmt.block_size // 2 + 1
    x = jnp.asarray(rng.standard_normal(size), jnp.float32)

    def padded_and_whole(x):
        q = pk.quantize(x, fmt=fmt)
        blocks = reference.dequantize_blocks(q.qvalue, q.scale, q.tile_scale, fmt)
        padded = jnp.zeros(fmt.padded_size(size)).at[:size].set(x)
        return q.qvalue, pk.quantize(padded, fmt=fmt).qvalue, blocks

    qvalue, whole, blocks = quick(padded_and_whole)(x)
    if fmt.rotate is None:
        assert (np.asarray(blocks).ravel()[size:] == 0).all()
    np.testing.assert_array_equal(np.asarray(whole), np.asarray(qvalue))


@pytest.mark.parametrize(("width", "block"), [(32, 32), (32, 128), (64, 64), (64, 256)])
def test_the_rotation_is_orthonormal_and_its_own_inverse(width, block, rng):
    x = rng.standard_normal((3, block)).astype(np.float32)
    rotate = quick(lambda x: reference.rotate(x, width))
    turned, matrix = np.asarray(rotate(x)), np.asarray(rotate(np.eye(block, dtype=np.float32)), np.float64)
    # Six butterfly stages and a product, 2**-24 each, on sums of up to 64 terms.
    np.testing.assert_allclose(matrix @ matrix, np.eye(block), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(rotate(turned)), x, atol=1e-5)
    assert (np.abs(matrix[matrix != 0]) > 0.99 * width**-0.5).all()
    assert ((matrix != 0).sum(-1) == width).all()


@pytest.mark.parametrize("width", [32, 64])
def test_a_rotation_tames_an_outlier(width, rng):
    x = rng.standard_normal(4096).astype(np.float32)
    x[::256] *= 100
    back = quick(
        lambda x: [pk.dequantize(pk.quantize(x, pk.QuantFormat(4, 256, rotate=rotate))) for rotate in (None, width)]
    )
    plain, rotated = (np.linalg.norm(np.asarray(each) - x) for each in back(x))
    assert rotated < plain


def test_e4m3_codes_round_up_and_decode_exactly():
    codes = jnp.arange(128, dtype=jnp.int32)
    values = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(scale_rounding.e4m3_value(codes)), values)
    between = jnp.asarray(np.linspace(2.0**-9, 448, 5000, dtype=np.float32))
    code = scale_rounding.e4m3_code(between, scale_rounding.tile_inverse(jnp.float32(1.0)), numerics.abs_bits(between))
    want = round_up(np.asarray(between, np.float64) * (1 - 2.0**-22), ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(scale_rounding.e4m3_value(code)), want)
    # Some units in the last place around every value.
    near = (values[1:126].view(np.int32)[:, None] + np.arange(-12, 13, dtype=np.int32)).view(np.float32).ravel()
    near = near[near >= 2.0**-9]
    code = scale_rounding.e4m3_code(jnp.asarray(near), jnp.float32(1.0), numerics.abs_bits(jnp.asarray(near)))
    np.testing.assert_array_equal(np.asarray(scale_rounding.e4m3_value(code)), round_up(near, ml_dtypes.float8_e4m3fn))


@pytest.mark.parametrize("levels", ["integer", "e2m1"])
def test_scales_are_hardly_too_small_so_that_stochastic_rounding_shrinks_nothing(levels):
    fmt = pk.QuantFormat(4, 16, E4M3, levels)
    # Tile scales of every mantissa; blocks of every code and a few units in the last place around it.
    tile = np.arange(128, 256, dtype=np.float32)[:, None, None]
    code = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)[None, :, None]
    exact = (tile * code * np.float32(fmt.qmax)).astype(np.float32)
    magnitude = exact.view(np.int32) + np.arange(-14, 15, dtype=np.int32)
    needed = scale_rounding.needed_scale(jnp.asarray(magnitude), fmt.qmax)
    inverse = scale_rounding.tile_inverse(numerics.reciprocal(jnp.asarray(tile)))
    scale = jnp.asarray(tile) * scale_rounding.e4m3_value(scale_rounding.e4m3_code(needed, inverse, magnitude))
    fits = needed * inverse <= 448
    one_over = numerics.reciprocal(scale)
    kept = scale_rounding.inverse_scale(one_over, scale, jnp.asarray(magnitude), fmt, stochastic=True)
    assert bool(jnp.all((kept == one_over) | ~fits))
    assert int(fits.sum()) > 400000


def test_both_ways_to_decode_e2m1_are_the_table():
    table = np.concatenate([E2M1, -E2M1])
    code = np.arange(256, dtype=np.int32)
    for high in (False, True):
        nibble = code >> 4 if high else code & 15
        plain, factor = numerics.scaled_level(jnp.asarray(code), FP4, high)
        np.testing.assert_array_equal(np.asarray(plain) * np.float32(factor), table[nibble])
        # NumPy keeps subnormal numbers, as GPUs do; XLA on a CPU does not.
        value = np.asarray(e2m1.bits_of_level(jnp.asarray(code), 4 if high else 0)).view(np.float32)
        np.testing.assert_array_equal(value * np.float32(2.0**126), table[nibble])


def test_e2m1_is_rounded_once_to_the_nearest_level():
    middle = (E2M1[:-1] + E2M1[1:]) / 2
    near = np.concatenate([E2M1[1:], middle]).view(np.int32)[:, None] + np.arange(-3, 4, dtype=np.int32)
    size = np.concatenate([near.view(np.float32).ravel(), np.linspace(0, 6.9, 5000, dtype=np.float32)])
    above = np.clip(np.searchsorted(E2M1, size), 1, 7)
    low, high = E2M1[above - 1].astype(np.float64), E2M1[above].astype(np.float64)
    even = np.where((above - 1) % 2 == 0, low, high)
    want = np.where(size - low < high - size, low, np.where(size - low > high - size, high, even))
    for sign in (1, -1):
        code, level = numerics.encode(jnp.asarray(sign * size), FP4)
        np.testing.assert_array_equal(np.asarray(level), sign * want)
        np.testing.assert_array_equal(np.asarray(e2m1.level(code, 0, subnormals=False)), sign * want)


def test_both_ways_to_round_to_e2m1_start_from_the_same_bits(rng):
    y = (rng.uniform(-1, 1, 20000) * 2.0 ** rng.integers(-30, 3, 20000)).astype(np.float32)
    edges = [0, -0.0, 1, 1 - 2.0**-24, 2.0**-24, 3 * 2.0**-24, 6.05]
    y = np.concatenate([y, edges]).astype(np.float32)
    with np.errstate(under="ignore"):
        wanted = (np.abs(y) * np.float32(2.0**-126)).view(np.int32)
    np.testing.assert_array_equal(np.asarray(e2m1.bits_of_size(jnp.asarray(y), subnormals=False)), wanted)
