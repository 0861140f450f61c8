"""Programs that run the layers of a stack inside other control flow: what no weight must be gathered in full for."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from models import ramp
from weight_programs import layers, mean, parameters

LAYERED: dict[str, Any] = {}
# Gather full stacks, and say so.
TOLD: set[str] = set()
LENGTH = 3


def layered(fn, told=False):
    LAYERED[fn.__name__] = fn
    if told:
        TOLD.add(fn.__name__)
    return fn


def told(fn):
    return layered(fn, told=True)


def run(s, t, x):
    return layers(x, s, t)


def layer(h, s, t):
    return jnp.tanh(h @ s @ t) * ramp(12, h.dtype)


@layered
def branch_by_a_parameter(p, x):
    return mean(lax.cond(p["b"][0] < 9, run, lambda s, t, x: x @ p["w"][:, :12], p["s"], p["t"], x))


@layered
def branches_with_parameters_of_their_own(p, x):
    def only(stack):
        return lambda: mean(lax.scan(lambda h, w: (jnp.tanh(h @ w @ w.T) * ramp(h.shape[-1]), None), x, stack)[0])

    def pair(i):
        return lax.switch(i, [only(p["s"]), lambda: mean(run(p["s"], p["t"], x)), lambda: mean(x @ p["w"])])

    return pair(0) + 2 * pair(1) + 3 * pair(2)


@layered
def branch_by_a_sum_over_devices(p, x):
    axes = jax.sharding.get_abstract_mesh().manual_axes
    total = lax.psum(x[0, 0], axes) if axes else x[0, 0]
    return mean(lax.cond(total > -99, run, lambda s, t, x: x, p["s"], p["t"], x))


@told
def branch_that_differs_between_devices(p, x):
    return mean(lax.cond(x[0, 0] > 0, run, lambda s, t, x: x * s[0, 0, 0], p["s"], p["t"], x))


@layered
def branch_in_each_layer(p, x):
    def body(h, ist):
        i, s, t = ist
        return lax.cond(i % 2 == 0, layer, lambda h, s, t: h * 2, h, s, t), None

    return mean(lax.scan(body, x, (jnp.arange(LENGTH), p["s"], p["t"]))[0])


@layered
def loop_over_an_index(p, x):
    return mean(lax.fori_loop(0, LENGTH, lambda i, h: layer(h, p["s"][i], p["t"][i]), x))


@layered
def loop_over_an_index_from_the_end_under_checkpoint(p, x):
    @jax.checkpoint
    def body(i, h):
        return layer(h, p["s"][LENGTH - 1 - i], lax.dynamic_index_in_dim(p["t"], LENGTH - 1 - i, keepdims=False))

    return mean(lax.fori_loop(0, LENGTH, body, x))


@layered
def narrow_loop_over_an_index(p, x):
    s, t = p["s"].astype(jnp.bfloat16), p["t"].astype(jnp.bfloat16)
    return mean(lax.fori_loop(0, LENGTH, lambda i, h: layer(h, s[i], t[i]), x.astype(jnp.bfloat16)))


@layered
def index_that_is_scanned_over(p, x):
    order = jnp.array([2, 0, 2, 1])
    return mean(lax.scan(lambda h, i: (layer(h, p["s"][i], p["t"][i]), None), x, order)[0])


@layered
def loop_with_dynamic_length(p, x):
    def body(i, h):
        return layer(h, lax.stop_gradient(p["s"])[i], lax.stop_gradient(p["t"])[i])

    count = jnp.where(p["b"][0] < 9, LENGTH, 0)
    h = lax.stop_gradient(lax.fori_loop(0, count, body, lax.stop_gradient(x)))
    return mean(h * x) + mean(x @ p["w"])


@layered
def loop_that_stops_early_on_each_device(p, x):
    stopped = lax.stop_gradient((p["s"], p["t"], x))

    def step(state):
        count, h = state
        return count + 1, run(stopped[0], stopped[1], h) * 1.5

    count, h = lax.while_loop(lambda c: (c[0] < 5) & (jnp.abs(c[1]).max() < 1 + x[0, 0]), step, (0, stopped[2]))
    return mean(lax.stop_gradient(h) * x) * (1 + count) + mean(x @ p["w"])


@layered
def parameters_carried_through_a_loop(p, x):
    def body(carry, _):
        h, s, t = carry
        return (run(s, t, h), s, t), None

    return mean(lax.scan(body, (x, p["s"], p["t"]), None, length=2)[0][0])


@told
def rule_of_its_own_around_the_layers(p, x):
    @jax.custom_vjp
    def wrapped(s, t, x):
        return run(s, t, x)

    def backward(kept, g):
        ds, dt, dx = jax.vjp(run, *kept)[1](g)
        return 2 * ds, dt, 3 * dx

    wrapped.defvjp(lambda s, t, x: (run(s, t, x), (s, t, x)), backward)
    return mean(wrapped(p["s"], p["t"], x @ p["w"][:, :12]))


@told
def forward_rule_of_its_own_around_the_layers(p, x):
    @jax.custom_jvp
    def wrapped(s, t, x):
        return run(s, t, x)

    @wrapped.defjvp
    def _(primals, tangents):
        out, tangent = jax.jvp(run, primals, tangents)
        return out, 2 * tangent

    return mean(wrapped(p["s"], p["t"], x @ p["w"][:, :12]))


@layered
def rule_of_its_own_around_each_layer(p, x):
    @jax.custom_vjp
    def wrapped(s, t, x):
        return layer(x, s, t)

    def forward(s, t, x):
        return wrapped(s, t, x), (s, t, x, 5)

    wrapped.defvjp(forward, lambda kept, g: jax.vjp(lambda s, t, x: layer(x, s, t), *kept[:3])[1](2 * g))
    return mean(lax.scan(lambda h, st: (wrapped(*st, h), None), x, (p["s"], p["t"]))[0])


@layered
def layers_one_by_one_and_all_at_once(p, x):
    def body(h, i):
        return layer(h, p["s"][i], p["t"][i]) + p["s"].sum(), None

    return mean(lax.scan(body, x, jnp.arange(LENGTH))[0])


@layered
def stack_made_of_leaves(p, x):
    s = jnp.stack([p["w"], p["u"], p["w"] * 1])
    return mean(layers(x, jnp.stack([p["w"], p["u"]]), p["t"][:2])) + s[0, 1, 2]


@layered
def stack_made_of_its_own_layers(p, x):
    s = jnp.stack([p["s"][i] for i in (2, 0, 1)])
    t = jnp.concatenate([lax.stop_gradient(p["t"][1])[None], p["t"][2][None], p["t"][:1]])
    return mean(run(s, t, x))


@layered
def masked_stack(p, x):
    mask = jnp.arange(12)[:, None] < jnp.arange(16)
    return mean(run(jnp.where(mask, p["s"], 0), p["t"] * mask.T[None], x))


@layered
def normalised_stack(p, x):
    s = p["s"] / jnp.linalg.norm(p["s"], axis=1, keepdims=True)
    t = p["t"] * jax.lax.rsqrt(jnp.mean(p["t"] ** 2, axis=(1, 2)) + 1e-6)[:, None, None]
    return mean(run(s, t, x))


@layered
def sum_of_two_stacks_with_a_factor_for_each_layer(p, x):
    s = (p["s"] + 0.5 * p["t"].transpose(0, 2, 1)) * p["scale"][:, None, None]
    return mean(lax.scan(lambda h, w: (jnp.tanh(h @ w @ w.T) * ramp(12), None), x, s)[0])


@layered
def narrow_masked_stack_under_checkpoint(p, x):
    mask = jnp.tri(12, 16, dtype=bool)
    s = jnp.where(mask, p["s"], 0).astype(jnp.bfloat16)

    @jax.checkpoint
    def body(h, st):
        return jnp.tanh(h @ (st[0] * 2) @ st[1].astype(h.dtype)) * ramp(12, h.dtype), None

    return mean(lax.scan(body, x.astype(jnp.bfloat16), (s, p["t"]))[0])


@layered
def masked_stack_over_an_index(p, x):
    s = p["s"] * jnp.tri(12, 16)
    looped = lax.fori_loop(0, LENGTH, lambda i, h: layer(h, s[i], p["t"][i] ** 2), x)
    return mean(looped) + mean(x @ s[1]) + mean(layer(x, s[-1], p["t"][0]))


@layered
def normalised_weights_one_by_one(p, x):
    for name in "wu":
        x = jnp.tanh(x @ (p[name] / (1e-3 + jnp.sqrt(jnp.sum(p[name] ** 2, axis=0)))) @ p["v"]) * ramp(12)
    return mean(x) + jnp.sum(p["w"] ** 2) + jnp.sum(jnp.abs(p["u"]))


def inputs():
    params = {name: value for name, value in parameters().items() if name in "wvstb"}
    scale = 1 + jax.random.normal(jax.random.key(9), (LENGTH,)) / 9
    shapes = {"u": (12, 16), "g": (4, 12, 12), "a": (3, 12, 2), "c": (3, 2, 16), "middle": (12, 3, 16)}
    more = {name: jax.random.normal(jax.random.key(8 + i), shape) / 2 for i, (name, shape) in enumerate(shapes.items())}
    return {**params, **more, "scale": scale}
