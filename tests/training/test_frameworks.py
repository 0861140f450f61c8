"""Unmodified models of Flax NNX, Flax Linen and Equinox, scanned, checkpointed, with attention and dropout.

Each framework's own idiom makes a pure function of the parameters; nothing in a model knows of zerojax.
"""

import functools
import math
import warnings
from typing import Any, NamedTuple

import equinox as eqx
import equinox.internal as eqxi
import flax.linen as nn
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import nnx
from models import ramp
from tolerances import FLOAT32

import zerojax
from zerojax import _compat

LAYERS, WIDTH, HEADS, TOKENS, LENGTH, BATCH = 2, 24, 2, 29, 6, 16


class Framework(NamedTuple):
    """A model as a pure function: `loss(params, batch, key)`; key None turns dropout off."""

    init: Any
    loss: Any


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(3 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, key):
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        y = self.down(nnx.gelu(self.up(x)) * ramp(3 * WIDTH))
        return x + self.dropout(y, deterministic=key is None, rngs=key)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(TOKENS, WIDTH, rngs=rngs)

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def blocks(rngs):
            return NnxBlock(rngs)

        self.blocks = blocks(rngs)

    def __call__(self, tokens, key):
        @nnx.remat
        def body(x, block, key):
            return block(x, key)

        keys = None if key is None else jax.random.split(key, LAYERS)
        scan = nnx.scan(body, in_axes=(nnx.Carry, 0, None if key is None else 0), out_axes=nnx.Carry)
        return self.embed.attend(scan(self.embed(tokens) * ramp(WIDTH), self.blocks, keys))


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def make_nnx() -> Framework:
    graph, _ = nnx.split(nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0))), nnx.Param)

    def loss(params, batch, key=None):
        return cross_entropy(nnx.merge(graph, params)(batch["x"], key), batch)

    return Framework(lambda key: nnx.split(NnxModel(nnx.Rngs(key)), nnx.Param)[1], loss)


class LinenBlock(nn.Module):
    deterministic: bool

    @nn.compact
    def __call__(self, x, _):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(HEADS, deterministic=True)(nn.LayerNorm()(x), mask=mask)
        y = nn.Dense(WIDTH)(nn.gelu(nn.Dense(3 * WIDTH)(x)) * ramp(3 * WIDTH))
        return x + nn.Dropout(0.5, deterministic=self.deterministic)(y), None


class LinenModel(nn.Module):
    deterministic: bool

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(TOKENS, WIDTH)
        blocks = nn.scan(
            nn.remat(LinenBlock, prevent_cse=False), variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True}, length=LAYERS,
        )(self.deterministic)  # fmt: skip
        x, _ = blocks(embed(tokens) * ramp(WIDTH), None)
        return embed.attend(x)


def make_linen() -> Framework:
    def loss(params, batch, key=None):
        rngs = {} if key is None else {"dropout": key}
        return cross_entropy(LinenModel(key is None).apply(params, batch["x"], rngs=rngs), batch)

    return Framework(lambda key: LinenModel(True).init(key, jnp.zeros((1, LENGTH), jnp.int32)), loss)


class EquinoxModel(eqx.Module):
    embed: jax.Array
    blocks: list[eqx.nn.MLP]
    attention: eqx.nn.MultiheadAttention
    name: str = eqx.field(static=True)

    def __init__(self, key):
        keys = jax.random.split(key, LAYERS + 2)
        self.embed = jax.random.normal(keys[0], (TOKENS, WIDTH))
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[1])
        self.blocks = [eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=k) for k in keys[2:]]
        self.name = "small"

    def __call__(self, tokens, key):
        x = self.embed[tokens] * ramp(WIDTH)
        x = x + self.attention(x, x, x, mask=jnp.tri(LENGTH, dtype=bool))
        for block in self.blocks:
            x = x + jax.vmap(block)(x) * ramp(WIDTH)
        x = x if key is None else eqx.nn.Dropout(0.5)(x, key=key)
        return x @ self.embed.T


def make_equinox() -> Framework:
    _, static = eqx.partition(EquinoxModel(jax.random.key(0)), eqx.is_inexact_array)

    def loss(params, batch, key=None):
        model = eqx.combine(params, static)
        keys = None if key is None else jax.random.split(key, batch["x"].shape[0])
        logits = jax.vmap(model, in_axes=(0, None if key is None else 0))(batch["x"], keys)
        return cross_entropy(logits, batch)

    return Framework(lambda key: eqx.filter(EquinoxModel(key), eqx.is_inexact_array), loss)


FRAMEWORKS = {"nnx": make_nnx, "linen": make_linen, "equinox": make_equinox}


@functools.cache
def framework(name) -> Framework:
    return FRAMEWORKS[name]()


@functools.cache
def batch():
    tokens = np.random.default_rng(0).integers(0, TOKENS, (2, BATCH, LENGTH)).astype(np.int32)
    return {"x": jnp.asarray(tokens[0]), "y": jnp.asarray(tokens[1])}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_gradients_of_an_unmodified_model_equal_those_of_one_device(name):
    one = framework(name)
    key = jax.random.key(2)
    params = jax.jit(one.init)(key)
    want_loss, want = jax.jit(jax.value_and_grad(one.loss))(params, batch())
    layout = models.make_layout(jax.eval_shape(one.init, key), "2x4", 3)
    stored = layout.init(one.init, key)
    assert jax.tree.structure(stored) == jax.tree.structure(params)
    assert models.largest_error(layout.unshard(stored), params) < 2.0**-22
    loss, grads = jax.jit(zerojax.value_and_grad(one.loss, layout))(stored, batch())
    np.testing.assert_allclose(loss, want_loss, rtol=FLOAT32)
    grads = layout.unshard(grads)
    # A key's bias shifts all scores of a query alike: its gradient is zero but for rounding, without a scale.
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(want))
    for g, w in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=FLOAT32 * max(float(jnp.abs(w).max()), 1e-2 * scale))


@pytest.mark.parametrize("name", ["nnx", "linen"])
def test_dropout_differs_between_devices_and_is_reproducible(name):
    one = framework(name)
    layout = models.make_layout(jax.eval_shape(one.init, jax.random.key(2)), "2x4", 3)
    params = layout.init(one.init, jax.random.key(2))
    same = jax.tree.map(lambda x: jnp.tile(x[:2], (8, 1)), batch())  # every device gets the same two examples

    def per_example(params, batch, key):
        return jnp.broadcast_to(one.loss(params, batch, key), batch["x"].shape[:1])

    run = jax.jit(zerojax.apply(per_example, layout))
    losses = np.asarray(run(params, same, jax.random.key(0))).reshape(8, 2)[:, 0]
    assert len(set(losses.tolist())) == 8, losses
    np.testing.assert_array_equal(losses, np.asarray(run(params, same, jax.random.key(0))).reshape(8, 2)[:, 0])
    assert not np.array_equal(losses, np.asarray(run(params, same, jax.random.key(1))).reshape(8, 2)[:, 0])
    # Device i draws from the key folded with i.
    whole = layout.unshard(params)
    two = jax.tree.map(lambda x: x[:2], same)
    want = [one.loss(whole, two, jax.random.fold_in(jax.random.key(0), i)) for i in (0, 5)]
    np.testing.assert_allclose(losses[[0, 5]], want, rtol=FLOAT32)


def test_dropout_differs_between_microbatches():
    one = framework("nnx")
    layout = models.make_layout(jax.eval_shape(one.init, jax.random.key(2)), "1x3", 3)
    params = layout.init(one.init, jax.random.key(2))
    same = jax.tree.map(lambda x: jnp.tile(x[:1], (6, 1)), batch())  # one example on each device and microbatch

    def loss(params, batch, key):
        value = one.loss(params, batch, key)
        return value, jnp.broadcast_to(value, batch["x"].shape[:1])

    grad_fn = jax.jit(zerojax.value_and_grad(loss, layout, has_aux=True, microbatches=2))
    (_, losses), _ = grad_fn(params, same, jax.random.key(0))
    assert losses.shape == (6,)
    assert len(set(np.asarray(losses).tolist())) == 6, losses


def test_a_single_key_in_the_batch_is_refused_and_one_for_each_example_taken():
    layout = models.make_layout({"w": jnp.ones((16, 8))}, "2x4", 3)
    params = layout.shard({"w": jnp.ones((16, 8))})

    def draw(p, batch):
        return jax.vmap(jax.random.uniform)(batch["key"]) + 0 * p["w"].sum()

    with pytest.raises(ValueError, match=r"batch\['key'\] is a single PRNG key, .* the same on every device"):
        zerojax.apply(draw, layout)(params, {"x": jnp.ones((8, 2)), "key": jax.random.key(0)})
    keys = jax.random.split(jax.random.key(0), 8)
    drawn = zerojax.apply(draw, layout)(params, {"key": keys})
    np.testing.assert_array_equal(drawn, jax.vmap(jax.random.uniform)(keys))


def test_a_key_of_the_old_kind_is_pointed_out():
    layout = models.make_layout({"w": jnp.ones((16, 8))}, "2x4", 3)
    params = layout.shard({"w": jnp.ones((16, 8))})
    with pytest.warns(UserWarning, match="looks like an untyped PRNG key; it will be the same on every device"):
        zerojax.apply(lambda p, b, key: b + 0 * p["w"].sum(), layout)(params, jnp.ones((8,)), jax.random.PRNGKey(0))


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_equinox_model_with_frozen_parts_takes_a_step(dtype):
    """Its parameters hold None for what is no parameter: not to be mistaken for a gradient that is absent."""
    one = framework("equinox")
    params = jax.tree.map(lambda x: x.astype(dtype), one.init(jax.random.key(2)))
    layout = models.make_layout(params, "1x3", 3, trainable=lambda path, leaf: ".embed" not in path)
    tx = zerojax.zero(optax.sgd(0.5), layout)
    step = zerojax.make_train_step(one.loss, tx, layout)
    some = jax.tree.map(lambda x: x[:15], batch())
    state, _ = step(zerojax.TrainState.create(layout.shard(params), tx), some)
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    after = layout.unshard(state.params)
    np.testing.assert_array_equal(np.asarray(after.embed, np.float32), np.asarray(params.embed, np.float32))
    grads = jax.grad(one.loss)(params, some)
    moved = np.asarray(params.blocks[1].layers[0].weight - 0.5 * grads.blocks[1].layers[0].weight, np.float32)
    # One bfloat16 rounding of the master and five of the gradient's sum, each 2^-9 of the largest value.
    tolerance = FLOAT32 if dtype == jnp.float32 else 6 * 2.0**-9
    got = np.asarray(after.blocks[1].layers[0].weight, np.float32)
    np.testing.assert_allclose(got, moved, rtol=0, atol=tolerance * np.abs(moved).max())


def test_a_loop_that_compares_shardings_is_refused_in_words_and_the_way_out_trains():
    """Equinox's checkpointed loop fails in any shard_map; its own message prints two equal shapes."""

    def loss(p, x):
        def body(carry):
            return carry[0] + 1, jnp.tanh(carry[1] @ p["w"]) * ramp(6)

        done = eqxi.while_loop(lambda c: c[0] < 3, body, (0, x), kind="checkpointed", max_steps=4, checkpoints=2)
        return jnp.mean(done[1] ** 2)

    params, x = {"w": jnp.linspace(-1, 1, 36).reshape(6, 6)}, jnp.sin(jnp.arange(48.0)).reshape(8, 6)
    layout = models.make_layout(params, "2x2", 1)
    stored = layout.shard(params)
    with pytest.raises(ValueError, match=r"value_and_grad: the loss uses .* shard the optimizer alone"):
        zerojax.value_and_grad(loss, layout)(stored, x)
    assert jnp.isfinite(zerojax.apply(loss, layout)(stored, x))  # without a backward pass nothing is compared
    tx = zerojax.zero(optax.sgd(0.5), layout)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    got = layout.unshard(step(stored, tx.init(stored))[0])
    want, *_ = models.train_plain(loss, optax.sgd(0.5), params, [x])
    assert models.largest_error(got, want) < FLOAT32


def test_parameters_in_nested_containers():
    state = nnx.State({"w": nnx.Param(jnp.ones((5, 9)))})
    params = {"a": (jnp.ones((16, 8)), [Pair(jnp.ones((8, 5)), None)]), "b": state}

    def loss(p, x):
        first, (pair,) = p["a"]
        return jnp.mean(((x @ first * ramp(8)) @ pair.left @ p["b"]["w"][...] - 1) ** 2)

    x = jax.random.normal(jax.random.key(0), (16, 16))
    want, *_ = models.train_plain(loss, optax.adam(1e-2), params, [x])
    layout = models.make_layout(params, "2x4", 3)
    tx = zerojax.zero(optax.adam(1e-2), layout)
    step = zerojax.make_train_step(loss, tx, layout)
    state, _ = step(zerojax.TrainState.create(layout.shard(params), tx), x)
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    assert models.largest_error(layout.unshard(state.params), want) < FLOAT32


class SquareLayer(nn.Module):
    @nn.compact
    def __call__(self, h, _=None):
        return jnp.tanh(nn.Dense(WIDTH, use_bias=False)(h))


class CarriedLayer(SquareLayer):
    def __call__(self, h, _=None):
        return super().__call__(h), None


def gathered_sizes(jaxpr):
    """Elements that each all-gather brings, at any depth."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "all_gather":
            yield math.prod(eqn.outvars[0].aval.shape)
        for inner in _compat.sub_jaxprs(eqn):
            yield from gathered_sizes(inner)


def scanned_along(axis):
    return nn.scan(CarriedLayer, variable_axes={"params": axis}, split_rngs={"params": True}, length=4)()


@pytest.mark.parametrize(
    "model", [scanned_along(0), scanned_along(1), nn.remat_scan(SquareLayer, lengths=(2, 2))()],
    ids=["scan", "scan over dim 1", "remat_scan"],
)  # fmt: skip
def test_linen_layers_are_gathered_one_at_a_time(model):
    x = jnp.ones((8, WIDTH))

    def run(p, x):
        out = model.apply(p, x, None) if isinstance(model, CarriedLayer) else model.apply(p, x)
        return jnp.mean((out[0] if isinstance(out, tuple) else out) ** 2)

    params = jax.eval_shape(model.init, jax.random.key(0), x, *([None] if isinstance(model, CarriedLayer) else []))
    layout = models.make_layout(params, "2x4", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", zerojax.GatherWarning)
        traced = jax.make_jaxpr(zerojax.value_and_grad(run, layout))(layout.param_shapes(), x)
    sizes = list(gathered_sizes(traced.jaxpr))
    assert sizes
    assert max(sizes) == WIDTH**2
