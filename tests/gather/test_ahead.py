"""Layers gathered ahead in loops: values stay exact, no weight waits for the backward pass, no byte more is sent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.models import largest_error, make_layout
from tests.tolerances import BFLOAT16_OF_4, FLOAT32

WIDTH, INNER = 15, 24  # the devices do not divide one of them, and no activation has the shape of a weight


def layers(count):
    keys = jax.random.split(jax.random.key(count), 3)
    return {
        "up": jax.random.normal(keys[0], (count, WIDTH, INNER)) / 3,
        "down": jax.random.normal(keys[1], (count, INNER, WIDTH)) / 5,
        "mix": jax.random.normal(keys[2], (count, WIDTH, WIDTH)) / 3,
    }


def layer(h, p):
    return h + jnp.tanh((h @ p["mix"]) @ p["up"]) @ p["down"]


def scanned(body=layer, **options):
    def run(p, x):
        return jnp.mean(jax.lax.scan(lambda h, q: (body(h, q), None), x, p, **options)[0] ** 2)

    return run


def with_results(p, x):
    """Backwards, with a counter, a value that only later layers differentiate, inputs and results of each layer."""
    count = p["up"].shape[0]

    def body(carry, one):
        h, i, frozen = carry
        q, own = one
        h = layer(h * own, q) + jax.lax.stop_gradient(frozen)
        return (h, i + 1, frozen * 0.5 + h), (jnp.sin(h), i)

    scale = jnp.linspace(0.5, 1.5, count)
    (h, i, _), (ys, steps) = jax.lax.scan(body, (x, 0, jnp.cos(x)), (p, scale), reverse=True)
    return jnp.mean(h**2) + jnp.mean(ys * steps[:, None, None]) + 0.1 * i


def narrow(h, p):
    p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
    return layer(h.astype(jnp.bfloat16), p).astype(h.dtype)


def transposed(h, p):
    return h + jnp.tanh(h @ p["down"].T) @ p["up"].T @ p["mix"]


def in_branch(h, p):
    return jax.lax.cond(jnp.int32(2) > 1, lambda: layer(h, p), lambda: h)


@jax.custom_vjp
def product(a, w):
    return a @ w


product.defvjp(lambda a, w: (a @ w, (a, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


def own_rule(h, p):
    return h + product(product(jnp.sin(h), p["up"]), p["down"]) @ p["mix"]


def of_pairs(p, x):
    def pair(h, q):
        return jax.lax.scan(lambda h, r: (layer(h, r), None), h, q)[0], None

    return jnp.mean(jax.lax.scan(jax.checkpoint(pair), x, p)[0] ** 2)


def microbatches(p, x):
    """The loop inside of a loop that closes over the stack."""
    return jax.lax.scan(lambda total, part: (total + scanned()(p, part), None), 0.0, x.reshape(1, *x.shape))[0]


PROGRAMS = {
    "plain": (4, scanned()), "checkpointed": (4, scanned(jax.checkpoint(layer))), "two layers": (2, scanned()),
    "three layers": (3, scanned(jax.checkpoint(layer))), "one layer": (1, scanned()), "results": (3, with_results),
    "unrolled": (5, scanned(jax.checkpoint(layer), unroll=3)), "narrow": (4, scanned(narrow)),
    "transposed": (4, scanned(transposed)), "branch": (3, scanned(in_branch)), "own rule": (4, scanned(own_rule)),
    "pairs": (4, of_pairs), "loop in a loop": (3, microbatches),
    "saved products": (4, scanned(jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable))),
}  # fmt: skip
SETTINGS = {
    "all": {"prefetch_bytes": 2**20},
    "some": {"prefetch_bytes": 4 * (WIDTH + INNER) * WIDTH},  # "mix" and "up"
    "secondary": {"prefetch_bytes": 2**20, "secondary": True},
}
FEW = ("checkpointed", "results", "narrow")


@functools.cache
def results(setting):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, WIDTH)), jnp.float32)
    chosen = {name: PROGRAMS[name] for name in (PROGRAMS if setting in ("", "all") else FEW)}
    params = {name: layers(count) for name, (count, _) in chosen.items()}
    if "pairs" in params:
        params["pairs"] = jax.tree.map(lambda w: w.reshape(2, 2, *w.shape[1:]), params["pairs"])
    if not setting:
        return jax.jit(lambda p: {n: jax.value_and_grad(fn)(p[n], x) for n, (_, fn) in chosen.items()})(params)
    layout = make_layout(params, "2x4", 3, **SETTINGS[setting])

    def loss(p, x):
        return sum(fn(p[name], x) for name, (_, fn) in chosen.items())

    value, grads = jax.jit(zerojax.value_and_grad(loss, layout))(layout.shard(params), x)
    return value, layout.unshard(grads)


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_of_loops_gathered_ahead_equal_plain_ones(setting):
    value, grads = results(setting)
    expected = {name: results("")[name] for name in grads}
    np.testing.assert_allclose(value, sum(v for v, _ in expected.values()), rtol=BFLOAT16_OF_4)
    for name, (_, wanted) in expected.items():
        error = largest_error(grads[name], wanted)
        assert error < (BFLOAT16_OF_4 if name == "narrow" else FLOAT32), (name, error)


def loops(jaxpr):
    """(length, shapes of the results) of every loop in a jaxpr."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn.params["length"], [v.aval.shape for v in eqn.outvars]
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from loops(inner)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["plain", "checkpointed", "narrow", "transposed", "own rule", "branch"])
def test_no_layer_keeps_weights_for_the_backward_pass(name, frozen):
    count, fn = PROGRAMS[name]
    params = jax.eval_shape(lambda: layers(count))
    trainable = {"up": not frozen, "down": True, "mix": True}
    layout = make_layout(params, "2x4", 3, prefetch_bytes=2**20, trainable=trainable)
    x = jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)
    found = list(loops(jax.make_jaxpr(zerojax.value_and_grad(fn, layout))(layout.param_shapes(), x).jaxpr))
    full = {(WIDTH, INNER), (INNER, WIDTH), (WIDTH, WIDTH)}
    stacked = [shape[1:] for _, shapes in found for shape in shapes if len(shape) == 3]
    assert not full & set(stacked), stacked
    # All but one layer are gathered in the forward loop, all but two in the backward one; a branch keeps its gathers.
    lengths = [length for length, _ in found]
    assert lengths == ([count, count] if name == "branch" else [count - 1, count - 2])
