"""Functions that an optimizer calls (SAM's gradient, a line search's value) see parameters without padding."""

import jax
import jax.numpy as jnp
import models
import optax
import optax.contrib
import pytest
from tolerances import FLOAT32

import zerojax
from zerojax.layout.optimizer_form import in_optimizer

BATCH = models.dense_batches(1, 56)[0]


def sam():
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.adam(1e-2), adversary, sync_period=3, opaque_mode=True)


def train(tx, grad_fn, params, state, steps=2):
    @jax.jit
    def step(params, state):
        grads = grad_fn(params)
        updates, state = tx.update(grads, state, params, grad_fn=lambda p, i: grad_fn(p))
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return params


@pytest.mark.parametrize(("stage", "mesh"), [(0, "2x4"), (1, "1x7"), (2, "1x7"), (3, "1x7"), (3, "2x4")])
def test_sam_asks_value_and_grad_again_at_every_stage(stage, mesh):
    params = models.dense_init(jax.random.key(1))
    want = train(sam(), lambda p: jax.grad(models.dense_loss)(p, BATCH), params, sam().init(params))
    layout = models.make_layout(params, mesh, stage)
    tx, grad_fn = zerojax.zero(sam(), layout), zerojax.value_and_grad(models.dense_loss, layout)
    stored = layout.shard(params)
    got = train(tx, lambda p: grad_fn(p, BATCH)[1], stored, tx.init(stored))
    assert models.largest_error(layout.unshard(got), want) < FLOAT32


def test_sam_with_frozen_leaves_and_master_weights():
    params = models.dense_init(jax.random.key(1))
    params = {**params, "last": params["last"].astype(jnp.bfloat16)}
    layout = models.make_layout(params, "1x7", 3, trainable=lambda path, leaf: "first" not in path)
    trained = jax.tree.map(lambda x: x.astype(jnp.float32), {k: v for k, v in params.items() if k != "first"})

    def loss(p, batch):
        return models.dense_loss(jax.tree.map(lambda x: x.astype(jnp.float32), p), batch)

    def plain(p):
        narrow = {**p, "last": p["last"].astype(jnp.bfloat16)}
        return jax.grad(lambda p: loss({**p, "first": params["first"]}, BATCH))(narrow)

    want = train(sam(), lambda p: jax.tree.map(lambda g: g.astype(jnp.float32), plain(p)), trained, sam().init(trained))
    tx, grad_fn = zerojax.zero(sam(), layout), zerojax.value_and_grad(loss, layout)
    stored = layout.shard(params)
    got = layout.unshard(train(tx, lambda p: grad_fn(p, BATCH)[1], stored, tx.init(stored)))
    assert models.largest_error(got["first"], params["first"]) == 0
    # Gradients of "last" are rounded to bfloat16, once more where they are summed over devices.
    got = {k: jnp.asarray(got[k], jnp.float32) if k == "last" else got[k] for k in want}
    assert models.largest_error(got, want) < 2.0**-7


@pytest.mark.parametrize("how", ["apply", "plain"])
def test_a_line_search_takes_the_value_from_apply_or_from_a_plain_function(how):
    params = models.dense_init(jax.random.key(1))
    search = lambda: optax.chain(optax.sgd(4.0), optax.scale_by_backtracking_linesearch(8))  # noqa: E731

    def step(tx, params, state, value, grads, value_fn):
        return tx.update(grads, state, params, value=value, grad=grads, value_fn=value_fn)[0]

    value, grads = jax.value_and_grad(models.dense_loss)(params, BATCH)
    want = step(search(), params, search().init(params), value, grads, lambda p: models.dense_loss(p, BATCH))
    assert models.largest_error(want, jax.tree.map(lambda g: -4.0 * g, grads)) > 0.1, "the search has to shorten it"
    layout = models.make_layout(params, "1x7", 3)
    tx, forward = zerojax.zero(search(), layout), zerojax.apply(models.dense_loss, layout)
    stored = layout.shard(params)
    value, grads = jax.jit(zerojax.value_and_grad(models.dense_loss, layout))(stored, BATCH)
    value_fn = {"apply": lambda p: forward(p, BATCH), "plain": lambda p: models.dense_loss(p, BATCH)}[how]
    got = step(tx, stored, tx.init(stored), value, grads, value_fn)
    assert models.largest_error(layout.unshard(got), want) < FLOAT32


def test_outside_of_an_optimizer_logical_parameters_are_refused_as_before():
    params = models.dense_init(jax.random.key(1))
    layout = models.make_layout(params, "1x7", 3)
    with in_optimizer(layout):
        pass
    with pytest.raises(ValueError, match="stored form"):
        zerojax.value_and_grad(models.dense_loss, layout)(params, BATCH)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_without_state_on_explicit_axes(stage):
    """JAX hands explicit axes to the compiler by what is returned, and of such an optimizer no array is."""
    params, grads = {"w": jnp.ones((7,))}, {"w": jnp.arange(7.0)}
    layout = models.make_layout(params, "1x3", stage, axis_types=jax.sharding.AxisType.Explicit)
    tx, stored = zerojax.zero(optax.sgd(0.1), layout), layout.shard(params)
    updates, _ = jax.jit(tx.update)(layout.shard(grads), tx.init(stored), stored)
    got = layout.unshard(optax.apply_updates(stored, updates))
    assert models.largest_error(got, {"w": 1 - 0.1 * jnp.arange(7.0)}) < FLOAT32
