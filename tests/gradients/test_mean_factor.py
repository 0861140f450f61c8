"""The factor of the mean: total weights below one, and what a narrow loss sums on the wire."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

import zerojax


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_total_weight_below_one_divides_as_any_other(microbatches, rng):
    params = {"w": jnp.asarray(rng.normal(size=(8, 3)), jnp.float32)}
    batch = {
        "x": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32),
        "weight": jnp.asarray(rng.uniform(1e-4, 1e-2, size=16), jnp.float32),
    }

    def loss_fn(p, b):
        errors = jnp.sum(jnp.tanh(b["x"] @ p["w"]) * models.ramp(3), -1)
        return jnp.sum(b["weight"] * errors), jnp.sum(b["weight"])

    def plain(p):
        total, weight = loss_fn(p, batch)
        return total / weight

    assert loss_fn(params, batch)[1] < 0.2
    layout = models.make_layout(params, "2x4", 3)
    grad_fn = zerojax.value_and_grad(loss_fn, layout, weighted=True, microbatches=microbatches)
    loss, grads = jax.jit(grad_fn)(layout.shard(params), batch)
    want, wanted = jax.value_and_grad(plain)(params)
    np.testing.assert_allclose(loss, want, rtol=1e-5)  # float32 sums of 16 terms in another order
    assert models.largest_error(layout.unshard(grads), wanted) < 1e-5


def test_the_gradient_of_a_float16_loss_does_not_overflow_in_the_sum_over_devices():
    """Three devices' gradients of 50,000 have a mean that float16 holds; with half of each their sum would not."""
    params = {"w": jnp.full((6,), 1e-4, jnp.float16)}
    batch = jnp.full((3, 6), 5e4, jnp.float16)
    layout = models.make_layout(params, "1x3", 3)
    grad_fn = zerojax.value_and_grad(lambda p, x: jnp.sum(p["w"] * x[0]), layout)
    _, grads = jax.jit(grad_fn)(layout.shard(params), batch)
    assert grads["w"].dtype == jnp.float16
    np.testing.assert_allclose(layout.unshard(grads)["w"], batch[0], rtol=2**-10)  # one rounding of float16


def test_a_contrastive_loss_that_gathers_its_negatives_is_that_of_all_examples(rng):
    """As the README says it: without the gather a device's examples are contrasted with each other alone."""
    params = {"w": jnp.asarray(rng.normal(size=(8, 6)), jnp.float32)}
    batch = {n: jnp.asarray(rng.normal(size=(16, 8)), jnp.float32) for n in ("a", "b")}

    def loss_fn(p, batch, axes=None):
        a, b = (jnp.tanh(batch[n] @ p["w"]) * models.ramp(6) for n in ("a", "b"))
        first, others = 0, b
        if axes:
            others = jax.lax.all_gather(b, axes, tiled=True)
            first = jax.lax.axis_index(axes) * len(b)
        return -jnp.mean(jax.nn.log_softmax(a @ others.T)[jnp.arange(len(a)), first + jnp.arange(len(a))])

    layout = models.make_layout(params, "2x4", 3)
    grad_fn = zerojax.value_and_grad(lambda p, b: loss_fn(p, b, ("node", "local")), layout)
    loss, grads = jax.jit(grad_fn)(layout.shard(params), batch)
    want, wanted = jax.value_and_grad(loss_fn)(params, batch)
    np.testing.assert_allclose(loss, want, rtol=1e-5)  # float32 sums of 16 terms in another order
    assert models.largest_error(layout.unshard(grads), wanted) < 1e-5
