"""Layers outside of regions are gathered in groups: values are those of plain JAX, and each group is one message."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.gather.test_order import LAYER_BYTES, compiled_for_gpus
from tests.models import largest_error, make_layout

FLOAT32 = 1e-5  # sums in another order
WINDOW = 2500  # bytes: two matrices in float32, of eleven


def matrices(count, width=12):
    keys = jax.random.split(jax.random.key(0), count)
    return [jax.random.normal(key, (width, width)) / np.sqrt(width) for key in keys]


def stacked(h, w):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, w)[0]


def tied(p, x):
    h = x
    for w in (*p["layers"], *p["layers"][:2]):
        h = jnp.tanh(h @ w)
    return jnp.mean((h @ p["layers"][0].T) ** 2)


def with_a_loop_between(p, x):
    h = jnp.tanh(x @ p["layers"][0] @ p["layers"][1])
    h = stacked(h, jnp.stack(p["layers"][2:6])) + stacked(h, p["stack"])
    return jnp.mean((h @ p["layers"][6] @ p["layers"][7]) ** 2)


def with_checkpoints_between(p, x):
    h, layer = x, jax.checkpoint(lambda h, v, w: jnp.tanh(h @ v) @ w)
    for i in range(0, 6, 3):
        h = jnp.tanh(h @ p["layers"][i])
        h = h + layer(h, p["layers"][i + 1], p["layers"][i + 2])
    return jnp.mean((h @ p["layers"][6] @ p["layers"][7]) ** 2) + jnp.mean(p["bias"] * h)


def of_weights_alone(p, x):
    """No activation enters the first products; one layer is not used at all."""
    product = p["layers"][0] @ p["layers"][1] @ p["layers"][2]
    norms = sum(jnp.sum(w**2) for w in p["layers"][3:7])
    return jnp.mean((x @ product + p["bias"]) ** 2) + norms


def with_adapters(p, x):
    h = x
    for w, a in zip(p["frozen"], p["layers"], strict=False):
        h = jnp.tanh(h @ w + h @ a)
    return jnp.mean(h**2)


PROGRAMS = [tied, with_a_loop_between, with_checkpoints_between, of_weights_alone, with_adapters]
SETTINGS = {
    "stage 3": {},
    "odd mesh": {"mesh": "1x7"},
    "secondary": {"secondary": True},
    "packed": {"pack_bytes": 2000},
}


@pytest.mark.parametrize(
    "setting", [pytest.param(name, marks=pytest.mark.aot if SETTINGS[name] else []) for name in SETTINGS]
)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_in_groups_are_those_of_plain_jax(program, setting):
    layers = matrices(12)
    params = {"layers": layers[:8], "frozen": layers[8:], "stack": jnp.stack(matrices(3)), "bias": jnp.full(12, 0.1)}
    config = {"mesh": "2x4", **SETTINGS[setting]}
    layout = make_layout(
        params, config.pop("mesh"), 3, prefetch_bytes=WINDOW,
        trainable=lambda path, _: "frozen" not in str(path), **config,
    )  # fmt: skip
    x = jax.random.normal(jax.random.key(1), (56, 12))
    value, grads = jax.jit(zerojax.value_and_grad(program, layout))(layout.shard(params), x)
    want_value, want = jax.jit(jax.value_and_grad(program))(params, x)
    np.testing.assert_allclose(value, want_value, rtol=FLOAT32)
    want = {name: None if name == "frozen" else tree for name, tree in want.items()}
    for name in ("layers", "stack", "bias"):
        assert largest_error(layout.unshard(grads)[name], want[name]) < FLOAT32, name


def test_what_is_not_differentiated_may_have_no_derivative():
    """A frozen teacher in a loop that cannot be differentiated, in the order of gathers."""
    params = dict(zip(("teacher", "first", "last"), matrices(3), strict=True))

    def loss(p, x):
        def body(carry):
            i, h = carry
            return i + 1, jnp.tanh(h @ p["teacher"])

        _, target = jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x @ p["teacher"]))
        return jnp.mean((x @ p["first"] @ p["last"] - target) ** 2)

    x = jax.random.normal(jax.random.key(1), (8, 12))
    layout = make_layout(params, "2x4", 3, prefetch_bytes=WINDOW, trainable=lambda path, _: "teacher" not in str(path))
    grads = layout.unshard(jax.jit(zerojax.value_and_grad(loss, layout))(layout.shard(params), x)[1])
    trained = {name: params[name] for name in ("first", "last")}
    want = jax.grad(lambda p: loss({**params, **p}, x))(trained)
    assert largest_error({name: grads[name] for name in want}, want) < FLOAT32


def test_training_in_groups_is_that_of_plain_optax():
    params = {"layers": matrices(8), "bias": jnp.full(12, 0.1), "frozen": matrices(2), "stack": jnp.stack(matrices(3))}
    layout = make_layout(params, "2x4", 3, prefetch_bytes=WINDOW)
    tx = zerojax.zero(optax.adam(1e-2), layout)
    step = zerojax.make_train_step(with_checkpoints_between, tx, layout, microbatches=2)
    state, plain = zerojax.TrainState.create(layout.shard(params), tx, layout), params
    x = jax.random.normal(jax.random.key(1), (16, 12))
    plain_state = optax.adam(1e-2).init(plain)
    for _ in range(3):
        state, _ = step(state, x)
        grads = jax.grad(with_checkpoints_between)(plain, x)
        updates, plain_state = optax.adam(1e-2).update(grads, plain_state)
        plain = optax.apply_updates(plain, updates)
    assert largest_error(layout.unshard(state.params), plain) < 1e-4  # Adam divides what is nearly zero by itself


@pytest.mark.aot
@pytest.mark.needs_cuda_plugin
def test_each_group_travels_in_one_message_forward_and_backward():
    """Two layers fit into the window, one into a group."""
    layers = 6
    _, program = compiled_for_gpus(layers, False, 2 * LAYER_BYTES)
    gathers = program.select("all-gather", axes=("node", "local"))
    assert [len(one.results) for one in gathers] == [2] * 2 * layers
    for axis in ("node", "local"):
        assert [len(one.results) for one in program.select("reduce-scatter", axes=(axis,))] == [2] * layers
