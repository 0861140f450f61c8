"""Wrong arguments are refused with the value and the choices in the message."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
import zerojax

X = jnp.ones((4, 256))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bits": 5}, ["bits=5", "bits must be 8 or 4"]),
        ({"bits": True}, ["bits must be 8 or 4"]),
        ({"block_size": 48}, ["block_size=48", "power of two from 16 to 2048"]),
        ({"block_size": 8}, ["block_size=8", "from 16 to 2048"]),
        ({"block_size": 4096}, ["block_size=4096", "from 16 to 2048"]),
        ({"block_size": 64.0}, ["block_size=64.0", "power of two"]),
        ({"scale_dtype": "float32"}, ["float32", "scale_dtype must be 'bfloat16' or 'float8_e4m3fn'"]),
        ({"scale_dtype": "float8_e4m3fn", "block_size": 2048}, ["at most 1024", "2048"]),
        ({"levels": "fp6"}, ["fp6", "levels must be 'integer', or 'e2m1' with 4 bits"]),
        ({"levels": "e2m1"}, ["e2m1", "bits=8"]),
        ({"rotate": 16}, ["rotate=16", "rotate must be None, 32 or 64"]),
        ({"rotate": 64, "block_size": 32}, ["rotate=64", "block_size=32", "divide"]),
        ({"bits": 5, "rotate": 16}, ["bits must", "rotate must"]),
    ],
)
def test_a_format_names_its_faults_all_at_once(fields, words):
    with pytest.raises(ValueError) as caught:
        pk.QuantFormat(**fields)
    for word in words:
        assert word in str(caught.value)


def test_a_format_is_the_same_record_however_its_fields_are_given():
    given = pk.QuantFormat(np.int64(8), np.int32(64), jnp.bfloat16)
    assert given == pk.QuantFormat(block_size=64)
    assert hash(given) == hash(pk.QuantFormat(block_size=64))
    assert zerojax.QuantFormat is pk.QuantFormat


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rounding": "up"}, ["rounding", "up", "stochastic"]),
        ({"rounding": "stochastic"}, ["seed"]),
        ({"seed": 1}, ["seed", "nearest"]),
        ({"rounding": "stochastic", "seed": 1.5}, ["seed", "integer", "float"]),
        ({"rounding": "stochastic", "seed": jnp.zeros(2, jnp.uint32)}, ["seed", "[2]"]),
        ({"implementation": "cuda"}, ["implementation", "cuda", "xla", "mosaic_gpu"]),
        ({"interpret": True}, ["interpret", "mosaic_gpu"]),
    ],
)
def test_quantize_names_the_value_and_the_choices(arguments, words):
    with pytest.raises(ValueError) as caught:
        pk.quantize(X, **arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_integer_input_is_refused(dtype):
    with pytest.raises(ValueError, match=f"float32.*{dtype}"):
        pk.quantize(jnp.ones(4, dtype))


@pytest.mark.parametrize(
    ("dim", "num_slices", "words"),
    [
        (2, 2, "dim must be in -2..1"),
        (1, 3, "256.*3 slices do not divide"),
        (0, 0, "positive"),
        (0, (2, -1), "positive"),
    ],
)
def test_slices_that_do_not_fit_are_refused(dim, num_slices, words):
    with pytest.raises(ValueError, match=words):
        pk.quantize_slices(X, dim=dim, num_slices=num_slices)


def test_a_scale_of_the_wrong_shape_is_refused_by_every_reader():
    q = pk.quantize_slices(X, dim=0, num_slices=4)
    wrong = dataclasses.replace(q, scale=q.scale[:, :1])
    for read in (pk.dequantize, pk.dequantize_sum, pk.dequantize_sum_quantize, pk.pack_bytes):
        with pytest.raises(ValueError, match=r"scale must be bfloat16\[4, 2\].*got bfloat16\[4, 1\]"):
            read(wrong)


def test_a_missing_or_needless_tile_scale_is_refused():
    tiled = pk.quantize(X, pk.QuantFormat(8, 32, "float8_e4m3fn"))
    with pytest.raises(ValueError, match="tile_scale is missing"):
        pk.dequantize(dataclasses.replace(tiled, tile_scale=None))
    with pytest.raises(ValueError, match="tile_scale is present"):
        pk.dequantize(dataclasses.replace(pk.quantize(X), tile_scale=tiled.tile_scale))


def test_sums_refuse_what_is_not_there():
    q = pk.quantize(X)
    with pytest.raises(ValueError, match="no lead dimension"):
        pk.dequantize_sum(q)
    stacked = jax.tree.map(lambda a: a[None], q)
    with pytest.raises(ValueError, match=r"axis must be in -1\.\.0"):
        pk.dequantize_sum(stacked, axis=1)
    with pytest.raises(ValueError, match="empty"):
        pk.dequantize_sum(jax.tree.map(lambda a: a[:0], stacked))
    with pytest.raises(ValueError, match=r"dtype must be one of.*int32"):
        pk.dequantize_sum(stacked, dtype="int32")
    with pytest.raises(ValueError, match=r"addend must have shape \(4, 256\), got \(4, 255\)"):
        pk.dequantize_sum_quantize(stacked, addend=X[:, 1:])


def test_a_message_of_the_wrong_length_is_refused():
    q = pk.quantize(X)
    message = pk.pack_bytes(q)
    with pytest.raises(ValueError, match=rf"uint8\[..., {q.message_bytes}\]"):
        pk.unpack_bytes(message[:-1], q)
    with pytest.raises(ValueError, match="either"):
        pk.unpack_bytes(message)
    with pytest.raises(ValueError, match="either"):
        pk.unpack_bytes(message, q, format=q.format, shape=q.shape)
    payload, scales = pk.pack_apart(q)
    with pytest.raises(ValueError, match=rf"uint8\[..., {scales.shape[-1]}\]"):
        pk.unpack_bytes((payload, payload), q)
