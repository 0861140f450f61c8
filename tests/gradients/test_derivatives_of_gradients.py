"""A gradient is itself a function: penalties, Hessian-vector products and hypergradients are those of plain JAX.

The oracle differentiates `jax.value_and_grad` on one device. Where the whole of a derivative is not to be had, it is
refused in words and before any compute: it would silently be zero.
"""

from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest

import zerojax

QUANTIZED = {"quantize_weights": "int8", "quantize_gradients": "int8", "min_quantize_size": 0}
# Two derivatives of a float32 program: twice the sums of test_oracle.
FLOAT32 = 2e-5
# 2^-9 for each rounding to bfloat16, over three layers and two derivatives, in sums of a few terms.
BFLOAT16 = 0.05
# int8 in blocks: 1/254 of a block's largest value for the weights, again for the gradients of either derivative.
INT8 = 0.08


def parameters(width: int, dtype: Any) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "first": (jax.random.normal(keys[0], (9, width)) / 3).astype(dtype),
        "stack": (jax.random.normal(keys[1], (3, width, width)) / np.sqrt(width)).astype(dtype),
        "bias": jnp.full((width,), 0.1, dtype),
    }


def loss(p, x):
    def layer(h, w):
        return jnp.tanh(h @ w) * models.ramp(h.shape[-1], h.dtype), None

    h, _ = jax.lax.scan(layer, jnp.tanh(x @ p["first"] + p["bias"]), p["stack"])
    return jnp.mean(h**2) + jnp.mean(h[:, 0] * x[:, 1])


def size(tree):
    return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(tree))


def derivatives(fn, p, v, x, dx):
    """Of a `value_and_grad`: with respect to the parameters and to the batch, in both modes and orders."""
    return {
        "penalty": jax.grad(lambda p: size(fn(p, x)[1]))(p),
        "loss": jax.grad(lambda p: fn(p, x)[0].astype(jnp.float32))(p),
        "hessian_times_vector": jax.jvp(lambda p: fn(p, x)[1], (p,), (v,))[1],
        "reverse_over_forward": jax.grad(lambda p: size(jax.jvp(lambda p: fn(p, x)[0], (p,), (v,))[1] + 1))(p),
        "along_the_batch": jax.jvp(lambda x: fn(p, x)[1], (x,), (dx,))[1],
    }, {
        "penalty_of_the_batch": jax.grad(lambda x: size(fn(p, x)[1]))(x),
        "loss_of_the_batch": jax.grad(lambda x: fn(p, x)[0].astype(jnp.float32))(x),
    }


CASES = {
    "stage 2": (2, {}, {}, jnp.float32, FLOAT32),
    "stage 3": (3, {}, {}, jnp.float32, FLOAT32),
    "stage 3, gathers in order": (3, {"prefetch_bytes": 2000}, {}, jnp.float32, FLOAT32),
    "stage 3, bfloat16": (3, {}, {}, jnp.bfloat16, BFLOAT16),
    "stage 3, deferred": (3, {}, {"microbatches": 2, "accumulation": "deferred"}, jnp.float32, FLOAT32),
    "stage 3, quantised": (3, QUANTIZED, {}, jnp.float32, INT8),
    "stage 1, quantised": (1, {"quantize_gradients": "int8", "min_quantize_size": 0}, {}, jnp.float32, INT8),
}


SECOND_TIER = ("stage 1, quantised", "stage 3, bfloat16", "stage 3, deferred", "stage 3, quantised")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.aot if name in SECOND_TIER else []) for name in CASES]
)
def test_derivatives_of_value_and_grad_equal_those_of_plain_jax(name):
    stage, config, options, dtype, tolerance = CASES[name]
    params = parameters(10, dtype)
    v = jax.tree.map(lambda x: jax.random.normal(jax.random.key(2), x.shape).astype(dtype), params)
    x, dx = (jax.random.normal(jax.random.key(i), (8, 9)).astype(dtype) for i in (3, 4))
    layout = models.make_layout(params, "2x2", stage, **config)
    vag = zerojax.value_and_grad(loss, layout, **options)

    def plain(p, x):
        return loss(p, x), jax.grad(loss)(p, x)

    want = jax.jit(lambda: derivatives(plain, params, v, x, dx))()
    of_params, of_batch = jax.jit(lambda p, v: derivatives(vag, p, v, x, dx))(layout.shard(params), layout.shard(v))
    for key, tree in of_params.items():
        assert models.largest_error(layout.unshard(tree), want[0][key]) < tolerance, key
    assert models.largest_error(of_batch, want[1]) < tolerance


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_what_a_secondary_partition_cannot_differentiate_is_refused_before_any_compute(mode):
    params, x = parameters(8, jnp.float32), jnp.ones((8, 9))
    layout = models.make_layout(params, "2x2", 3, secondary=True)
    vag, p = zerojax.value_and_grad(loss, layout), layout.param_shapes()

    def penalty(p):
        return size(vag(p, x)[1])

    with pytest.raises(ValueError, match="secondary=False"):
        jax.eval_shape(jax.grad(penalty) if mode == "reverse" else lambda p: jax.jvp(penalty, (p,), (p,)), p)


def test_with_a_secondary_partition_the_batch_is_differentiated():
    params, x = parameters(8, jnp.float32), jax.random.normal(jax.random.key(3), (8, 9))
    layout = models.make_layout(params, "2x2", 3, secondary=True)
    vag = zerojax.value_and_grad(loss, layout)
    got = jax.jit(jax.grad(lambda x: size(vag(layout.shard(params), x)[1])))(x)
    want = jax.grad(lambda x: size(jax.grad(loss)(params, x)))(x)
    assert models.largest_error(got, want) < FLOAT32


@pytest.mark.parametrize("stage", [2, 3])
def test_a_derivative_through_a_train_step_equals_that_through_plain_optax(stage):
    """Meta-learning: how the loss after a step depends on the parameters and on the batch of the step."""
    params = parameters(8, jnp.float32)
    x, y = (jax.random.normal(jax.random.key(i), (8, 9)) for i in (3, 4))
    layout, plain = models.make_layout(params, "2x2", stage), optax.adam(0.1, eps=0.1)
    tx = zerojax.zero(plain, layout)
    step = zerojax.make_train_step(loss, tx, layout, donate=False)
    state = zerojax.TrainState.create(layout.shard(params), tx)

    def after(p, x):
        new, _ = step(state._replace(params=p), x)
        return zerojax.value_and_grad(loss, layout)(new.params, y)[0]

    def wanted(p, x):
        updates, _ = plain.update(jax.grad(loss)(p, x), plain.init(p), p)
        return loss(optax.apply_updates(p, updates), y)

    got = jax.jit(jax.grad(after, argnums=(0, 1)))(layout.shard(params), x)
    want = jax.grad(wanted, argnums=(0, 1))(params, x)
    # Adam's first step is g / (|g| + eps): eps is far above the gradients, so that its derivative is no large number.
    assert models.largest_error((layout.unshard(got[0]), got[1]), want) < 10 * FLOAT32


@pytest.mark.parametrize(("stage", "config"), [(0, {}), (1, {}), (2, {}), (3, {}), (3, {"prefetch_bytes": 2000})])
def test_apply_is_differentiated_along_the_batch_in_both_modes_and_refuses_the_parameters(stage, config):
    params, x = parameters(8, jnp.float32), jax.random.normal(jax.random.key(3), (8, 9))
    layout = models.make_layout(params, "2x2", stage, **config)
    apply, p = zerojax.apply(loss, layout), layout.shard(params)
    got = jax.jit(lambda p: (jax.jvp(lambda x: apply(p, x), (x,), (x,))[1], jax.grad(lambda x: apply(p, x))(x)))(p)
    want = jax.jvp(lambda x: loss(params, x), (x,), (x,))[1], jax.grad(lambda x: loss(params, x))(x)
    assert models.largest_error(got, want) < FLOAT32
    for derivative in (jax.grad(lambda p: apply(p, x)), lambda p: jax.jvp(lambda p: apply(p, x), (p,), (p,))):
        with pytest.raises(ValueError, match=r"zerojax\.value_and_grad"):
            jax.eval_shape(derivative, layout.param_shapes())
