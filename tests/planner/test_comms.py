"""Predicted traffic: the papers' volumes at any mesh, and what the use of a leaf in the loss changes."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import zerojax
from zerojax import ZeroConfig
from zerojax.gather.uses import LeafUse, leaf_uses
from zerojax.hlo.collective import node_share
from zerojax.planner.models import GPT_SHAPES, gpt
from zerojax.planner.traffic import paper_volume, predict_traffic, secondary_bytes

pytestmark = pytest.mark.filterwarnings("ignore::zerojax.ZeroNotice")
BF16 = jnp.dtype(jnp.bfloat16)


def layout_of(params, nodes, local, **config):
    mesh = AbstractMesh((nodes, local), ("node", "local"))
    return zerojax.partition(params, mesh, ZeroConfig(**config))


def total(moves, field="received_bytes", **conditions):
    chosen = [m for m in moves if all(getattr(m, key) == value for key, value in conditions.items())]
    return sum(getattr(m, field) for m in chosen)


@pytest.fixture(scope="module")
def model():
    workload = gpt(GPT_SHAPES["18b"])
    jaxpr = jax.make_jaxpr(workload.loss_fn)(workload.params, workload.batch)
    return workload.params, leaf_uses(jaxpr, len(jax.tree.leaves(workload.params)))


def model_bytes(params):
    return sum(2 * math.prod(x.shape) for x in jax.tree.leaves(params))


TECHNIQUES = {
    "stage 3": (dict(stage=3), 3.0),
    "quantised weights": (dict(stage=3, quantize_weights="int8"), 2.0),
    "secondary": (dict(stage=3, secondary=True), 2.0),
    "quantised gradients": (dict(stage=3, quantize_gradients=("int8", "int4")), 2.25),
    "all": (dict(stage=3, quantize_weights="int8", secondary=True, quantize_gradients=("int8", "int4")), 0.75),
}


@pytest.mark.parametrize(("deltas", "limit"), [("int4", 0.53), ("int2", 0.43)])
def test_changes_of_weights_and_their_gradients_enter_a_node_in_4_or_2_bits(deltas, limit, model):
    params, uses = model
    layout = layout_of(params, 48, 8, weight_deltas=deltas, quantize_gradients=("int8", "int4"))
    moves = predict_traffic(layout, uses)
    assert total(moves, "node_bytes") < limit * model_bytes(params)
    assert total(moves, "node_bytes", phase="backward", kind="all-gather") == 0
    # Inside the node the replica is gathered in bfloat16, as an unquantised secondary partition is.
    plain = layout_of(params, 48, 8, secondary=True, quantize_gradients=("int8", "int4"))
    inside = [total(m, axes=("local",)) for m in (moves, predict_traffic(plain, uses))]
    assert inside[0] == pytest.approx(inside[1], rel=1e-6)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_volumes_into_a_node_are_those_of_the_zero_plus_plus_paper(name, model):
    fields, paper = TECHNIQUES[name]
    params, uses = model
    layout = layout_of(params, 48, 8, **fields)
    assert paper_volume(layout.config, two_level=True) == paper
    entering = total(predict_traffic(layout, uses), "node_bytes") / model_bytes(params)
    # A node already holds 1/48 of everything. Scales add 1/128 to int8 weights (2 bytes a block of 256) and 6.7 % to
    # the int4 hop (a byte a block of 32, 2 bytes a tile of 1024); norms and biases (0.01 %) stay replicated.
    assert 47 / 48 * paper * 0.999 <= entering <= 47 / 48 * paper * 1.03
    assert entering <= 1.05 * paper


def test_a_position_table_that_is_only_added_is_not_gathered_again(model):
    params, uses = model
    moves = predict_traffic(layout_of(params, 2, 4), uses)
    assert total(moves, path="['positions']", phase="forward", kind="all-gather") > 0
    assert total(moves, path="['positions']", phase="backward", kind="all-gather") == 0
    assert total(moves, path="['embed']", phase="backward", kind="all-gather") > 0


@pytest.mark.parametrize("mesh", [(1, 1), (1, 3), (6, 1), (1, 7), (2, 4), (3, 2), (48, 8)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_volumes_into_a_device_are_those_of_the_zero_paper(stage, mesh):
    n = mesh[0] * mesh[1]
    # Divides by every mesh of the table: nothing is padded.
    params = {"w": jax.ShapeDtypeStruct((384 * 42, 64), BF16)}
    moves = predict_traffic(layout_of(params, *mesh, stage=stage))
    paper = paper_volume(ZeroConfig(stage=stage), two_level=False)
    # Each device holds its own share of each all-gather and reduce-scatter.
    assert total(moves) == pytest.approx(paper * model_bytes(params) * (n - 1) / n, abs=4)
    nodes = mesh[0]
    assert total(moves, "node_bytes") == pytest.approx(paper * model_bytes(params) * (nodes - 1) / nodes, abs=4)
    gathered = {"forward": 1, "backward": 1} if stage == 3 else {"update": 1} if stage else {}
    if n > 1:
        for phase in ("forward", "backward", "update"):
            found = total(moves, phase=phase, kind="all-gather")
            assert found == pytest.approx(gathered.get(phase, 0) * model_bytes(params) * (n - 1) / n, abs=4)


def test_a_flat_axis_counts_what_crosses_between_machines():
    mesh = AbstractMesh((32,), ("data",))
    params = {"w": jax.ShapeDtypeStruct((1024, 64), BF16)}
    layout = zerojax.partition(params, mesh, ZeroConfig(axes="data"))
    assert total(predict_traffic(layout, num_nodes=1), "node_bytes") == 0
    # Three times M, of which a machine with 8 of the 32 devices already holds a quarter.
    assert total(predict_traffic(layout, num_nodes=4), "node_bytes") == pytest.approx(3 * model_bytes(params) * 3 / 4)


def test_the_dtype_of_the_computation_is_the_dtype_on_the_wire():
    params = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    layout = layout_of(params, 2, 4)
    loss = lambda p, x: jnp.sum(x @ p["w"].astype(jnp.bfloat16))  # noqa: E731
    uses = leaf_uses(jax.make_jaxpr(loss)(params, jax.ShapeDtypeStruct((2, 512), BF16)), 1)
    narrow, wide = predict_traffic(layout, uses), predict_traffic(layout)
    assert {m.dtype for m in narrow} == {"bfloat16"}
    assert 2 * total(narrow) == total(wide)
    reduced = layout_of(params, 2, 4, grad_dtype="float32")
    assert total(predict_traffic(reduced, uses), kind="reduce-scatter") == total(wide, kind="reduce-scatter")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_microbatches_repeat_gathers_and_sharded_reductions_only(stage):
    params = {"w": jax.ShapeDtypeStruct((512, 512), BF16)}
    layout = layout_of(params, 2, 4, stage=stage)
    once, four = predict_traffic(layout), predict_traffic(layout, microbatches=4)
    for phase in ("forward", "backward"):
        assert total(four, phase=phase) == 4 * total(once, phase=phase)
    assert total(four, phase="update") == total(once, phase="update")
    assert bool(total(once, phase="backward")) == (stage >= 2)


def test_a_secondary_partition_is_made_once_for_all_microbatches():
    params = {"w": jax.ShapeDtypeStruct((512, 512), BF16)}
    layout = layout_of(params, 2, 4, secondary=True)
    once, four = predict_traffic(layout), predict_traffic(layout, microbatches=4)
    between, inside = ({"kind": "all-gather", "axes": (axis,)} for axis in ("node", "local"))
    assert total(four, **between) == total(once, **between) == model_bytes(params) // 8
    assert total(four, **inside) == 4 * total(once, **inside)


@pytest.mark.parametrize("mesh", [(2, 4), (3, 2), (7, 1), (1, 6)])
@pytest.mark.parametrize("quantized", [None, "int8"])
def test_the_secondary_partition_is_the_model_divided_by_the_devices_of_a_node(mesh, quantized):
    nodes, local = mesh
    params = {"w": jax.ShapeDtypeStruct((384 * 7, 512), BF16)}
    layout = layout_of(params, nodes, local, secondary=True, quantize_weights=quantized)
    exists = nodes > 1 and local > 1
    # With int8 half of it and 2 bytes of scale for each block of 256.
    share = (1 + 2 / 256) / 2 if quantized else 1
    assert secondary_bytes(layout) == pytest.approx(exists * share * model_bytes(params) / local, rel=1e-6)


def test_what_is_frozen_is_gathered_and_not_reduced_and_what_is_small_is_summed_whole():
    params = {"w": jax.ShapeDtypeStruct((512, 512), BF16), "b": jax.ShapeDtypeStruct((512,), BF16)}
    mesh = AbstractMesh((2, 4), ("node", "local"))
    layout = zerojax.partition(params, mesh, ZeroConfig(), trainable={"w": False, "b": True})
    moves = predict_traffic(layout)
    assert {m.kind for m in moves if m.path == "['w']"} == {"all-gather"}
    (summed,) = [m for m in moves if m.path == "['b']"]
    assert (summed.kind, summed.axes) == ("all-reduce", ("node", "local"))
    assert summed.received_bytes == 2 * 1024 * 7 // 8


def test_a_leaf_split_over_another_axis_moves_its_own_part():
    mesh = AbstractMesh((2, 2, 2), ("node", "local", "model"), axis_types=(AxisType.Auto,) * 3)
    params = {"w": jax.ShapeDtypeStruct((512, 512), BF16)}
    whole = zerojax.partition(params, mesh, ZeroConfig())
    split = zerojax.partition(params, mesh, ZeroConfig(), specs={"w": PartitionSpec(None, "model")})
    assert 2 * total(predict_traffic(split)) == total(predict_traffic(whole))


def test_stacks_that_are_scanned_are_quantised_by_layer_and_small_ones_not_at_all():
    stack, scales = jax.ShapeDtypeStruct((6, 256, 512), BF16), jax.ShapeDtypeStruct((6, 4096), BF16)
    layout = layout_of({"a": stack, "b": scales}, 2, 4, quantize_weights="int8")
    uses = [(LeafUse(BF16, 6),), (LeafUse(BF16, 6),)]
    moves = predict_traffic(layout, uses)
    assert {m.dtype for m in moves if m.path == "['a']" and m.kind == "all-gather"} == {"int8"}
    assert {m.dtype for m in moves if m.path == "['b']"} == {"bfloat16"}
    assert {m.executions for m in moves if m.path == "['a']"} == {6}
    assert {m.in_loop for m in moves if m.path == "['b']"} == {False}


def test_every_device_of_a_node_brings_its_own_bytes_in():
    mesh = (("node", 3), ("local", 4))
    assert node_share("all-gather", ("node",), mesh, 3) == 4
    assert node_share("reduce-scatter", ("local",), mesh, 3) == 0
    # Flat: 11/12 of the array into a device, 8/12 of it into a node.
    assert node_share("all-gather", ("node", "local"), mesh, 3) == pytest.approx(8 / 11)
    assert node_share("all-reduce", ("node", "local"), mesh, 3) == pytest.approx((2 * 2 / 3) / (2 * 11 / 12))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda w, x: jnp.sum(x @ w), LeafUse(jnp.dtype("float32"), 1, True)),
        (lambda w, x: jnp.sum(x + w), LeafUse(jnp.dtype("float32"), 1, False)),
        (lambda w, x: jnp.sum(w[jnp.arange(3)]), LeafUse(jnp.dtype("float32"), 1, False)),
        (lambda w, x: jnp.sum(jax.lax.scan(lambda h, v: (h * v, 0), x, w)[0]), LeafUse(jnp.dtype("float32"), 8, True)),
        (lambda w, x: jnp.sum(jax.checkpoint(lambda v: x + v)(w)), LeafUse(jnp.dtype("float32"), 1, True)),
        (lambda w, x: jnp.sum(x @ w.T.astype(jnp.float16)), LeafUse(jnp.dtype("float16"), 1, True)),
    ],
)  # fmt: skip
def test_uses_are_found_through_casts_views_loops_and_calls(loss, expected):
    x = jnp.ones((8, 8))
    ((use,),) = leaf_uses(jax.make_jaxpr(loss)(x, x if "scan" not in loss.__code__.co_names else x[0]), 1)
    assert use == expected
