"""Every stage on every kind of mesh trains as plain optax does on one device, values and not only losses."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from tolerances import BFLOAT16, FLOAT32

import zerojax

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
}

# Pairwise: every stage meets every mesh or optimizer, not every triple.
FLOAT32_CASES = [
    (0, "1x3", "adamw"), (0, "2x4", "clipped"),
    (1, "1x1", "momentum"), (1, "4x2", "adamw"), (1, "1x7", "clipped"),
    (2, "2x4", "adamw"), (2, "3x2", "clipped"), (2, "data", "momentum"),
    (3, "1x1", "adamw"), (3, "2x4", "adafactor"), (3, "4x2", "clipped"), (3, "3x2", "adamw"), (3, "1x7", "momentum"),
]  # fmt: skip


@functools.cache
def parameters():
    return models.transformer_init(jax.random.key(0))


@functools.cache
def oracle(optimizer: str):
    return models.train_plain(
        models.transformer_loss, OPTIMIZERS[optimizer](), parameters(), models.token_batches(5)
    )


def train(layout, loss_fn, tx, params, batches):
    tx = zerojax.zero(tx, layout)
    step = zerojax.make_train_step(loss_fn, tx, layout)
    state, metrics = zerojax.TrainState.create(layout.shard(params), tx), []
    for batch in batches:
        state, values = step(state, batch)
        metrics.append(values)
    assert step._cache_size() == 1, "one compilation over all steps"
    return state, metrics


@pytest.mark.parametrize(("stage", "mesh", "optimizer"), FLOAT32_CASES)
def test_five_steps_equal_plain_optax_in_float32(stage, mesh, optimizer):
    want, _, losses, norms = oracle(optimizer)
    layout = models.make_layout(parameters(), mesh, stage)
    loss_fn = functools.partial(models.transformer_loss, remat=mesh in ("4x2", "3x2"))
    state, metrics = train(layout, loss_fn, OPTIMIZERS[optimizer](), parameters(), models.token_batches(5))
    assert models.largest_error(layout.unshard(state.params), want) < FLOAT32
    for values, loss, norm in zip(metrics, losses, norms, strict=True):
        for name, wanted in (("loss", loss), ("grad_norm", norm)):
            held = models.values_on_devices(values[name])
            assert len(held) == layout.mesh.size
            assert all(h == held[0] for h in held), f"{name} differs between devices: {held}"
            np.testing.assert_allclose(held[0], wanted, rtol=FLOAT32)


def displacement_error(got, want, start) -> float:
    """Distance of two trained parameter trees, relative to how far training moved them, in the 2-norm of each leaf."""
    errors = [0.0]
    for a, b, c in zip(jax.tree.leaves(got), jax.tree.leaves(want), jax.tree.leaves(start), strict=True):
        a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
        if b.size:
            errors.append(float(np.linalg.norm(a - b) / np.linalg.norm(b - c)))
    return max(errors)


# In bfloat16 the sum over the batch rounds, more so on one device, which sums all of it, than where each device sums
# its part and few partial sums are added. The oracle is therefore float32 compute: sharded training must come as near
# to it as bfloat16 on one device does, up to the rounding of the reduction itself.


@pytest.mark.parametrize(("stage", "mesh"), [(0, "1x3"), (2, "1x7"), (3, "2x4")])
def test_bfloat16_compute_is_as_near_to_float32_as_one_device_is(stage, mesh):
    loss_fn = functools.partial(models.transformer_loss, compute=jnp.bfloat16)
    batches, params = models.token_batches(5), parameters()
    truth, *_ = oracle("momentum")
    one_device, _, losses = narrow_on_one_device()
    layout = models.make_layout(params, mesh, stage)
    state, metrics = train(layout, loss_fn, OPTIMIZERS["momentum"](), params, batches)
    unavoidable = displacement_error(one_device, truth, params)
    assert displacement_error(layout.unshard(state.params), truth, params) < unavoidable + BFLOAT16
    np.testing.assert_allclose([float(m["loss"]) for m in metrics], losses, rtol=BFLOAT16)


@functools.cache
def narrow_on_one_device():
    loss_fn = functools.partial(models.transformer_loss, compute=jnp.bfloat16)
    params, state, losses, _ = models.train_plain(
        loss_fn, OPTIMIZERS["momentum"](), parameters(), models.token_batches(5)
    )
    return params, state, losses


@functools.cache
def master_weights_oracle():
    """Mixed precision by hand: gradients of bfloat16 parameters, optax on float32 masters, masters rounded."""
    tx, masters = OPTIMIZERS["momentum"](), models.transformer_init(jax.random.key(0), jnp.bfloat16)
    masters = jax.tree.map(lambda x: x.astype(jnp.float32), masters)

    @jax.jit
    def step(masters, state, batch):
        narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), masters)
        grads = jax.grad(functools.partial(models.transformer_loss, compute=jnp.bfloat16))(narrow, batch)
        updates, state = tx.update(jax.tree.map(lambda g: g.astype(jnp.float32), grads), state, masters)
        return optax.apply_updates(masters, updates), state

    start, state = masters, tx.init(masters)
    for batch in models.token_batches(5):
        masters, state = step(masters, state, batch)
    truth, *_ = models.train_plain(models.transformer_loss, tx, start, models.token_batches(5))
    return masters, truth, start


@pytest.mark.parametrize(("stage", "mesh"), [(1, "2x4"), (2, "1x7"), (3, "3x2")])
def test_bfloat16_parameters_with_float32_masters_equal_the_paper_s_recipe(stage, mesh):
    params = models.transformer_init(jax.random.key(0), jnp.bfloat16)
    layout = models.make_layout(params, mesh, stage)
    loss_fn = functools.partial(models.transformer_loss, compute=jnp.bfloat16)
    state, _ = train(layout, loss_fn, OPTIMIZERS["momentum"](), params, models.token_batches(5))
    one_device, truth, start = master_weights_oracle()
    masters = layout.unshard(state.opt_state.master)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(masters))
    assert displacement_error(masters, truth, start) < displacement_error(one_device, truth, start) + BFLOAT16
    # The parameters are the masters, rounded: nothing accumulates in the narrow dtype.
    for param, master in zip(jax.tree.leaves(layout.unshard(state.params)), jax.tree.leaves(masters), strict=True):
        assert param.dtype == jnp.bfloat16
        rounded = np.asarray(master.astype(jnp.bfloat16), np.float32)
        np.testing.assert_array_equal(np.asarray(param, np.float32), rounded)
