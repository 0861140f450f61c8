"""Weights in equations that do more than compute: references are written and read, the host is called.

Such an equation is given full weights, runs once, and is differentiated as plain JAX does it: the oracle is
`jax.value_and_grad` on one device of the mean over the devices' parts of the batch.
"""

from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import zerojax

MESH, DEVICES = "2x2", 4
FLOAT32 = 1e-5  # as in test_gather_on_use
stop = lax.stop_gradient
calls: list[Any] = []
PROGRAMS: dict[str, Any] = {}


def program(fn):
    PROGRAMS[fn.__name__] = fn
    return fn


def parameters():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"w": (8, 8), "v": (8, 8), "s": (3, 8, 8)}
    return {n: jax.random.normal(k, shape) / 2 for k, (n, shape) in zip(keys, shapes.items(), strict=True)}


def squares(y):
    return jnp.mean(models.ramp(8) * y**2)


@program
def a_reference_made_from_a_weight(p, x):
    ref = jax.new_ref(p["w"])
    ref[...] = jnp.tanh(ref[...])
    return squares(x @ ref[...])


@program
def a_weight_and_parts_of_weights_written(p, x):
    ref = jax.new_ref(jnp.ones((8, 8)))
    ref[...] = p["v"]
    ref[2:5] = p["w"][1:4]
    ref[0] = p["s"][1, 2]
    return squares(x @ jax.freeze(ref))


@program
def a_weight_swapped_and_one_added(p, x):
    ref = jax.new_ref(p["w"])
    old = jax.ref.swap(ref, ..., p["v"])
    jax.ref.addupdate(ref, ..., p["w"].T)
    return squares(x @ old @ ref[...])


@program
def scanned_layers_written(p, x):
    ref = jax.new_ref(jnp.zeros((8, 8)))

    def layer(h, w):
        ref[...] += w
        return jnp.tanh(h @ w), None

    return squares(lax.scan(layer, x, p["s"])[0] @ ref[...])


@program
def a_reference_of_a_weight_read_beside_scanned_layers(p, x):
    ref = jax.new_ref(p["w"])

    def layer(h, w):
        h = jnp.tanh(h @ w @ ref[...])
        ref[...] = ref[...] * 0.5
        return h, None

    return squares(lax.scan(layer, x, p["s"])[0])


@program
def a_weight_written_in_a_branch(p, x):
    ref = jax.new_ref(jnp.zeros((8, 8)))

    def write(w):
        ref[...] = w

    def write_twice(w):
        ref[...] = 2 * w

    lax.cond(x[0, 0] > 0, write, write_twice, p["w"])
    return squares(x @ ref[...])


@program
def a_weight_written_inside_a_function(p, x):
    ref = jax.new_ref(jnp.zeros((8, 8)))

    @jax.jit
    def write(ref, w):
        ref[...] = w

    write(ref, p["w"])
    return squares(x @ ref[...])


@program
def the_host_called_once_on_a_weight(p, x):
    jax.debug.callback(lambda w: calls.append(w.shape), p["w"])
    return squares(x @ p["w"])


@program
def the_host_called_once_on_each_scanned_layer(p, x):
    def layer(h, w):
        jax.debug.callback(lambda w: calls.append(w.shape), w)
        return jnp.tanh(h @ w), None

    return squares(lax.scan(layer, x, p["s"])[0])


@program
def what_the_host_gives_for_stopped_weights(p, x):
    def average(w):
        calls.append(w.shape)
        return np.float32(np.mean(w))

    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    s = io_callback(average, scalar, stop(p["w"])) + jax.pure_callback(average, scalar, stop(p["v"]))
    return squares(x @ p["w"]) * (1 + s)


@program
def the_host_behind_a_derivative_of_its_own(p, x):
    @jax.custom_vjp
    def sine(w):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(w.shape, w.dtype), w)

    sine.defvjp(lambda w: (sine(w), w), lambda w, g: (jnp.cos(w) * g,))
    return squares(x @ sine(p["w"]))


# How often the host is called: on each device, as the program says.
CALLS = {
    "the_host_called_once_on_a_weight": DEVICES,
    "the_host_called_once_on_each_scanned_layer": 3 * DEVICES,
    "what_the_host_gives_for_stopped_weights": 2 * DEVICES,
}


def wanted(fn, params, x):
    return jax.value_and_grad(lambda p: sum(fn(p, part) for part in x.reshape(DEVICES, -1, 8)) / DEVICES)(params)


IN_ORDER = {"stage": 3, "prefetch_bytes": 2000}  # as on GPUs: gathers wait, layers of loops travel ahead


@pytest.mark.parametrize("config", [{"stage": 2}, {"stage": 3}, IN_ORDER, {"stage": 3, "secondary": True}], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_effect_sees_the_whole_weight_and_is_differentiated_as_in_plain_jax(name, config):
    params, x = parameters(), jax.random.normal(jax.random.key(1), (8, 8))
    want = jax.jit(lambda: wanted(PROGRAMS[name], params, x))()
    layout = models.make_layout(params, MESH, **config)
    run = jax.jit(zerojax.value_and_grad(PROGRAMS[name], layout))
    jax.effects_barrier()
    calls.clear()
    value, grads = run(layout.shard(params), x)
    jax.effects_barrier()
    assert len(calls) == CALLS.get(name, 0)
    np.testing.assert_allclose(value, want[0], rtol=FLOAT32)
    assert models.largest_error(layout.unshard(grads), want[1]) < FLOAT32
