"""Groups of parameters: frozen, low-rank updates on a frozen int8 base, different learning rates, toggled."""

import functools
import math
import re
import warnings

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tolerances import FLOAT32

import pallas_kernels
import zerojax
from zerojax.hlo.program import read_program
from zerojax.planner.gpus import target_mesh

LAYERS, WIDTH, RANK = 2, 24, 3


def is_low_rank(path, leaf):
    return "lora" in path


def make_params(layers=LAYERS, width=WIDTH, rank=RANK):
    """An int8 base with a scale per output channel, and the two factors of its update."""
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "base": {
            "q": jax.random.randint(keys[0], (layers, width, width), -127, 128, jnp.int8),
            "scale": jnp.linspace(0.5, 1.5, layers * width).reshape(layers, width) / 127 / math.sqrt(width),
        },
        "lora": {
            "a": jax.random.normal(keys[1], (layers, width, rank)) / math.sqrt(width),
            "b": jax.random.normal(keys[2], (layers, rank, width)) / 10,
        },
    }


def loss_fn(params, batch):
    """The scale after the product: the base is used, and gathered, as the int8 that it is."""

    def layer(h, p):
        product = (h @ p["base"]["q"].astype(h.dtype)) * p["base"]["scale"].astype(h.dtype)
        return jnp.tanh(product + h @ p["lora"]["a"].astype(h.dtype) @ p["lora"]["b"].astype(h.dtype)), None

    h, _ = jax.lax.scan(layer, batch["x"], params)
    return jnp.mean((h - batch["y"]).astype(jnp.float32) ** 2)


def batches(count):
    draw = np.random.default_rng(3)
    return [
        {name: jnp.asarray(draw.normal(size=(48, WIDTH)), jnp.float32) for name in "xy"} for _ in range(count)
    ]


def two_rates():
    """Plain LoRA's practice: a larger learning rate for the second factor."""
    labels = lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, tree)  # noqa: E731
    groups = {"a": optax.adam(1e-3), "b": optax.adam(1e-2)}
    return optax.multi_transform({**groups, "q": optax.sgd(0), "scale": optax.sgd(0)}, labels)


def train_plain(params, tx, trained, inputs):
    """The oracle: the frozen leaves are no arguments of the gradient and unknown to the optimizer."""
    state = tx.init({"lora": params["lora"]})
    losses = []
    for batch in inputs:
        loss, grads = jax.jit(jax.value_and_grad(lambda t, b: loss_fn({**params, **t}, b)))(trained, batch)
        updates, state = tx.update(grads, state, trained)
        trained = optax.apply_updates(trained, updates)
        losses.append(float(loss))
    return trained, losses


@functools.cache
def oracle():
    params = make_params()
    return train_plain(params, two_rates(), {"lora": params["lora"]}, batches(2))


@pytest.mark.filterwarnings("ignore::zerojax.ZeroNotice", "error::zerojax.GatherWarning")
@pytest.mark.parametrize(
    ("stage", "mesh", "options"),
    [(0, "2x4", {}), (1, "3x2", {}), (2, "2x4", {}), (3, "3x2", {}), (3, "2x4", {"secondary": True})],
)
def test_low_rank_training_on_an_int8_base_equals_plain_optax(stage, mesh, options):
    params = make_params()
    layout = models.make_layout(params, mesh, stage, trainable=is_low_rank, **options)
    tx = zerojax.zero(two_rates(), layout)
    microbatches = 2 if options else 1
    step = zerojax.make_train_step(loss_fn, tx, layout, clip_norm=1e3, microbatches=microbatches)
    state = zerojax.TrainState.create(layout.shard(params), tx)
    for batch in batches(2):
        state, metrics = step(state, batch)
    want, losses = oracle()
    np.testing.assert_allclose(metrics["loss"], losses[-1], rtol=FLOAT32)
    after = layout.unshard(state.params)
    assert models.largest_error(after["lora"], want["lora"]) < FLOAT32
    for a, b in zip(jax.tree.leaves(after["base"]), jax.tree.leaves(params["base"]), strict=True):
        np.testing.assert_array_equal(a, b)
    base = state.params["base"]["q"]
    assert base.dtype == jnp.int8
    assert models.largest_shard(base) == base.nbytes // (layout.num_shards if stage == 3 else 1)
    held = sum(x.size for x in jax.tree.leaves(state.opt_state))
    assert held < 3 * 1.2 * sum(x.size for x in jax.tree.leaves(params["lora"]))  # moments of the factors, padding
    assert step._cache_size() == 1


def test_a_block_quantised_base_is_sharded_and_gathered_as_it_is():
    """`QuantizedArray` leaves: levels and scales are leaves like any other; dequantised where they are used."""
    weight = jax.random.normal(jax.random.key(1), (WIDTH, WIDTH)) / 5
    params = {"base": pallas_kernels.quantize(weight, pallas_kernels.QuantFormat(8, 32)), "lora": make_params()["lora"]}

    def apply_base(q, h):
        return h @ pallas_kernels.dequantize(q).astype(h.dtype)

    def block_loss(p, batch, apply_base):
        low_rank = batch["x"] @ p["lora"]["a"][0] @ p["lora"]["b"][1]
        return jnp.mean((jnp.tanh(apply_base(p["base"], batch["x"] + low_rank) + low_rank) - batch["y"]) ** 2)

    recomputed = functools.partial(block_loss, apply_base=jax.checkpoint(apply_base))
    kept = functools.partial(block_loss, apply_base=apply_base)
    layout = models.make_layout(params, "2x4", 3, trainable=is_low_rank)
    stored = layout.shard(params)
    assert stored["base"].qvalue.addressable_shards[0].data.nbytes < params["base"].qvalue.nbytes / 4
    batch = batches(1)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error", zerojax.GatherWarning)
        loss, grads = jax.jit(zerojax.value_and_grad(recomputed, layout))(stored, batch)
        traced = jax.make_jaxpr(zerojax.value_and_grad(kept, layout))(stored, batch)
    # Two hops forward and two backward: the floats are made again there, not kept, with a checkpoint or without one.
    assert len(re.findall(r"i8\[[\d,]*\] = all_gather", str(traced))) == 4
    want_loss, want = jax.value_and_grad(lambda t: recomputed({**params, "lora": t}, batch))(params["lora"])
    np.testing.assert_allclose(loss, want_loss, rtol=FLOAT32)
    assert models.largest_error(jax.tree.map(np.asarray, layout.unshard(
        {"base": stored["base"], "lora": grads["lora"]})["lora"]), want) < FLOAT32  # fmt: skip


def test_thawing_keeps_the_stored_parameters_and_needs_only_another_layout():
    params = models.dense_init(jax.random.key(1))
    inputs = models.dense_batches(2, 48)
    frozen = models.make_layout(params, "2x4", 3, trainable=lambda path, leaf: "stack" not in path)
    thawed = models.make_layout(params, "2x4", 3)
    stored, plain = frozen.shard(params), params
    for layout, batch in zip((frozen, thawed), inputs, strict=True):
        tx = zerojax.zero(optax.sgd(0.1), layout)
        step = zerojax.make_train_step(models.dense_loss, tx, layout)
        state, _ = step(zerojax.TrainState.create(stored, tx), batch)
        stored = state.params
        grads = jax.grad(models.dense_loss)(plain, batch)
        if layout is frozen:
            grads["stack"] = jax.tree.map(jnp.zeros_like, grads["stack"])
        plain = jax.tree.map(lambda p, g: p - 0.1 * g, plain, grads)
        assert models.largest_error(layout.unshard(stored), plain) < FLOAT32


@functools.cache
def compiled(layers):
    mesh, width = target_mesh("h100", 2, 8), 1024
    params = jax.eval_shape(lambda: make_params(layers, width, 16))
    layout = zerojax.partition(params, mesh, zerojax.ZeroConfig(), trainable=is_low_rank)
    over_batch = NamedSharding(mesh, P(("node", "local")))
    batch = {n: jax.ShapeDtypeStruct((16 * 64, width), jnp.bfloat16, sharding=over_batch) for n in "xy"}
    program = jax.jit(zerojax.value_and_grad(loss_fn, layout)).lower(layout.param_shapes(), batch).compile()
    return read_program(program, mesh)


@pytest.mark.needs_cuda_plugin
def test_an_int8_base_travels_in_one_byte_and_is_never_kept_whole():
    four, eight = compiled(4), compiled(8)
    weight = 1024 * 1024
    moved = [(a, one.executions) for one in eight.select("all-gather", axes=("node", "local")) for a in one.results]
    # Forward and backward, the whole of every layer; all else is the low-rank factors, 16 wide.
    assert sum(times for a, times in moved if (a.dtype, a.num_bytes) == ("s8", weight)) == 2 * 8
    assert max(a.num_bytes for a, _ in moved if a.dtype != "s8") <= 2 * 16 * 1024
    # What one more layer costs: its activations (64 rows of 2 and 4 bytes), not its weight of one or two bytes each.
    assert (eight.memory.temp - four.memory.temp) / 4 < weight / 2


def test_frozen_leaves_are_gathered_in_calls_outside_of_jit_too():
    """What nothing is differentiated with respect to has a custom derivative all the same."""
    params = {"frozen": jnp.linspace(-1, 1, 13 * 8).reshape(13, 8), "w": jnp.ones((8, 5))}
    layout = models.make_layout(params, "2x4", 3, trainable=lambda path, x: "frozen" not in path)

    def loss(p, x):
        return jnp.mean(jnp.tanh(x @ p["frozen"]) @ p["w"])

    x = jnp.linspace(0, 1, 16 * 13).reshape(16, 13)
    value, grads = zerojax.value_and_grad(loss, layout)(layout.shard(params), x)
    np.testing.assert_allclose(value, loss(params, x), rtol=1e-5)  # float32 sums in another order
    np.testing.assert_allclose(layout.unshard(grads)["w"], jax.grad(loss)(params, x)["w"], rtol=1e-5, atol=1e-6)
