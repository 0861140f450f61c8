"""Programs that use weights in every way: what the tests of the evaluator run on stored and on full parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from models import ramp

MESH, DEVICES = "2x2", 4

PROGRAMS: dict[str, Any] = {}


def program(fn):
    PROGRAMS[fn.__name__] = fn
    return fn


def parameters():
    keys = iter(jax.random.split(jax.random.key(3), 8))
    shapes = {"w": (12, 16), "v": (16, 12), "s": (3, 12, 16), "t": (3, 16, 12), "b": (16,), "odd": (11, 7)}
    params = {name: jax.random.normal(next(keys), shape) / 2 for name, shape in shapes.items()}
    half, deep = ((16, 12), (3, 12, 12))
    params["half"] = jax.random.normal(next(keys), half, jnp.bfloat16)
    return {**params, "deep": jax.random.normal(next(keys), deep, jnp.bfloat16) / 2}


def examples():
    return jax.random.normal(jax.random.key(5), (4 * DEVICES, 12))


def layers(h, s, t, wrap=lambda f: f, **kwargs):
    def layer(h, st):
        return jnp.tanh(h @ st[0] @ st[1]) * ramp(12, h.dtype), None

    return lax.scan(wrap(layer), h, (s, t), **kwargs)[0]


def mean(y):
    """Mean with a different factor for each column."""
    return jnp.mean(y.astype(jnp.float32) * ramp(y.shape[-1]))


@program
def one_use(p, x):
    return mean(x @ p["w"])


@program
def weight_used_twice_and_squared(p, x):
    return mean(x @ (p["w"] * p["w"]) + p["w"].sum() + x @ p["w"])


@program
def tied_and_transposed(p, x):
    return mean(jnp.tanh(x @ p["w"]) @ p["w"].T) + mean(p["odd"].T.reshape(-1))


@program
def unused(p, x):
    return mean(x)


@program
def value_of_the_weight_alone(p, x):
    return jnp.mean(p["w"]) + p["b"][3] + p["w"][3, 5] + p["s"][1, 2, 3]


@program
def static_slices(p, x):
    strided = mean(p["w"][:, 2:9:3]) + mean(p["s"][::2, 1]) + mean(p["w"][::-1]) + mean(p["s"][1:3, 2:5])
    return strided + mean(x[:, :4] @ p["w"][3:7])


@program
def layers_unrolled_by_index(p, x):
    for i in range(3):
        x = jnp.tanh(x @ p["s"][i] @ p["t"][i]) * ramp(12)
    return mean(x)


@program
def narrow_layers_unrolled_by_index(p, x):
    s = p["s"].astype(jnp.bfloat16)
    for i in range(3):
        x = jnp.tanh(x @ s[i].astype(jnp.float32) @ p["t"][i]) * ramp(12)
    return mean(x)


@program
def slice_whose_place_differs_between_devices(p, x):
    i = (x[0, 0] > 0).astype(jnp.int32)
    picked = lax.dynamic_index_in_dim(p["s"], i, keepdims=False)
    return mean(jnp.tanh(x @ picked)) + mean(lax.dynamic_slice(p["odd"], (i, i), (3, 4)))


@program
def rows_looked_up(p, x):
    return mean(p["odd"][jnp.argmax(x, -1) % 11])


@program
def scanned_layers(p, x):
    return mean(layers(x, p["s"], p["t"]))


@program
def scanned_in_reverse_and_unrolled(p, x):
    return mean(layers(x, p["s"], p["t"], reverse=True, unroll=3))


@program
def scanned_under_checkpoint(p, x):
    return mean(layers(x, p["s"], p["t"], jax.checkpoint))


@program
def narrow_stack_scanned(p, x):
    bf16 = jnp.bfloat16
    return mean(layers(x.astype(bf16), p["s"].astype(bf16), p["t"].astype(bf16)))


@program
def layers_in_microbatches(p, x):
    def micro(total, part):
        return total + mean(layers(part, p["s"], p["t"])), None

    return lax.scan(micro, 0.0, x.reshape(2, -1, 12))[0]


@program
def layers_in_microbatches_under_checkpoints(p, x):
    @jax.checkpoint
    def micro(total, part):
        return total + mean(layers(part, p["s"], p["t"], jax.checkpoint)), None

    return lax.scan(micro, 0.0, x.reshape(2, -1, 12))[0]


@program
def loop_constants_beside_layers(p, x):
    @jax.checkpoint
    def layer(h, st):
        return jnp.tanh(h @ st[0] @ st[1] + h @ p["w"] @ p["v"]) * ramp(12), None

    return mean(lax.scan(layer, x, (p["s"], p["t"]))[0])


@program
def stack_scanned_and_used_whole(p, x):
    return mean(layers(x, p["s"], p["t"])) + mean(p["s"] ** 2)


@program
def stack_reshaped_before_the_loop(p, x):
    return mean(layers(x, p["s"].reshape(48, 12).reshape(3, 12, 16), p["t"]))


@program
def weight_in_the_carry(p, x):
    def body(carry, _):
        h, w = carry
        return (jnp.tanh(h @ w) @ p["v"] * ramp(12), w * 1.1), None

    (h, w), _ = lax.scan(body, (x, p["w"]), None, length=2)
    return mean(h) + mean(w)


@program
def layers_returned_by_the_loop(p, x):
    def body(h, w):
        return h @ w[:, :12] * ramp(12), w

    h, ws = lax.scan(body, x, p["s"])
    return mean(h) + mean(ws)


@program
def scanned_but_not_read(p, x):
    return mean(x @ p["w"]) * lax.scan(lambda c, _: (c + 1, None), 0.0, p["s"])[0]


@program
def fori_loop_with_index(p, x):
    return mean(lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["s"][i] @ p["t"][i]) * ramp(12), x))


@program
def while_loop_over_a_stopped_weight(p, x):
    w = lax.stop_gradient(p["w"])
    count, _ = lax.while_loop(lambda c: c[1] < 1e3, lambda c: (c[0] + 1, c[1] + jnp.abs(w).sum()), (0, jnp.zeros(())))
    return mean(x @ p["w"]) * count


@program
def cond_that_differs_between_devices(p, x):
    return mean(lax.cond(x[0, 0] > 0, lambda w: x @ w * 2, lambda w: jnp.sin(x @ w), p["w"]))


@program
def switch_in_a_loop(p, x):
    def body(h, ist):
        i, s, t = ist
        return lax.switch(i, [lambda h: h @ s @ t, lambda h: jnp.tanh(h @ s) @ t * ramp(12), lambda h: h], h), None

    return mean(lax.scan(body, x, (jnp.arange(3), p["s"], p["t"]))[0])


@program
def stopped_gradients(p, x):
    stopped = lax.stop_gradient(p["w"].astype(jnp.float16)).astype(jnp.float32)
    return mean(x @ lax.stop_gradient(p["w"]) @ p["v"]) + mean(x @ p["w"]) + mean(x @ stopped * p["b"])


@program
def custom_vjp_of_its_own(p, x):
    @jax.custom_vjp
    def f(w, x):
        return x @ w

    f.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (kept[1].T @ g * 2, g @ kept[0].T * 3))
    return mean(f(p["w"], x))


@program
def custom_jvp_of_a_weight(p, x):
    return mean(jax.nn.silu(p["w"])) + mean(jax.nn.relu(x @ p["w"])) + mean(jax.nn.logsumexp(p["w"], -1))


@program
def checkpoint_policies(p, x):
    def f(x, w, v):
        return jnp.tanh(checkpoint_name(jnp.tanh(x @ checkpoint_name(w, "w")), "h") @ v) * ramp(12)

    saved = jax.checkpoint_policies
    for policy in (None, saved.dots_saveable, saved.everything_saveable, saved.save_only_these_names("h")):
        x = jax.checkpoint(f, policy=policy)(x, p["w"], p["v"])
    return mean(x)


@program
def vmapped_over_examples_and_over_layers(p, x):
    rows = jax.vmap(lambda row, factor: row @ p["w"] * factor, in_axes=(0, None))(x, 2.0)
    return mean(rows) + mean(jax.vmap(lambda s, t: x @ s @ t)(p["s"], p["t"]))


@program
def jit_inside(p, x):
    return mean(jax.jit(lambda w, x: x @ jnp.tanh(w))(p["w"], x))


@program
def gradient_inside(p, x):
    of_input = jax.grad(lambda x: mean(jnp.tanh(x @ p["w"])))(x)
    of_weight = jax.grad(lambda w: mean(jnp.tanh(x @ w)))(p["w"])
    _, tangent = jax.jvp(lambda x: jnp.tanh(x @ p["w"]), (x,), (x,))
    return mean(of_input**2) + mean(jnp.tanh(x @ (p["w"] - of_weight))) + mean(tangent)


@program
def stored_narrow_and_widened(p, x):
    return mean(jnp.tanh(x @ p["half"].astype(jnp.float32).T))


@program
def narrowed_widened_and_narrowed_again(p, x):
    twice = p["w"].astype(jnp.bfloat16).astype(jnp.float32).T.astype(jnp.bfloat16).T
    return mean(x.astype(jnp.bfloat16) @ twice)


@program
def used_as_an_integer_and_in_a_comparison(p, x):
    return mean(x @ p["w"] * jnp.sum((p["b"] * 9).astype(jnp.int32))) + mean(jnp.where(p["w"] > 0, p["w"], 0))


@program
def joined_with_others(p, x):
    return mean(jnp.concatenate([x @ p["w"], p["w"], p["v"].T])) + mean(jnp.cumsum(p["w"], 0))


@program
def matrix_functions(p, x):
    square = p["odd"] @ p["odd"].T / 10 + 3 * jnp.eye(11)
    solved = jnp.linalg.solve(square, ramp(11))
    iterated, _ = jax.scipy.sparse.linalg.cg(lambda v: square @ v, ramp(11), maxiter=30)
    return mean(solved) + mean(iterated) + mean(jnp.linalg.norm(p["w"], axis=0)) * mean(x)


@program
def convolution(p, x):
    kernel = p["s"].transpose(1, 0, 2)[:2, :1]
    return mean(lax.conv_general_dilated(x[:, None, :], kernel, (1,), "SAME"))


@program
def callback_with_a_weight(p, x):
    jax.debug.callback(lambda w: None, p["w"])
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    total = jax.pure_callback(lambda w: np.asarray(w).sum(), shape, lax.stop_gradient(p["w"]), vmap_method="sequential")
    return mean(x @ p["w"]) * total


@program
def narrow_stack_widened_and_scanned(p, x):
    def layer(h, w):
        return jnp.tanh(h @ w), None

    return mean(lax.scan(layer, x, p["deep"].astype(jnp.float32))[0])
