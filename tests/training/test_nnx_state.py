"""One recipe for Flax NNX models with batch statistics, dropout and random state of their own, at every stage."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax

FLOAT32 = 1e-5  # as in test_oracle
KEY = jax.random.key(0)
BATCH = jax.random.normal(jax.random.key(1), (32, 12))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.norm = nnx.Linear(12, 13, rngs=rngs), nnx.BatchNorm(13, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.dense(x)))


def split(key):
    """Parameters, batch statistics, and all else (random state), which is a constant of the loss."""
    return nnx.split(Model(nnx.Rngs(key)), nnx.Param, nnx.BatchStat, ...)


GRAPH, _, _, OTHERS = split(KEY)


def pure_loss(params, batch, stats, key):
    model = nnx.merge(GRAPH, params, stats, OTHERS, copy=True)
    nnx.reseed(model, default=key)
    return jnp.mean((model(batch) - 1.0) ** 2), nnx.state(model, nnx.BatchStat)


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.aot) for stage in (1, 2)), 3])
def test_an_nnx_model_with_state_of_every_sort_trains_at_every_stage(stage):
    layout = models.make_layout(jax.eval_shape(lambda key: split(key)[1], KEY), "2x4", stage)
    tx = zerojax.zero(optax.sgd(0.1), layout)
    step = zerojax.make_train_step(pure_loss, tx, layout, mutable=True)
    state = zerojax.TrainState.create(layout.init(lambda key: split(key)[1], KEY), tx, model_state=split(KEY)[2])
    _, params, stats, _ = split(KEY)

    def mean_loss(params, stats, key):
        """The oracle: the mean over eight devices, each with its examples and its key."""
        out = [pure_loss(params, x, stats, jax.random.fold_in(key, i)) for i, x in enumerate(jnp.split(BATCH, 8))]
        return sum(loss for loss, _ in out) / 8, jax.tree.map(lambda *s: sum(s) / 8, *(s for _, s in out))

    for seed in (3, 4):
        state, metrics = step(state, BATCH, jax.random.key(seed))
        (loss, stats), grads = jax.value_and_grad(mean_loss, has_aux=True)(params, stats, jax.random.key(seed))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=FLOAT32)
    assert models.largest_error(state.model_state, stats) < FLOAT32
    # The bias before a normalisation has no gradient but rounding: an absolute bound, of 0.1 times float32's.
    for a, b in zip(jax.tree.leaves(layout.unshard(state.params)), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, rtol=FLOAT32, atol=1e-6)
