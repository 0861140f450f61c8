"""The meaning of the sums, of slices in destination order, and of byte messages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_formats import E4M3, FORMATS, PLAIN, assert_same_bits, by_format, quick

import pallas_kernels as pk


@by_format
def test_dequantize_sum_adds_the_contributions_in_float32(fmt, rng):
    counts = (1, 2, 7, 16)
    x = jnp.asarray(rng.standard_normal((16, 2, 300)), jnp.float32)

    def sums(x):
        whole = pk.quantize_slices(x, dim=0, num_slices=16, fmt=fmt)
        results = []
        for count in counts:
            q = jax.tree.map(lambda a, count=count: a[:count], whole)
            results.append((pk.dequantize_sum(q), pk.dequantize_sum(q, mean=True)))
        return pk.dequantize(whole), results

    each, results = quick(sums)(x)
    each = np.asarray(each, np.float64)
    for count, (total, mean) in zip(counts, results, strict=True):
        # count additions of 2**-24 relative to the running sum; a rotation adds seven roundings.
        slack = (count + 14) * 2.0**-24 * np.abs(each[:count]).sum(0).max() * (8 if fmt.rotate else 1)
        np.testing.assert_allclose(np.asarray(total), each[:count].sum(0), atol=slack, rtol=0)
        np.testing.assert_allclose(np.asarray(mean), each[:count].mean(0), atol=slack, rtol=0)


def test_dequantize_sum_takes_any_lead_dimension_up_to_64_contributions_and_any_float_result(rng):
    x = jnp.asarray(rng.standard_normal((64, 2, 300)), jnp.float32)

    def sums(x):
        q = pk.quantize_slices(x, dim=0, num_slices=64)
        moved = jax.tree.map(lambda a: a.reshape(8, 8, *a.shape[1:]), q)
        narrow = [pk.dequantize_sum(q, dtype=dtype) for dtype in ("bfloat16", "float16")]
        return pk.dequantize(q), pk.dequantize_sum(q), pk.dequantize_sum(moved, axis=1), narrow

    each, total, inner, (bfloat16, float16) = quick(sums)(x)
    # 64 additions of 2**-24 relative to the running sum.
    slack = 64 * 2.0**-24 * np.abs(np.asarray(each)).sum(0).max()
    np.testing.assert_allclose(np.asarray(total), np.asarray(each, np.float64).sum(0), atol=slack, rtol=0)
    np.testing.assert_allclose(np.asarray(inner).sum(0), np.asarray(total), atol=slack, rtol=0)
    np.testing.assert_array_equal(np.asarray(bfloat16), np.asarray(total.astype(jnp.bfloat16)))
    np.testing.assert_array_equal(np.asarray(float16), np.asarray(total.astype(jnp.float16)))


def test_many_contributions_are_added_in_index_order_too(rng):
    x = jnp.asarray(rng.standard_normal((150, 300)), jnp.float32)
    q = pk.quantize_slices(x, dim=0, num_slices=150, fmt=FORMATS[3])
    total, each = quick(lambda q: (pk.dequantize_sum(q), pk.dequantize(q)))(q)
    in_order = np.add.accumulate(np.asarray(each), axis=0)[-1]
    np.testing.assert_array_equal(np.asarray(total), in_order)


def test_the_program_of_a_sum_does_not_grow_with_the_contributions():
    def lines(count):
        cut = functools.partial(pk.quantize_slices, dim=0, num_slices=count, fmt=FORMATS[3])
        q = jax.eval_shape(cut, jnp.ones((1536, 64)))
        return len(jax.jit(pk.dequantize_sum).lower(q).as_text().splitlines())

    assert lines(512) == lines(128)
    assert lines(48) < 5 * lines(1)  # four lines of slice and sum for each, not thirty


@pytest.mark.parametrize("source", [FORMATS[0], FORMATS[3], FORMATS[5]], ids=str)
def test_the_fused_middle_equals_sum_then_quantise(source, rng):
    x = jnp.asarray(rng.standard_normal((6, 4, 300)), jnp.float32)
    carried = jnp.asarray(rng.standard_normal((2, 1, 4, 300)) * 0.01, jnp.float32)

    def both(x, carried):
        q = pk.quantize_slices(x, dim=0, num_slices=(3, 2), fmt=source)
        total = pk.dequantize_sum(q, mean=True) + carried
        fused, apart = [], []
        for out in PLAIN[:4]:
            middle, lost = pk.dequantize_sum_quantize(q, fmt=out, mean=True, addend=carried, with_residual=True)
            fused.append((middle.qvalue, middle.scale, middle.tile_scale, lost.ravel()))
            second, lost = pk.quantize_slices(total, dim=0, num_slices=2, fmt=out, with_residual=True)
            apart.append((second.qvalue, second.scale, second.tile_scale, lost.ravel()))
        return fused, apart

    assert_same_bits(*quick(both)(x, carried))


def test_rotated_alike_on_both_hops_equals_rotating_back_and_forth(rng):
    fmt = pk.QuantFormat(8, 64, rotate=32)
    x = jnp.asarray(rng.standard_normal((4, 640)), jnp.float32)

    def both(x):
        q = pk.quantize_slices(x, dim=0, num_slices=4, fmt=fmt)
        total = pk.dequantize_sum(q)
        return pk.dequantize(pk.dequantize_sum_quantize(q, fmt)), total, pk.quantize(total, fmt).scale

    fused, total, scale = quick(both)(x)
    # Two rotations of float32 in between may move a value across a tie: one step of the largest scale.
    np.testing.assert_allclose(np.asarray(fused), np.asarray(total), atol=float(np.asarray(scale, np.float32).max()))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_slices_are_the_contiguous_ranges_in_destination_order(dim, rng):
    x = jnp.asarray(rng.standard_normal((6, 12, 18)), jnp.float32)
    counts, fmt = [1, 2, 3, 6, (3, 2), (2, 3)], pk.QuantFormat(8, 16)

    def sliced(x):
        results = []
        for num_slices in counts:
            q, lost = pk.quantize_slices(x, fmt, dim=dim, num_slices=num_slices, with_residual=True)
            pieces = jnp.split(x, int(np.prod(num_slices)), axis=dim)
            alone = jnp.stack([pk.dequantize(pk.quantize(piece, fmt)) for piece in pieces])
            results.append((pk.dequantize(q), pk.dequantize(q, merge_dim=dim), alone, lost))
        return results

    for each, whole, alone, lost in quick(sliced)(x):
        np.testing.assert_array_equal(np.asarray(each).reshape(alone.shape), np.asarray(alone))
        np.testing.assert_array_equal(np.asarray(whole), np.concatenate(np.asarray(alone), axis=dim))
        np.testing.assert_allclose(np.asarray(whole + lost), np.asarray(x), atol=1e-6)


@by_format
def test_a_message_carries_payload_and_scales_exactly(fmt, rng):
    x = jnp.asarray(rng.standard_normal((4, 700)), jnp.bfloat16).at[1, 5].set(jnp.nan)

    def there_and_back(x):
        q = pk.quantize_slices(x, dim=0, num_slices=4, fmt=fmt)
        message = pk.pack_bytes(q)
        described = pk.unpack_bytes(message, format=fmt, shape=(1, 700), dtype="bfloat16")
        return q, message, pk.unpack_bytes(message, q), described

    q, message, like, described = quick(there_and_back)(x)
    assert message.dtype == jnp.uint8
    assert message.shape == (4, fmt.message_bytes(700))
    assert_same_bits(q, like)
    assert_same_bits(q, described)


@pytest.mark.parametrize(
    ("fmt", "bits"),
    [
        (pk.QuantFormat(8, 128), 8.125),
        (pk.QuantFormat(4, 128), 4.125),
        (pk.QuantFormat(4, 32, E4M3), 4.265625),
        (pk.QuantFormat(4, 16, E4M3), 4.515625),
    ],
)
def test_wire_bits_count_payload_and_scales(fmt, bits):
    q = jax.eval_shape(lambda x: pk.quantize(x, fmt), jax.ShapeDtypeStruct((4096,), jnp.float32))
    assert q.wire_bits == q.format.bits_per_element == bits
    assert sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(q)) == q.message_bytes


def test_the_record_is_a_pytree_with_static_metadata():
    q = quick(lambda x: pk.quantize(x, pk.QuantFormat(8, 32)))(jnp.ones((2, 64)))
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), q)
    assert stacked.lead == (2,)
    assert quick(pk.dequantize)(stacked).shape == (2, 2, 64)
    traced = jax.jit(lambda q: q)(q)
    assert (traced.format, traced.shape, traced.dtype) == (q.format, q.shape, q.dtype)


@pytest.mark.parametrize("count", [2, 8, 9])
def test_the_halves_of_blocks_are_joined_once_after_the_sum(count):
    # What follows a concatenation XLA computes element by element on a CPU: joined first, a sum took 30 times as long.
    cut = functools.partial(pk.quantize_slices, fmt=FORMATS[3], dim=0, num_slices=count)
    q = jax.eval_shape(cut, jax.ShapeDtypeStruct((count, 4096), jnp.float32))
    jaxpr = jax.make_jaxpr(pk.dequantize_sum)(q)
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    joined = [i for i, name in enumerate(names) if name == "concatenate"]
    assert len(joined) == 1
    assert not {"add", "mul"} & set(names[joined[0] :])
