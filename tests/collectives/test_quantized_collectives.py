"""Each quantised movement of a leaf inside `shard_map`: where slices land, how far values are off, what is carried.

Placement is checked exactly, with integers that the format represents exactly: blocks start at multiples of 16 elements
of a slice and hold the largest level there, so that every scale is a whole number. Device d contributes 2**d times the
same integers: the sum tells which devices took part. All devices' copies are compared, not one.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from quantization_bounds import half_step, reduction_bound

import pallas_kernels
import zerojax
from zerojax.collectives.plain import plain_collectives
from zerojax.collectives.quantized import quantized_gradients, quantized_weights
from zerojax.config import GRADIENT_FORMATS, WEIGHT_FORMATS, QuantFormat
from zerojax.layout.mesh import nontrivial_axes
from zerojax.layout.placement import place

AXES = ("node", "local")
MESHES = [(2, 4), (4, 2), (2, 3), (1, 8), (8, 1), (3, 2)]
SHAPES = [(48, 80), (7, 7), (3, 16, 24), (2048,), (2305,), (0, 4)]
LARGE = [(1024, 512), (50257, 64), (8072,), (699051,)]
# The large ones on the mesh whose size divides none of them.
CASES = [*((*mesh, SHAPES) for mesh in MESHES), (2, 3, LARGE)]
IDS = [*(f"{nodes}x{local}" for nodes, local in MESHES), "large"]
# Padded on every mesh, with a slice of more than one block of 128 on most: where formats, not places, are compared.
PADDED = (14, 100)
INT8, INT4 = QuantFormat(8, 32), QuantFormat(4, 32)


def make_mesh(nodes, local):
    return zerojax.make_mesh(nodes, local, devices=jax.devices()[: nodes * local])


def placed(shape, mesh, dtype=jnp.float32):
    return place(
        f"{shape}", shape, jnp.dtype(dtype), axes=nontrivial_axes(mesh, AXES), num_shards=mesh.size, min_shard_size=0,
        quantize_above=0,
    )  # fmt: skip


def integers(placement, largest, rng):
    """A leaf of integers in which every block of every slice holds the largest level; padding rows are zero."""
    if not placement.is_sharded:
        return rng.integers(-largest, largest + 1, placement.shape).astype(np.float32)
    slices = rng.integers(-largest, largest + 1, (placement.num_shards, math.prod(placement.shard_shape)))
    slices[:, ::16] = largest
    parts = [part.reshape(placement.shard_shape) for part in slices]
    return logical(np.concatenate(parts, axis=placement.dim), placement).astype(np.float32)


def logical(x, placement):
    return x if placement.dim is None else np.take(x, range(placement.shape[placement.dim]), axis=placement.dim)


def padded(x, placement):
    widths = [(0, placement.padding if d == placement.dim else 0) for d in range(x.ndim)]
    return np.pad(x, widths)


def over_devices(mesh, fn, in_specs, out_specs):
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    # These programs take seconds to compile and milliseconds to run.
    return jax.jit(mapped)


def gathers(mesh, placements, fmt):
    """Shards of several leaves to what every device has after a gather, and after a gather of the secondary."""
    collectives = quantized_weights(plain_collectives(secondary=True), fmt)

    def move(shards):
        direct = [collectives.gather(x, p) for x, p in zip(shards, placements, strict=True)]
        held = [collectives.secondary(x, p, 0) if p.is_sharded else x for x, p in zip(shards, placements, strict=True)]
        later = [collectives.gather_secondary(h, p) for h, p in zip(held, placements, strict=True)]
        return [[x[None] for x in xs] for xs in (direct, later)]

    return over_devices(mesh, move, ([p.data_spec for p in placements],), P(AXES))


@pytest.mark.parametrize(("nodes", "local"), [(2, 4), (3, 2), (1, 8)])
def test_a_gather_over_both_axes_at_once_gives_the_leaf_in_order(nodes, local, rng):
    mesh, collectives = make_mesh(nodes, local), plain_collectives(flat=True)
    placements = [placed(shape, mesh) for shape in ((48, 80), (7, 7))]
    leaves = [rng.normal(size=p.shape).astype(np.float32) for p in placements]

    def move(shards):
        return [collectives.gather(x, p)[None] for x, p in zip(shards, placements, strict=True)]

    gather = over_devices(mesh, move, ([p.data_spec for p in placements],), P(AXES))
    for got, want in zip(gather([padded(x, p) for x, p in zip(leaves, placements, strict=True)]), leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.broadcast_to(want, got.shape))
    sizes = {"node": nodes, "local": local}
    received = collectives.gather_bytes(placements[0], sizes)
    assert received == {placements[0].axes: (mesh.size - 1) * 4 * 48 * 80 // mesh.size}


def reductions(mesh, placements, formats, **options):
    """Stacked gradients of all devices, for several leaves, to the shards of their sums."""
    collectives = quantized_gradients(plain_collectives(), formats, AXES, **options)

    def move(grads):
        return [collectives.reduce(g[0], p) for g, p in zip(grads, placements, strict=True)]

    return over_devices(mesh, move, (P(AXES),), [p.data_spec for p in placements])


@pytest.mark.parametrize(("nodes", "local", "shapes"), CASES, ids=IDS)
def test_a_gather_gives_every_device_the_whole_leaf_in_order(nodes, local, shapes, rng):
    mesh = make_mesh(nodes, local)
    placements = [placed(shape, mesh) for shape in shapes]
    leaves = [integers(p, 127, rng) for p in placements]
    for results in gathers(mesh, placements, INT8)([padded(x, p) for x, p in zip(leaves, placements, strict=True)]):
        for got, want in zip(results, leaves, strict=True):
            assert got.shape == (mesh.size, *want.shape)
            np.testing.assert_array_equal(np.asarray(got), np.broadcast_to(want, got.shape))


@pytest.mark.parametrize(("nodes", "local", "shapes"), CASES, ids=IDS)
def test_a_reduction_sums_all_devices_and_places_every_slice(nodes, local, shapes, rng):
    mesh = make_mesh(nodes, local)
    placements = [placed(shape, mesh) for shape in shapes]
    leaves = [integers(p, 127, rng) for p in placements]
    # The scale of a block of a sum is the sum of some powers of two, at most 255: exact in bfloat16.
    factors = 2.0 ** np.arange(mesh.size)
    grads = [np.stack([f * x for f in factors]).astype(np.float32) for x in leaves]
    sums = reductions(mesh, placements, (INT8, INT8))(grads)
    for got, leaf, placement in zip(sums, leaves, placements, strict=True):
        np.testing.assert_array_equal(np.asarray(got), padded(leaf * factors.sum(), placement))


def test_four_bits_place_every_slice_too(rng):
    mesh = make_mesh(2, 4)
    placements = [placed(shape, mesh) for shape in ((48, 80), (7, 7))]
    leaves = [integers(p, 7, rng) for p in placements]
    stored = [padded(x, p) for x, p in zip(leaves, placements, strict=True)]
    for results in gathers(mesh, placements, INT4)(stored):
        for got, want in zip(results, leaves, strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.broadcast_to(want, got.shape))
    factors = 2.0 ** np.arange(mesh.size)
    sums = reductions(mesh, placements, (INT4, INT4))([np.stack([f * x for f in factors]) for x in leaves])
    for got, leaf, placement in zip(sums, leaves, placements, strict=True):
        np.testing.assert_array_equal(np.asarray(got), padded(leaf * factors.sum(), placement))


def test_a_stacked_secondary_is_that_of_each_layer(rng):
    mesh = make_mesh(2, 4)
    placement = placed((3, 24, 40), mesh)
    collectives = quantized_weights(plain_collectives(secondary=True), INT8)
    leaf = rng.normal(size=placement.shape).astype(np.float32)
    layer = placement.without_leading_dim()

    def move(shard):
        stacked = collectives.secondary(shard, placement, 1)
        apart = [collectives.secondary(shard[i], layer, 0) for i in range(3)]
        return [
            (collectives.gather_secondary(jax.tree.map(lambda a: a[i], stacked), layer)[None],  # noqa: B023
             collectives.gather_secondary(apart[i], layer)[None])
            for i in range(3)
        ]  # fmt: skip

    for one, other in over_devices(mesh, move, (placement.data_spec,), P(AXES))(leaf):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        (WEIGHT_FORMATS["int8"], jnp.bfloat16), (WEIGHT_FORMATS["int4"], jnp.float32),
        (QuantFormat(4, 16, "float8_e4m3fn", "e2m1"), jnp.bfloat16),
    ],
    ids=["int8", "int4", "e2m1"],
)  # fmt: skip
def test_gathered_weights_are_the_same_everywhere_within_half_a_step(fmt, dtype, rng):
    mesh = make_mesh(2, 3)
    placements = [placed(PADDED, mesh, dtype)]
    leaves = [jnp.asarray(rng.standard_t(4, p.shape), dtype) for p in placements]
    stored = [jnp.asarray(padded(np.asarray(x, np.float32), p), dtype) for x, p in zip(leaves, placements, strict=True)]
    direct, later = gathers(mesh, placements, fmt)(stored)
    for got, again, leaf in zip(direct, later, leaves, strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(again, np.float32))
        got, leaf = np.asarray(got, np.float32), np.asarray(leaf, np.float32)
        np.testing.assert_array_equal(got, np.broadcast_to(got[0], got.shape))
        # bfloat16 results are rounded once more, to 8 bits.
        extra = np.abs(leaf).max() * 2.0**-8 if dtype == jnp.bfloat16 else 0.0
        assert np.abs(got[0] - leaf).max() <= half_step(np.abs(leaf).max(), fmt) + extra


FORMATS = {
    "default": (GRADIENT_FORMATS["int8"], GRADIENT_FORMATS["int4"]),
    "rotated": (QuantFormat(8, 128, rotate=32), QuantFormat(4, 128, rotate=32)),
    "rotated apart": (QuantFormat(8, 128), QuantFormat(4, 64, rotate=32)),
    "e2m1": (QuantFormat(4, 32), QuantFormat(4, 16, "float8_e4m3fn", "e2m1")),
    "int8": (QuantFormat(8, 64), QuantFormat(8, 128)),
}


HOPS = [*((2, 3, name) for name in FORMATS), *((*mesh, "default") for mesh in ((2, 4), (1, 8), (8, 1)))]


@pytest.mark.parametrize(("nodes", "local", "name"), HOPS)
def test_each_hop_adds_at_most_half_a_step_per_contribution(name, nodes, local, rng):
    formats = FORMATS[name]
    mesh = make_mesh(nodes, local)
    placements = [placed(PADDED, mesh)]
    grads = [rng.standard_t(4, (mesh.size, *p.shape)).astype(np.float32) for p in placements]
    for got, grad, placement in zip(reductions(mesh, placements, formats)(grads), grads, placements, strict=True):
        error = np.abs(np.asarray(got) - padded(grad.sum(axis=0), placement)).max()
        assert 0 < error <= reduction_bound(grad, nodes, local, formats)
        np.testing.assert_array_equal(np.asarray(got), padded(logical(np.asarray(got), placement), placement))


def test_a_value_that_is_not_finite_arrives_and_stays_in_its_block(rng):
    mesh = make_mesh(2, 4)
    placement = placed((48, 80), mesh)
    reduce, gather = reductions(mesh, [placement], FORMATS["default"]), gathers(mesh, [placement], INT8)
    for value in (np.nan, -np.inf):
        grads = rng.normal(size=(mesh.size, *placement.shape)).astype(np.float32)
        grads[5, 17, 33] = value
        spoilt = ~np.isfinite(np.asarray(reduce([grads])[0]))
        assert spoilt[17, 33]
        # Its block inside the node, 128 elements, then the tile between nodes, 1024, in a slice of 480.
        assert spoilt.sum() <= 480
        leaf = grads[0].copy()
        leaf[17, 33] = value
        for results in gather([leaf]):
            spoilt = ~np.isfinite(np.asarray(results[0]))
            assert spoilt[:, 17, 33].all()
            assert (spoilt.sum(axis=(1, 2)) <= INT8.block_size).all()


def test_a_single_axis_is_one_hop_in_the_format_for_between_nodes(rng):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    placement = place("w", (48, 80), jnp.dtype("float32"), axes=("data",), num_shards=8, min_shard_size=0,
                      quantize_above=0)  # fmt: skip
    collectives = quantized_gradients(plain_collectives(), (INT8, INT4), ("data",))
    grads = rng.normal(size=(8, *placement.shape)).astype(np.float32)
    fn = over_devices(mesh, lambda g: collectives.reduce(g[0], placement), (P("data"),), placement.data_spec)
    error = np.abs(np.asarray(fn(grads)) - grads.sum(axis=0)).max()
    # As on a mesh of one device a node; eight bits would be off by a tenth of four.
    assert reduction_bound(grads, 1, 8, (INT8, INT8)) < error <= reduction_bound(grads, 8, 1, (INT8, INT4))
    # A slice of 480 elements: 15 blocks of 16 bytes and a scale.
    assert collectives.reduce_bytes(placement, {"data": 8}) == {("data",): 7 * 15 * (16 + 2)}


@pytest.mark.parametrize("formats", [(INT8, INT4), FORMATS["default"]], ids=["bfloat16 scales", "float8 scales"])
def test_stochastic_rounding_is_unbiased_where_rounding_to_nearest_is_not(formats, rng):
    mesh = make_mesh(2, 4)
    placement = placed((512, 64), mesh)
    leaf = np.full(placement.shape, 0.3, np.float32)
    leaf[:, ::16] = 1.0  # the largest value of every block
    factors = 1 + rng.uniform(0, 0.01, mesh.size)
    grads = np.stack([f * leaf for f in factors]).astype(np.float32)
    ordinary = leaf < 1
    mean_errors = {}
    for rounding in ("nearest", "stochastic"):
        (got,) = reductions(mesh, [placement], formats, rounding=rounding)([grads])
        mean_errors[rounding] = abs((np.asarray(got) - grads.sum(axis=0))[ordinary].mean())
    # A stochastic step has a standard deviation of at most half a step; elements draw independently, devices perhaps
    # not. Five standard deviations of the mean of n elements. Nearest: 0.3 lies 0.1 of a step from its level.
    step = factors.sum() / 7 * (1.0 if formats[1].scale_dtype == "bfloat16" else 1 + 2.0**-3)
    assert mean_errors["stochastic"] < 5 * step / 2 / math.sqrt(ordinary.sum())
    assert mean_errors["nearest"] > 2 * mean_errors["stochastic"]


@pytest.mark.parametrize(("nodes", "local"), [(2, 4), (3, 2)])
def test_feedback_is_what_the_sums_still_lack(nodes, local, rng):
    mesh, steps = make_mesh(nodes, local), 4
    placement = placed((48, 85), mesh)
    collectives = quantized_gradients(plain_collectives(), (INT8, INT4), AXES)
    assert placement.dim is not None
    chunk = list(placement.padded_shape)
    chunk[placement.dim] //= local
    # Integers that the hop inside the node carries exactly: all that is lost is lost between nodes.
    leaf = integers(placement, 127, rng)
    grads = np.stack([2.0**d * leaf for d in range(mesh.size)]).astype(np.float32)

    def move(grad):
        lost, total = jnp.zeros(chunk), jnp.zeros(placement.shard_shape)
        for _ in range(steps):
            shard, lost = collectives.reduce_with_feedback(grad[0], lost, placement)
            total = total + shard
        return total, lost[None]

    spec = P("node", *(None,) * placement.dim, "local")
    total, lost = over_devices(mesh, move, (P(AXES),), (placement.data_spec, spec))(grads)
    want = steps * padded(grads.sum(axis=0), placement)
    carried = np.asarray(lost).sum(axis=0)
    assert np.abs(carried).max() > 0
    # Exact but for float32 sums of a few terms.
    np.testing.assert_allclose(np.asarray(total) + carried, want, rtol=0, atol=np.abs(want).max() * 2.0**-20)
    # What is lost is never more than half a step of what was to be sent, so it does not pile up.
    largest = np.abs(grads).reshape(nodes, local, -1).sum(axis=1).max(axis=1) * (1 + 1 / 7)
    assert np.abs(np.asarray(lost)).max() <= half_step(largest.max(), INT4)


def test_rotation_leaves_padding_and_its_feedback_zero(rng):
    mesh = make_mesh(2, 3)
    placement = placed((7, 7), mesh)  # the fourth of six slices is half padding
    rotated = QuantFormat(4, 32, rotate=32)
    collectives = quantized_gradients(plain_collectives(), (rotated, rotated), AXES)
    grads = rng.normal(size=(mesh.size, 7, 7)).astype(np.float32)

    def move(grad):
        shard, lost = collectives.reduce_with_feedback(grad[0], jnp.zeros((4, 7)), placement)
        return shard, lost[None]

    assert (placement.dim, placement.padded_shape) == (0, (12, 7))
    total, lost = over_devices(mesh, move, (P(AXES),), (placement.data_spec, P("node", "local")))(grads)
    assert np.abs(np.asarray(lost)[:, :7]).max() > 0
    assert not np.asarray(total)[7:].any()
    assert not np.asarray(lost)[:, 7:].any()


def test_one_message_carries_levels_and_scales_of_each_hop():
    mesh = make_mesh(2, 4)
    placement = placed((48, 80), mesh)
    fn = reductions(mesh, [placement], FORMATS["default"])
    jaxpr = str(jax.make_jaxpr(fn.__wrapped__)([jax.ShapeDtypeStruct((8, 48, 80), jnp.float32)]))
    assert jaxpr.count("all_to_all[") == 2
    assert "psum" not in jaxpr
    assert "all_gather" not in jaxpr


@pytest.mark.parametrize("formats", ["default", "int8"])
def test_messages_follow_from_sizes_not_from_who_writes_them_and_carry_the_same_values(formats, rng, monkeypatch):
    mesh = make_mesh(2, 4)
    placement = placed((48, 80), mesh)
    pair = FORMATS.get(formats, (INT8, INT8))
    grads = [rng.normal(size=(8, 48, 80)).astype(np.float32)]
    leaves = [padded(rng.normal(size=(48, 80)).astype(np.float32), placement)]

    def moved():
        """Collectives traced, and values: of a reduction, and of a gather at once and by way of a secondary."""
        reduce, gather = reductions(mesh, [placement], pair), gathers(mesh, [placement], pair[1])
        programs = [str(jax.make_jaxpr(fn.__wrapped__)(x)) for fn, x in ((reduce, grads), (gather, leaves))]
        counts = programs[0].count("all_to_all["), programs[1].count("all_gather[")
        return counts, [np.asarray(x) for x in jax.tree.leaves((reduce(grads), gather(leaves)))]

    counts, together = moved()
    assert counts == (2, 4)
    before = pallas_kernels.prefer_kernels()
    try:
        assert moved()[0] == (2, 4)
    finally:
        pallas_kernels.prefer_kernels(before)
    monkeypatch.setattr(pallas_kernels.message, "APART_FROM", 0)
    counts, apart = moved()
    assert counts == (4, 8)
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("shape", [(2048,), (2305,)])
def test_a_leaf_of_one_dim_is_never_quantised(shape, rng):
    mesh = make_mesh(2, 4)
    placement = placed(shape, mesh)
    assert not placement.is_quantized
    leaf = rng.normal(size=shape).astype(np.float32)  # no grid that four bits could hold
    direct, later = gathers(mesh, [placement], INT4)([padded(leaf, placement)])
    for (got,) in (direct, later):
        np.testing.assert_array_equal(np.asarray(got), np.broadcast_to(leaf, got.shape))


def test_the_bytes_stated_are_those_of_the_messages():
    sizes = {"node": 2, "local": 4}
    placement = placed((48, 80), make_mesh(2, 4))
    plain = plain_collectives()
    grads = quantized_gradients(plain, (QuantFormat(8, 128), QuantFormat(4, 32)), AXES)
    # A slice of 480 elements: 4 blocks of 128 bytes and 4 scales of 2; then 15 blocks of 16 bytes and 15 scales.
    assert grads.reduce_bytes(placement, sizes) == {("local",): 2 * 3 * (512 + 8), ("node",): 1 * (240 + 30)}
    weights = quantized_weights(plain, QuantFormat(8, 32))
    # A shard of 480 elements: 15 blocks of 32 bytes and 15 scales; over "local" both nodes' parts travel.
    assert weights.gather_bytes(placement, sizes) == {("node",): 510, ("local",): 3 * 2 * 510}
    assert functools.reduce(int.__add__, plain.gather_bytes(placement, sizes).values()) == 7 * 480 * 4


