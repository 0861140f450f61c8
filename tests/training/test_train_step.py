"""Losses, aux, weights, microbatches, evaluation, explicit axes: what a step gives beside the update."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from tolerances import FLOAT32

import zerojax


@functools.cache
def parameters():
    return models.dense_init(jax.random.key(1))


@functools.cache
def batch():
    return models.dense_batches(1, 48)[0]


@functools.cache
def oracle():
    return jax.jit(jax.value_and_grad(models.dense_loss))(parameters(), batch())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_microbatches_equal_one_large_batch(stage):
    layout = models.make_layout(parameters(), "3x2" if stage == 3 else "2x4", stage)
    grad_fn = zerojax.value_and_grad(models.dense_loss, layout, microbatches=2)
    loss, grads = jax.jit(grad_fn)(layout.shard(parameters()), batch())
    want_loss, want = oracle()
    np.testing.assert_allclose(loss, want_loss, rtol=FLOAT32)
    assert models.largest_error(layout.unshard(grads), want) < FLOAT32


@pytest.mark.parametrize(("stage", "microbatches"), [(0, 1), (1, 2), (2, 1), (3, 1), (3, 3)])
def test_unequal_weights_give_the_exact_quotient(stage, microbatches):
    """The mean over tokens is not the mean of the devices' means where their counts differ."""
    weights = jnp.asarray(np.random.default_rng(2).integers(0, 2, 48) * np.arange(48), jnp.float32)
    weights = weights.at[:8].set(0)  # the first device, or its first microbatch, has nothing to say
    inputs = {**batch(), "weight": weights}

    def errors(p, b):
        y = jnp.tanh(b["x"] @ p["first"]) * models.ramp(24) @ p["last"]
        return jnp.mean((y - b["y"]) ** 2, -1)

    def weighted(p, b):
        return jnp.sum(errors(p, b) * b["weight"]), jnp.sum(b["weight"])

    def quotient(p):
        total, weight = weighted(p, inputs)
        return total / weight

    want_loss, want = jax.value_and_grad(quotient)(parameters())
    layout = models.make_layout(parameters(), "2x4", stage)
    grad_fn = jax.jit(zerojax.value_and_grad(weighted, layout, weighted=True, microbatches=microbatches))
    if 48 % (8 * microbatches):
        pytest.skip("the batch does not divide")
    loss, grads = grad_fn(layout.shard(parameters()), inputs)
    np.testing.assert_allclose(loss, want_loss, rtol=FLOAT32)
    assert models.largest_error(layout.unshard(grads), want) < FLOAT32


@pytest.mark.parametrize(("stage", "microbatches"), [(1, 1), (3, 1), (3, 2)])
def test_python_numbers_in_what_the_loss_returns(stage, microbatches):
    layout = models.make_layout({"w": jnp.ones((8,))}, "2x4", stage)

    def weighted(p, x):
        return (jnp.sum(x @ p["w"]), len(x)), {"half": 0.5}

    grad_fn = zerojax.value_and_grad(weighted, layout, weighted=True, has_aux=True, microbatches=microbatches)
    (loss, aux), grads = grad_fn(layout.shard({"w": jnp.ones((8,))}), jnp.ones((16, 8)))
    assert (float(loss), float(aux["half"])) == (8, 0.5)
    np.testing.assert_allclose(layout.unshard(grads)["w"], 1)
    value, _ = zerojax.value_and_grad(lambda p, x: 3.0, layout)(layout.shard({"w": jnp.ones((8,))}), jnp.ones((16, 8)))
    assert float(value) == 3


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_weighted_loss_in_double_precision_stays_in_it(microbatches):
    with jax.enable_x64(True):
        params, inputs = {"w": jnp.linspace(0.1, 1, 6)}, jnp.linspace(-1, 1, 96).reshape(16, 6)

        def weighted(p, x):
            return jnp.sum(jnp.tanh(x @ p["w"]) ** 2), jnp.sum(jnp.arange(len(x)) * 0 + 3)  # integers, as token counts

        want, wanted = jax.value_and_grad(lambda p: weighted(p, inputs)[0] / weighted(p, inputs)[1])(params)
        layout = models.make_layout(params, "2x4", 3)
        grad_fn = zerojax.value_and_grad(weighted, layout, weighted=True, microbatches=microbatches)
        loss, grads = grad_fn(layout.shard(params), inputs)
        assert loss.dtype == jnp.float64
        np.testing.assert_allclose(loss, want, rtol=1e-13)  # sums of 16 float64, with 2^-52 for each
        assert models.largest_error(layout.unshard(grads), wanted) < 1e-13


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_aux_comes_back_along_the_batch_or_averaged(stage, microbatches):
    def loss_fn(p, b):
        each = jnp.mean((b["x"] @ p["first"]) ** 2, -1)
        aux = {"each": each, "rows": b["x"], "mean": jnp.mean(each), "class": jnp.argmax(b["x"], -1)}
        return models.dense_loss(p, b), aux

    (want_loss, want), want_grads = jax.value_and_grad(loss_fn, has_aux=True)(parameters(), batch())
    layout = models.make_layout(parameters(), "2x4", stage)
    grad_fn = jax.jit(zerojax.value_and_grad(loss_fn, layout, has_aux=True, microbatches=microbatches))
    (loss, aux), grads = grad_fn(layout.shard(parameters()), batch())
    np.testing.assert_allclose(loss, want_loss, rtol=FLOAT32)
    assert models.largest_error(layout.unshard(grads), want_grads) < FLOAT32
    assert models.largest_error(aux, want) < FLOAT32
    assert aux["each"].addressable_shards[0].data.shape == (6,)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_forward_only_gives_each_example_its_output(stage):
    layout = models.make_layout(parameters(), "1x7" if stage == 3 else "2x4", stage)
    inputs = models.dense_batches(1, 7 * 8)[0]

    def forward(p, b, scale):
        y = jnp.tanh(b["x"] @ p["first"]) * models.ramp(24) @ p["last"] * scale
        return {"y": y, "loss": jnp.mean((y - b["y"]) ** 2), "top": jnp.argmax(y, -1)}

    out = jax.jit(zerojax.apply(forward, layout))(layout.shard(parameters()), inputs, jnp.float32(2))
    want = forward(parameters(), inputs, 2)
    np.testing.assert_array_equal(out["top"], want["top"])
    assert models.largest_error(out, want) < FLOAT32
    assert out["y"].addressable_shards[0].data.shape == (56 // layout.num_shards, 5)
    assert out["loss"].sharding.is_fully_replicated


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_nan_on_one_device_is_seen_by_all(stage):
    layout = models.make_layout(parameters(), "1x7" if stage == 3 else "2x4", stage)
    inputs = models.dense_batches(1, 56)[0]
    inputs["x"] = inputs["x"].at[50, 3].set(jnp.nan)
    tx = zerojax.zero(optax.sgd(0.1), layout)
    state, metrics = zerojax.make_train_step(models.dense_loss, tx, layout)(
        zerojax.TrainState.create(layout.shard(parameters()), tx), inputs
    )
    for name in ("loss", "grad_norm"):
        assert all(np.isnan(v) for v in models.values_on_devices(metrics[name]))
    for x in jax.tree.leaves(layout.unshard(state.params)):
        assert np.isnan(np.asarray(x)).any()


def test_padding_stays_zero():
    params = {"odd": jnp.ones((33, 17))}
    layout = models.make_layout(params, "2x4", 3)
    tx = zerojax.zero(optax.adamw(0.1, weight_decay=0.1), layout)
    step = zerojax.make_train_step(lambda p, x: jnp.mean((x @ p["odd"] - 1) ** 2), tx, layout)
    state = zerojax.TrainState.create(layout.shard(params), tx)
    for _ in range(2):
        state, _ = step(state, jax.random.normal(jax.random.key(0), (16, 33)))
    for x in (state.params["odd"], *[s for s in jax.tree.leaves(state.opt_state) if s.ndim]):
        assert x.shape == (40, 17)
        assert not np.asarray(x)[33:].any()


@pytest.mark.parametrize(("stage", "mesh"), [(0, "2x4"), (1, "2x4"), (2, "1x7"), (3, "1x7"), (3, "2x4"), (3, "data")])
def test_a_mesh_with_explicit_axes_gives_the_same(stage, mesh):
    layout = models.make_layout(parameters(), mesh, stage, axis_types=AxisType.Explicit)
    inputs = models.dense_batches(2, 56)
    tx = zerojax.zero(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), layout)
    step = zerojax.make_train_step(models.dense_loss, tx, layout)
    state = zerojax.TrainState.create(layout.shard(parameters()), tx)
    for one in inputs:
        state, metrics = step(state, one)
    plain = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    want, _, losses, norms = models.train_plain(models.dense_loss, plain, parameters(), inputs)
    assert models.largest_error(layout.unshard(state.params), want) < FLOAT32
    np.testing.assert_allclose([metrics["loss"], metrics["grad_norm"]], [losses[-1], norms[-1]], rtol=FLOAT32)
    assert step._cache_size() == 1


def test_donated_buffers_are_reused_and_kept_ones_stay():
    layout = models.make_layout(parameters(), "2x4", 3)
    tx = zerojax.zero(optax.adam(1e-2), layout)
    state = zerojax.TrainState.create(layout.shard(parameters()), tx)
    kept = zerojax.make_train_step(models.dense_loss, tx, layout, donate=False)
    kept(state, batch())
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    after, metrics = zerojax.make_train_step(models.dense_loss, tx, layout)(state, batch())
    assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state)))
    assert int(after.step) == 1
    assert metrics["loss"].sharding.is_fully_replicated


def test_an_empty_optimizer_and_a_model_without_large_leaves():
    params = {"a": jnp.ones(()), "b": jnp.ones((3,))}
    layout = models.make_layout(params, "2x4", 3, min_shard_size=100)
    tx = zerojax.zero(optax.identity(), layout)
    step = zerojax.make_train_step(lambda p, x: jnp.mean(x * p["a"]) + p["b"].sum(), tx, layout)
    state, metrics = step(zerojax.TrainState.create(layout.shard(params), tx), jnp.ones((8,)))
    assert float(metrics["loss"]) == 4
    np.testing.assert_allclose(state.params["b"], 2.0)  # identity: the gradient itself is added


def test_a_model_without_parameters():
    layout = models.make_layout({}, "2x4", 3)
    tx = zerojax.zero(optax.adam(1e-2), layout)
    step = zerojax.make_train_step(lambda p, x: jnp.mean(x), tx, layout)
    state, metrics = step(zerojax.TrainState.create(layout.shard({}), tx), jnp.ones((8,)))
    assert (int(state.step), float(metrics["loss"]), float(metrics["grad_norm"])) == (1, 1, 0)


def test_a_narrow_loss_has_the_gradient_of_its_mean():
    """1/7 is no bfloat16: rounding the factor of the mean would scale every gradient by up to 0.4 %."""
    params = {"w": jnp.ones((7, 16), jnp.bfloat16)}
    layout = models.make_layout(params, "1x7", 3)
    grads = zerojax.value_and_grad(lambda p, x: jnp.sum(p["w"] * x[0]), layout)(
        layout.shard(params), jnp.ones((7, 1), jnp.bfloat16)
    )[1]
    # All seven devices have the gradient 1, and so does their mean.
    np.testing.assert_array_equal(np.asarray(layout.unshard(grads)["w"], np.float32), 1)


def test_a_batch_of_more_examples_than_int32_counts_can_be_planned():
    params = {"w": jnp.ones((8, 8))}
    layout = zerojax.partition(params, zerojax.make_mesh(), zerojax.ZeroConfig(stage=3))
    tx = zerojax.zero(optax.sgd(0.1), layout)
    step = zerojax.make_train_step(lambda p, x: jnp.mean(x @ p["w"]), tx, layout)
    state = zerojax.TrainState.create(layout.shard(params), tx)
    _, metrics = jax.eval_shape(step, state, jax.ShapeDtypeStruct((2**32, 8), jnp.float32))
    assert metrics["loss"].shape == metrics["examples"].shape == ()
