"""Functions with derivatives of their own that close over values of the program, as Python functions do."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from jax import lax
from tolerances import FLOAT32

import zerojax


def product(x):
    """x @ w by a rule that closes over x, in its forward and its backward part."""

    @jax.custom_vjp
    def of_weight(w):
        return x @ w

    of_weight.defvjp(lambda w: (x @ w, None), lambda _, g: (x.T @ g * 1.5,))
    return of_weight


def once(params, x):
    return jnp.mean((product(x)(params["w"]) - 1.0) ** 2)


def by_jvp(params, x):
    @jax.custom_jvp
    def f(w):
        return x @ w

    f.defjvp(lambda primals, tangents: (x @ primals[0], 2.0 * (x @ tangents[0])))
    return jnp.mean((f(params["w"]) - 1.0) ** 2)


def with_more(params, x, scale):
    @jax.custom_vjp
    def f(w):
        return (x * scale) @ w

    f.defvjp(lambda w: ((x * scale) @ w, None), lambda _, g: ((x * scale).T @ g,))
    return lax.cond(scale > 0, jnp.mean, jnp.sum, f(params["w"]) ** 2)


PARAMS = {"w": jnp.linspace(-1, 1, 96).reshape(8, 12)}
X = jax.random.normal(jax.random.key(0), (16, 8))


def mean_of_devices(loss):
    """The global loss: the mean over the devices of the loss of each one's examples."""
    return lambda params, x, *rest: sum(loss(params, part, *rest) for part in x.reshape(8, 2, 8)) / 8


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("loss", "rest"), [(once, ()), (by_jvp, ()), (with_more, (jnp.float32(2),))])
def test_rules_that_close_over_the_batch_have_the_gradient_of_plain_jax(loss, rest, stage):
    want, grads = jax.value_and_grad(mean_of_devices(loss))(PARAMS, X, *rest)
    layout = models.make_layout(PARAMS, "2x4", stage)
    got, ours = jax.jit(zerojax.value_and_grad(loss, layout))(layout.shard(PARAMS), X, *rest)
    np.testing.assert_allclose(got, want, rtol=FLOAT32)
    assert models.largest_error(layout.unshard(ours), grads) < FLOAT32
    outputs = jax.jit(zerojax.apply(loss, layout))(layout.shard(PARAMS), X, *rest)
    np.testing.assert_allclose(outputs, want, rtol=FLOAT32)


def test_rules_that_close_over_a_microbatch_have_the_gradient_of_plain_jax():
    layout = models.make_layout(PARAMS, "2x4", 3, secondary=True)
    tx = zerojax.zero(optax.sgd(1.0), layout)
    state = zerojax.TrainState.create(layout.shard(PARAMS), tx)
    state, metrics = zerojax.make_train_step(once, tx, layout, microbatches=2)(state, X)

    def of_examples(params):
        return sum(once(params, row[None]) for row in X) / len(X)

    want, grads = jax.value_and_grad(of_examples)(PARAMS)
    np.testing.assert_allclose(metrics["loss"], want, rtol=FLOAT32)
    new = jax.tree.map(jnp.subtract, PARAMS, grads)
    assert models.largest_error(layout.unshard(state.params), new) < FLOAT32
