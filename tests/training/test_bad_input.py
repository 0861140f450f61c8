"""What is refused, before any compute, with the key path, the shape, the axis and the next move in the message."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax

PARAMS = {"block": {"w": jnp.ones((9, 24)), "b": jnp.ones((24,))}}
BATCH = {"x": jnp.ones((16, 9))}


def loss_fn(params, batch):
    return jnp.mean(batch["x"] @ params["block"]["w"] + params["block"]["b"])


@pytest.fixture(scope="module")
def layout():
    return models.make_layout(PARAMS, "2x4", 3)


@pytest.fixture(scope="module")
def stored(layout):
    return layout.shard(PARAMS)


def never_run(*_):
    raise AssertionError("the loss was traced although the input is refused")


def refused(message: str):
    return pytest.raises(ValueError, match=message)


@pytest.mark.parametrize("run", [zerojax.value_and_grad, zerojax.apply])
def test_a_batch_that_the_data_axes_do_not_divide(run, layout, stored):
    message = (
        r"batch\['x'\] has shape \(12, 9\): its leading dim 12 must be a positive multiple of the 8 devices of the "
        r"data axes node=2 x local=4; pad or drop examples to 8"
    )
    with refused(message):
        run(never_run, layout)(stored, {"x": jnp.ones((12, 9))})
    with refused(message):  # shapes are enough
        jax.eval_shape(run(never_run, layout), stored, {"x": jax.ShapeDtypeStruct((12, 9), jnp.float32)})


def test_an_empty_batch_and_a_batch_that_is_no_array(layout, stored):
    with refused(r"batch\['x'\] has shape \(0, 9\)"):
        zerojax.value_and_grad(never_run, layout)(stored, {"x": jnp.ones((0, 9))})
    with refused(r"batch\['name'\] is a str, not an array; bind it with functools.partial"):
        zerojax.value_and_grad(never_run, layout)(stored, {"name": "train"})
    with refused(r"argument \[0\]\['mode'\] after the batch is a str"):
        zerojax.value_and_grad(never_run, layout)(stored, BATCH, {"mode": "train"})


def test_a_batch_that_does_not_divide_into_microbatches(layout, stored):
    tx = zerojax.zero(optax.sgd(0.1), layout)
    step = zerojax.make_train_step(loss_fn, tx, layout, microbatches=3)
    with refused(r"batch\['x'\] has shape \(16, 9\): .* node=2 x local=4 x 3 microbatches; pad or drop examples to 24"):
        step(zerojax.TrainState.create(stored, tx), BATCH)


def test_parameters_of_another_shape(layout):
    other = {"block": {"w": jnp.ones((9, 32)), "b": jnp.ones((24,))}}
    message = r"params\['block'\]\['w'\] has shape \(9, 32\), but .* has \(9, 24\) on mesh {'node': 2, 'local': 4}"
    tx = zerojax.zero(optax.adam(1e-3), layout)
    calls = [
        lambda: layout.shard(other),
        lambda: layout.init(lambda: other),
        lambda: tx.init(other),
        lambda: zerojax.value_and_grad(never_run, layout)(other, BATCH),
        lambda: zerojax.apply(never_run, layout)(other, BATCH),
    ]
    for call in calls:
        with refused(message):
            call()


def test_parameters_of_another_dtype_or_structure(layout):
    with refused(r"params\['block'\]\['w'\] has dtype bfloat16, but the layout has float32"):
        layout.shard({"block": {"w": jnp.ones((9, 24), jnp.bfloat16), "b": jnp.ones((24,))}})
    with refused(r"missing \[\"\['block'\]\['b'\]\"\], unexpected \[\"\['block'\]\['c'\]\"\]"):
        layout.shard({"block": {"w": jnp.ones((9, 24)), "c": jnp.ones((24,))}})


def test_whole_parameters_where_padded_ones_are_stored():
    params = {"odd": jnp.ones((7, 5))}
    layout = models.make_layout(params, "2x4", 3)
    with refused(r"params\['odd'\] has shape \(7, 5\), but the stored form \(layout.shard or layout.init gives it\)"):
        zerojax.value_and_grad(never_run, layout)(params, BATCH)


def test_gradients_of_another_shape(layout, stored):
    tx = zerojax.zero(optax.adam(1e-3), layout)
    grads = {"block": {"w": jnp.ones((24, 9)), "b": jnp.ones((24,))}}
    with refused(r"grads\['block'\]\['w'\] has shape \(24, 9\)"):
        tx.update(grads, tx.init(stored), stored)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda p, b: b["x"] @ p["block"]["w"], r"loss_fn returns must be a scalar, but it is \(2, 24\)"),
        (lambda p, b: (jnp.ones(()), 3), "pass has_aux=True"),
        (lambda p, b: jnp.ones((), jnp.int32), "must be a float, but it has dtype int32"),
        (lambda p, b: {"loss": jnp.ones(())}, "must be a scalar"),
    ],
)
def test_a_loss_that_is_not_a_scalar(loss, message, layout, stored):
    with refused(message):
        zerojax.value_and_grad(loss, layout)(stored, BATCH)


def test_a_loss_without_the_promised_aux_or_weight(layout, stored):
    with refused(r"has_aux=True\): loss_fn must return \(loss, aux\)"):
        zerojax.value_and_grad(loss_fn, layout, has_aux=True)(stored, BATCH)
    with refused(r"weighted=True\): loss_fn must return \(sum, weight\)"):
        zerojax.value_and_grad(loss_fn, layout, weighted=True)(stored, BATCH)


def test_a_mesh_without_the_configured_axes():
    mesh = jax.make_mesh((8,), ("data",))
    with refused(r"\['node', 'local'\] are required .* the mesh has {'data': 8}; .*ZeroConfig\(axes=\(...,\)\)"):
        zerojax.partition(PARAMS, mesh, zerojax.ZeroConfig())


def test_integer_parameters_asked_to_be_trained():
    params = {"table": {"ids": jnp.ones((4, 8), jnp.int32)}}
    with refused(r"params\['table'\]\['ids'\] has dtype int32 and shape \(4, 8\): .* trainable="):
        models.make_layout(params, "2x4", 3)
    assert not models.make_layout(params, "2x4", 3, trainable=False).placements["table"]["ids"].trainable


def test_parameters_that_are_no_arrays_or_are_keys():
    with refused(r"params\['act'\] is a str, not an array; .*nnx.split"):
        models.make_layout({"act": "gelu"}, "2x4", 3)
    with refused(r"params\['key'\] holds PRNG keys"):
        models.make_layout({"key": jax.random.key(0)}, "2x4", 3, trainable=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, r"ZeroConfig\(stage=4\): stage must be 0, 1, 2 or 3"),
        ({"stage": "3"}, "stage must be 0, 1, 2 or 3"),
        ({"stage": True}, "stage must be 0, 1, 2 or 3"),
        ({"axes": ()}, "one or two different mesh axis names"),
        ({"axes": ("a", "a")}, "one or two different mesh axis names"),
        ({"axes": ("a", "b", "c")}, "one or two different mesh axis names"),
        ({"min_shard_size": -1}, "min_shard_size is a number of elements"),
        ({"master_dtype": "int8"}, "a float dtype of at least 2 bytes is required"),
        ({"grad_dtype": "half a float"}, "not a dtype"),
    ],
)
def test_a_configuration_out_of_range(options, message):
    with refused(message):
        zerojax.ZeroConfig(**options)


def test_a_layout_of_another_mesh(layout):
    other = models.make_layout(PARAMS, "4x2", 3)
    elsewhere = other.shard(PARAMS)
    message = (
        r"params\['block'\]\['b'\] lives on mesh {'node': 4, 'local': 2} of 8 devices, but the layout is for mesh "
        r"{'node': 2, 'local': 4} of 8; unshard with the old layout and shard with the new one"
    )
    with refused(message):
        zerojax.value_and_grad(never_run, layout)(elsewhere, BATCH)
    with refused(message):
        zerojax.zero(optax.adam(1e-3), layout).init(elsewhere)
    with refused(message):
        layout.unshard(elsewhere)


@pytest.mark.parametrize("change", ["mesh", "stage", "min_shard_size", "model"])
def test_an_optimizer_state_from_another_layout(change, layout, stored):
    others = {
        "mesh": lambda: models.make_layout(PARAMS, "4x2", 3),
        "stage": lambda: models.make_layout(PARAMS, "2x4", 1),
        "min_shard_size": lambda: models.make_layout(PARAMS, "2x4", 3, min_shard_size=100),
        "model": lambda: models.make_layout({"block": {"w": jnp.ones((9, 32)), "b": jnp.ones((24,))}}, "2x4", 3),
    }
    other = others[change]()
    state = zerojax.zero(optax.sgd(0.1), other).init(other.param_shapes())
    tx = zerojax.zero(optax.sgd(0.1), layout)
    message = "the optimizer state belongs to another layout than {'node': 2, 'local': 4}, stage 3"
    with refused(message):
        tx.update(PARAMS, state, stored)
    with refused(message):  # under jit too, where the arrays themselves tell nothing
        jax.eval_shape(tx.update, layout.param_shapes(), state, layout.param_shapes())


def test_a_state_of_another_optimizer_or_of_none(layout, stored):
    tx = zerojax.zero(optax.adam(1e-3), layout)
    with refused("got a state of type tuple, not the ZeroState"):
        tx.update(PARAMS, optax.adam(1e-3).init(PARAMS), stored)
    with refused("the optimizer state is of another optimizer"):
        tx.update(PARAMS, zerojax.zero(optax.sgd(0.1), layout).init(stored), stored)


def test_master_weights_without_parameters():
    params = {"w": jnp.ones((16, 8), jnp.bfloat16)}
    layout = models.make_layout(params, "2x4", 1)
    tx = zerojax.zero(optax.sgd(0.1), layout)
    with refused(r"needs params \(third argument\) when there are master weights"):
        tx.update(params, tx.init(layout.shard(params)))


def test_a_spec_that_cannot_be():
    mesh = zerojax.make_mesh(2, 4, model=2)
    config = zerojax.ZeroConfig(min_shard_size=0)
    with refused(r"params\['w'\] \(9, 24\): spec .* names axis 'local'; only the mesh's other axes \('model',\)"):
        zerojax.partition({"w": jnp.ones((9, 24))}, mesh, config, specs={"w": P("local")})
    with refused(r"params\['w'\] \(9, 24\): spec .* needs dim 0 of 9 to divide by \('model',\) of size 2"):
        zerojax.partition({"w": jnp.ones((9, 24))}, mesh, config, specs={"w": P("model")})
    explicit = zerojax.make_mesh(2, 4, model=2, axis_types=jax.sharding.AxisType.Explicit)
    kinds = (jax.sharding.AxisType.Auto,) * 2 + (jax.sharding.AxisType.Explicit,)
    mixed = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    with refused(r"mesh axes \['model'\] are Explicit, but not all data axes \('node', 'local'\) are"):
        zerojax.partition({"w": jnp.ones((9, 24))}, mixed, config)
    with refused(r"params\['w'\] \(9, 24\): spec .* splits it over \['model'\], which are explicit axes of the mesh"):
        zerojax.partition({"w": jnp.ones((9, 24))}, explicit, config, specs={"w": P(None, "model")})
    with refused(r"partition\(specs=...\) must be a pytree prefix of params"):
        zerojax.partition({"w": jnp.ones((9, 24))}, mesh, config, specs={"v": P("model")})


def test_an_output_that_cannot_be_averaged(layout, stored):
    with refused(r"output\['count'\] has shape \(\) and dtype int32: .* averaged .*, which needs a float"):
        zerojax.apply(lambda p, b: {"count": jnp.sum(b["x"] > 0)}, layout)(stored, BATCH)


@pytest.mark.parametrize("options", [{"microbatches": 0}, {"microbatches": 2.0}])
def test_a_number_of_microbatches_that_is_none(options, layout):
    with refused(r"microbatches=.*: a positive number is required"):
        zerojax.make_train_step(loss_fn, zerojax.zero(optax.sgd(0.1), layout), layout, **options)


def test_the_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        zerojax.ZeroConfig().stage = 2  # type: ignore[misc]


def test_whole_host_arrays_are_taken_as_parameters(layout):
    host = jax.tree.map(np.asarray, PARAMS)
    assert models.largest_error(layout.unshard(layout.shard(host)), PARAMS) == 0


def test_the_forward_function_differentiated_with_respect_to_the_parameters(layout, stored):
    loss = zerojax.apply(loss_fn, layout)
    with refused("forward only and cannot be differentiated with respect to the parameters: use zerojax.value_and_gr"):
        jax.grad(loss)(stored, BATCH)
    of_batch = jax.grad(lambda batch: loss(stored, batch))(BATCH)
    assert models.largest_error(of_batch, jax.grad(lambda batch: loss_fn(PARAMS, batch))(BATCH)) < 1e-6


def test_a_state_that_cannot_hold_the_mark_of_a_stopped_training(layout, stored):
    tx = zerojax.zero(optax.sgd(0.1), layout)
    step = zerojax.make_train_step(never_run, tx, layout, on_nonfinite="raise")
    state = zerojax.TrainState.create(stored, tx)._replace(nonfinite=None)
    with refused(r"TrainState.nonfinite that training has stopped, which is None in this state"):
        step(state, BATCH)


def test_arguments_that_changed_places_and_names_that_are_nearly_right():
    params = {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32)}
    mesh, config = zerojax.make_mesh(), zerojax.ZeroConfig(stage=3)
    with pytest.raises(TypeError, match="config must be a ZeroConfig, got Mesh"):
        zerojax.partition(params, config, mesh)
    with pytest.raises(TypeError, match=r"layout must come from zerojax\.partition"):
        zerojax.zero(zerojax.partition(params, mesh, config), optax.adam(1e-3))
    with pytest.raises(TypeError, match="did you mean devices_per_node"):
        zerojax.make_mesh(devices_pr_node=4)
    assert zerojax.make_mesh(model=2, node_parts=2).shape["node_parts"] == 2


def test_a_choice_of_trainable_leaves_that_finds_none_is_noticed():
    params = {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32)}
    with pytest.warns(zerojax.ZeroNotice, match=r"no leaf is trained.*\['w'\]"):
        zerojax.partition(params, zerojax.make_mesh(), trainable=lambda path, leaf: "lorra" in path)


def test_an_optimizer_that_zero_has_not_wrapped_or_not_last(layout, stored):
    for tx in (optax.adam(1e-3), optax.chain(optax.clip(1.0), zerojax.zero(optax.adam(1e-3), layout))):
        with refused(r"make_train_step\(.*\): the optimizer must be made by zerojax\.zero\(tx, layout\)"):
            zerojax.make_train_step(never_run, tx, layout)
        with refused(r"TrainState\.create\(params, tx\): .* outermost: zero\(optax\.chain"):
            zerojax.TrainState.create(stored, tx)
    masked = optax.masked(zerojax.zero(optax.adam(1e-3), layout), {"block": {"w": True, "b": False}})
    with refused(r"inside another transformation .* outermost: zero\(optax\.masked\(tx, mask\), layout\)"):
        masked.init(stored)


def test_numpy_parameters_that_were_not_sharded(layout):
    tx = zerojax.zero(optax.adam(1e-3), layout)
    whole = jax.tree.map(np.asarray, PARAMS)
    with refused(r"params\['block'\]\['b'\] is a ndarray, not in stored form: pass layout\.shard\(params\)"):
        zerojax.TrainState.create(whole, tx)
    odd = models.make_layout({"w": jnp.ones((13, 7))}, "2x4", 3)
    with refused(r"params\['w'\] has shape \(13, 7\), but the stored form"):
        zerojax.TrainState.create({"w": np.ones((13, 7), np.float32)}, zerojax.zero(optax.adam(1e-3), odd))
