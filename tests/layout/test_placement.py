"""One leaf's placement, for any shape and any number of devices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from zerojax.layout.placement import MAX_PADDED_RATIO, pad, place, unpad

SHAPES = st.lists(st.integers(0, 400), max_size=4).map(tuple)
SHARDS = st.integers(1, 64) | st.sampled_from([384, 1000, 4096])


def placed(shape, num_shards, **options):
    return place(
        "['w']", shape, np.dtype("float32"), axes=("node", "local"), num_shards=num_shards,
        **{"min_shard_size": 0, **options},
    )  # fmt: skip


@given(SHAPES, SHARDS)
@settings(max_examples=300, deadline=None)
def test_shards_are_even_and_hold_every_element(shape, num_shards):
    p = placed(shape, num_shards)
    if not p.is_sharded:
        assert p.padding == 0
        assert p.shard_shape == p.padded_shape == shape
        assert p.reason
        return
    # The equations of `Placement`'s docstring.
    assert num_shards * p.shard_shape[p.dim] == p.padded_shape[p.dim] == shape[p.dim] + p.padding
    assert 0 <= p.padding < num_shards
    assert p.shard_bytes * num_shards * shape[p.dim] == p.full_bytes * p.padded_shape[p.dim]
    assert math.prod(p.padded_shape) == math.prod(p.shard_shape) * num_shards
    assert p.padded_shape[p.dim] <= MAX_PADDED_RATIO * shape[p.dim], "no leaf is more than doubled"
    others = [extent for dim, extent in enumerate(shape) if dim != p.dim]
    assert others == [extent for dim, extent in enumerate(p.shard_shape) if dim != p.dim]


@given(SHAPES, SHARDS)
@settings(max_examples=300, deadline=None)
def test_a_dim_that_divides_is_preferred_to_padding(shape, num_shards):
    p = placed(shape, num_shards)
    inner = shape[1:] if len(shape) >= 3 else shape
    if num_shards > 1 and math.prod(shape) and any(extent % num_shards == 0 for extent in inner):
        assert p.is_sharded
        assert p.padding == 0
        assert shape[p.dim] == max(extent for extent in inner if extent % num_shards == 0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), st.integers(2, 12))
@settings(max_examples=15, deadline=None)
def test_padding_is_zero_and_comes_off_again(shape, num_shards):
    p = placed(shape, num_shards)
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape))
    padded = pad(x, p)
    assert padded.shape == p.padded_shape
    np.testing.assert_array_equal(unpad(padded, p), x)
    assert np.count_nonzero(padded) == x.size


def test_a_stack_of_layers_is_split_along_another_dim_where_one_nearly_divides():
    assert placed((8, 64, 24), 8).dim == 1
    assert placed((384, 50, 1000), 384).dim == 0  # 1000 -> 1152 is more than an eighth of padding
    assert placed((48, 50, 1100), 384).dim == 2  # 1100 -> 1152 is less


def test_axes_of_the_users_own_are_not_split_again():
    p = placed((64, 128), 8, spec=P(None, "model"))
    assert (p.dim, p.full_spec, p.model_spec) == (0, P(("local", "node"), "model"), P(None, "model"))
    whole = placed((64, 128), 8, spec=P("expert", "model"))
    assert not whole.is_sharded
    assert "every dim is split over other mesh axes" in whole.reason


def test_reasons_tell_why_a_leaf_is_whole():
    assert placed((), 8).reason == "scalar"
    assert placed((0, 4), 8).reason == "empty"
    assert placed((8, 8), 1).reason == "one device along the data axes"
    assert "fewer than min_shard_size 100" in placed((8, 8), 8, min_shard_size=100).reason
    assert "more than double" in placed((3, 2), 8).reason


def test_slices_are_in_local_major_order():
    """Device (n, l) owns slice l * num_nodes + n, so that the gather over "node" gives one contiguous chunk."""
    mesh = jax.make_mesh((2, 4), ("node", "local"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    p = placed((16, 3), 8)
    sharding = jax.sharding.NamedSharding(mesh, p.full_spec)
    for device, index in sharding.devices_indices_map((16, 3)).items():
        (node,), (local,) = np.nonzero(mesh.devices == device)
        assert index[0] == slice((local * 2 + node) * 2, (local * 2 + node) * 2 + 2)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=4).map(tuple), st.integers(2, 16))
@settings(max_examples=100, deadline=None)
def test_one_layer_of_a_stack_is_split_as_the_stack_is(shape, num_shards):
    p = placed(shape, num_shards)
    if p.dim != 0:
        layer = p.without_leading_dim()
        assert layer.shard_shape == p.shard_shape[1:]
        assert layer.padded_shape == p.padded_shape[1:]
