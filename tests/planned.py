"""A small workload for plans: few operations, so that it compiles fast."""

import jax
import jax.numpy as jnp
import optax

import zerojax


def stack_workload(layers=4, width=512):
    """Two matrices a layer, scanned and recomputed: few operations, so that it compiles fast."""

    def loss(params, x):
        def layer(h, p):
            return h + jnp.tanh(h @ p["up"]) @ p["down"], None

        h, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    params = {
        "up": jax.ShapeDtypeStruct((layers, width, 4 * width), jnp.bfloat16),
        "down": jax.ShapeDtypeStruct((layers, 4 * width, width), jnp.bfloat16),
    }
    return loss, params, jax.ShapeDtypeStruct((1, 256, width), jnp.bfloat16), optax.adamw(1e-3)


def plan_stack(*, layers=4, width=512, **options):
    return zerojax.plan(*stack_workload(layers, width), **{"examples_per_device": 1, **options})
