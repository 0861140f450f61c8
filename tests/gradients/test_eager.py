"""Calls outside of `jax.jit`: one compilation for each program, and never the program of another call."""

import functools
import logging

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

import zerojax


class Compilations(logging.Handler):
    """Counts what JAX compiles; `since()` gives the number since it was last asked."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def emit(self, record):
        self.count += record.getMessage().startswith("Compiling")

    def since(self):
        count, self.count = self.count, 0
        return count


@pytest.fixture
def compilations():
    handler, logger = Compilations(), logging.getLogger("jax._src.interpreters.pxla")
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    with jax.log_compiles():
        yield handler
    logger.removeHandler(handler)
    logger.propagate = propagates


def parameters():
    keys = jax.random.split(jax.random.key(0), 2)
    return {"w": jax.random.normal(keys[0], (9, 8)), "s": jax.random.normal(keys[1], (3, 8, 8)) / 3}


TABLE = np.linspace(0.0, 1.0, 8, dtype=np.float32)


def forward(p, x, key):
    """With rules for derivatives, a checkpointed scan, random numbers and constants."""

    @jax.checkpoint
    def layer(h, w):
        return jax.nn.relu(h @ w) + jax.nn.gelu(h) * jnp.asarray(TABLE), None

    h, _ = jax.lax.scan(layer, jax.nn.silu(x @ p["w"]), p["s"])
    return jax.nn.logsumexp(h, axis=-1) * jax.random.bernoulli(key, 0.5)


def loss(p, x, key):
    return jnp.mean(forward(p, x, key))


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("transform", [zerojax.apply, zerojax.value_and_grad])
def test_an_eager_call_compiles_once_for_each_shape(transform, stage, compilations):
    params = parameters()
    layout = models.make_layout(params, "2x2", stage)
    run = transform(forward if transform is zerojax.apply else loss, layout)
    stored, key = layout.shard(params), jax.random.key(1)
    batches = [jnp.ones((size, 9)) for size in (8, 16)]
    wanted = [jax.jit(run)(stored, x, key) for x in batches]
    for x in batches:
        run(stored, x, key)
    compilations.since()
    for x, want in zip(batches, wanted, strict=True):
        got = run(stored, x, key)
        assert compilations.since() == 0
        assert models.largest_error(got, want) < 1e-6  # the same program


def test_an_eager_call_sees_what_its_function_closes_over_now(compilations):
    params, x = {"w": jnp.ones((9, 8))}, jnp.ones((8, 9))
    layout = models.make_layout(params, "2x2", 3)
    stored, state = layout.shard(params), {"factor": 1.0, "table": jnp.ones(8)}

    def fn(p, x):
        y = x @ p["w"] * state["table"] * state["factor"]
        return jnp.mean(y if state["factor"] < 3 else -y)

    run = zerojax.value_and_grad(fn, layout)
    for factor, table in ((1.0, 1.0), (2.0, 1.0), (2.0, 5.0), (3.0, 5.0), (1.0, 1.0)):
        state.update(factor=factor, table=jnp.full(8, table))
        value, grads = run(stored, x)
        want = jax.value_and_grad(fn)(params, x)
        assert models.largest_error((value, layout.unshard(grads)), want) < 1e-6
    compilations.since()
    run(stored, x)
    assert compilations.since() == 0, "arrays that are closed over are arguments"


def test_an_eager_call_keeps_static_arguments_and_callbacks_apart(compilations):
    params, x = {"w": jnp.ones((9, 8))}, jnp.ones((8, 9))
    layout = models.make_layout(params, "2x2", 3)
    stored, seen = layout.shard(params), []

    def fn(p, x, scale=1, power=None):
        jax.debug.callback(lambda s=power: seen.append(s))
        return jnp.mean(x @ p["w"]) ** (power or 1) * scale

    chosen = {"power": 1}
    run = zerojax.apply(lambda p, x, *rest: fn(p, x, *rest, **chosen), layout)
    assert float(run(stored, x)) == 9
    chosen["power"] = 2
    assert float(run(stored, x)) == 81
    assert float(run(stored, x, 2)) == 162
    assert float(zerojax.apply(functools.partial(fn, power=3), layout)(stored, x, 2.5)) == 2.5 * 729
    jax.effects_barrier()
    assert seen == [1] * 4 + [2] * 8 + [3] * 4


def test_programs_of_many_shapes_do_not_pile_up():
    params = {"w": jnp.ones((9, 8))}
    layout = models.make_layout(params, "1x1", 3)
    from zerojax.gradients import eager

    call = eager.CompiledOnce()
    for size in range(1, eager.KEPT + 5):
        assert float(call(jnp.sum, jnp.ones(size))) == size
    assert len(call.programs) == eager.KEPT
    assert float(zerojax.apply(lambda p, x: jnp.mean(x @ p["w"]), layout)(layout.shard(params), jnp.ones((2, 9)))) == 9


@pytest.mark.parametrize("stage", [2, 3])
def test_an_eager_derivative_of_a_gradient_is_that_of_plain_jax(stage):
    params, x = {"w": jnp.ones((9, 8)) / 9}, jax.random.normal(jax.random.key(0), (8, 9))
    layout = models.make_layout(params, "2x2", stage)

    def outer(scale, vag, p):
        return jnp.sum(vag(lambda p, x: jnp.mean(jnp.tanh(scale * x @ p["w"]) ** 2))(p, x)[1]["w"] ** 2)

    def stored(fn):
        return zerojax.value_and_grad(fn, layout)

    got = jax.grad(outer)(2.0, stored, layout.shard(params))
    want = jax.grad(outer)(2.0, jax.value_and_grad, params)
    assert models.largest_error(got, want) < 1e-5


@pytest.mark.parametrize("stage", [1, 3])
def test_the_gradient_of_an_eager_call_is_compiled_once(stage, compilations):
    params, factor = parameters(), [1.0]
    layout = models.make_layout(params, "2x4", stage)
    stored, x, key = layout.shard(params), jnp.linspace(-1, 1, 16 * 9).reshape(16, 9), jax.random.key(4)

    @jax.custom_jvp
    def reversed_gradient(x):
        return x

    @reversed_gradient.defjvp
    def _(primals, tangents):  # closes over what a caller changes between two calls: the values are the same
        return primals[0], -factor[0] * tangents[0]

    def scaled(p, x, key):
        return forward(p, reversed_gradient(x), key)

    on_devices = zerojax.apply(scaled, layout)
    of_loss = zerojax.value_and_grad(lambda p, x, key: jnp.mean(scaled(p, x, key) ** 2), layout)
    calls = {
        "batch": (jax.grad(lambda x, key: jnp.sum(on_devices(stored, x, key) ** 2)), 0),
        "params": (jax.grad(lambda p, x, key: of_loss(p, x, key)[0]), 1),
    }
    for name, (call, given) in calls.items():
        inputs = (x, key) if given == 0 else (stored, x, key)
        first = call(*inputs)
        compilations.since()
        again = call(*inputs)
        assert compilations.since() == 0, name
        jax.tree.map(np.testing.assert_array_equal, again, first)
        want = jax.jit(call)(*inputs)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), first, want)
        if given == 0:
            factor[0] = 2.0
            np.testing.assert_allclose(call(*inputs), 2 * first, rtol=1e-5, atol=1e-6)
            factor[0] = 1.0
