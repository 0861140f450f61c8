"""ZeRO++ from the outside: gradients and training under each technique and all together.

Two oracles. Quantised weights: every device computes with the same dequantised values, so loss and gradient are those
of a plain model whose weights went through the format once. Quantised gradients: the gradient of each device is known,
and the error of the sum has a bound that follows from the formats (`quantization_bounds`).
"""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from quantized_training import (
    BATCH,
    EVERYTHING,
    PAIR,
    check_exact,
    check_loss,
    check_spoilt_everywhere,
    check_within_bounds,
    example,
    layout_of,
    of_examples,
    weights_as_gathered,
)
from tolerances import FLOAT32_QUANTIZED

import zerojax
from zerojax import QuantFormat, ZeroConfig

# Blocks are larger than the shards of these tiny leaves.
pytestmark = pytest.mark.filterwarnings("ignore::zerojax.ZeroNotice")
INT4 = QuantFormat(4, 32)


def spoilable_loss(params, batch, *, remat=False):
    """The transformer's loss; an example whose `spoil` is not zero spoils that of its device."""
    return models.transformer_loss(params, batch, remat=remat) * (1 + batch["spoil"].mean())


def with_spoil(batch, value=0.0):
    """The batch with one example, of one device, spoilt."""
    rows = batch["x"].shape[0]
    return {**batch, "spoil": jnp.zeros((rows, 1)).at[rows // 3].set(value)}


@pytest.mark.parametrize(("mesh", "remat", "fmt"), [("2x4", False, "int8"), ("3x2", True, INT4)])
def test_quantised_weights_give_the_gradient_at_the_dequantised_weights(mesh, remat, fmt):
    params, batch = example()
    layout = layout_of(mesh, quantize_weights=fmt)
    fn = jax.jit(zerojax.value_and_grad(functools.partial(models.transformer_loss, remat=remat), layout))
    loss, got = fn(layout.shard(params), batch)
    want_loss, grads = of_examples(weights_as_gathered(mesh, layout.config.quantize_weights))
    check_loss(float(loss), want_loss)
    check_exact(got, grads, layout)
    assert abs(float(loss) - of_examples(params)[0]) > 1e-5  # the weights did travel quantised


AOT = pytest.mark.aot


@pytest.mark.parametrize(
    ("mesh", "stage"), [("2x4", 3), pytest.param("3x2", 2, marks=AOT), ("2x4", 1), pytest.param("1x7", 3, marks=AOT)]
)
def test_quantised_reductions_stay_within_their_bounds_and_keep_what_is_not_finite(mesh, stage):
    layout = layout_of(mesh, stage, **PAIR)
    params, batch = example()
    rows = BATCH // layout.num_shards * layout.num_shards
    batch = jax.tree.map(lambda x: x[:rows], batch)
    fn = jax.jit(zerojax.value_and_grad(spoilable_loss, layout))
    stored = layout.shard(params)
    loss, got = fn(stored, with_spoil(batch))
    want_loss, grads = of_examples(params, rows)
    check_loss(float(loss), want_loss)
    check_within_bounds(got, grads, layout)
    for value in (np.nan, np.inf):
        check_spoilt_everywhere(fn(stored, with_spoil(batch, value))[1], layout)


@pytest.mark.parametrize(
    ("remat", "microbatches", "frozen"),
    [(True, 1, True), *(pytest.param(False, count, False, marks=AOT) for count in (1, 3))],
)
def test_all_three_techniques_together(remat, microbatches, frozen):
    params, batch = example()
    layout = layout_of("2x4", **EVERYTHING, trainable=lambda path, leaf: not frozen or "embed" not in path)
    loss_fn = functools.partial(models.transformer_loss, remat=remat)
    fn = jax.jit(zerojax.value_and_grad(loss_fn, layout, microbatches=microbatches))
    loss, got = fn(layout.shard(params), batch)
    want_loss, grads = of_examples(weights_as_gathered("2x4", layout.config.quantize_weights))
    check_loss(float(loss), want_loss)
    check_within_bounds(got, grads, layout, microbatches)


@pytest.mark.parametrize(
    ("mesh", "remat", "microbatches", "dtype"), [
        ("4x2", True, 1, "bfloat16"), pytest.param("3x2", False, 2, "float32", marks=AOT)
    ],
)
def test_a_secondary_partition_alone_changes_no_bit_in_several_steps(mesh, remat, microbatches, dtype):
    params, batch = example(dtype)
    loss_fn = functools.partial(models.transformer_loss, remat=remat, compute=jnp.dtype(dtype))
    results = []
    for secondary in (False, True):
        layout = layout_of(mesh, secondary=secondary, dtype=dtype)
        tx = zerojax.zero(optax.sgd(0.1), layout)
        state = zerojax.TrainState.create(layout.shard(params), tx)
        step = jax.jit(zerojax.make_train_step(loss_fn, tx, layout, microbatches=microbatches))
        for _ in range(3):
            state, metrics = step(state, batch)
        # Nothing of a secondary partition is carried from step to step.
        results.append((jax.tree.map(lambda x: np.asarray(x, np.float32), state), float(metrics["loss"])))
    (off, off_loss), (on, on_loss) = results
    assert [x.shape for x in jax.tree.leaves(on)] == [x.shape for x in jax.tree.leaves(off)]
    jax.tree.map(np.testing.assert_array_equal, on.params, off.params)
    assert on_loss == off_loss
    first = jax.tree.map(lambda x: np.asarray(x, np.float32), layout.shard(params))
    assert models.largest_error(on.params, first) > 1e-3


def test_bfloat16_parameters_train_on_exact_float32_masters():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), models.dense_init(jax.random.key(3)))
    batch = models.dense_batches(1, 24)[0]
    layout = models.make_layout(params, "2x4", 3, **EVERYTHING)
    tx = zerojax.zero(optax.sgd(2.0**-9), layout)
    step = jax.jit(zerojax.make_train_step(models.dense_loss, tx, layout))
    state = zerojax.TrainState.create(layout.shard(params), tx)
    for _ in range(2):
        state, metrics = step(state, batch)
    assert np.isfinite(metrics["loss"])
    for x in jax.tree.leaves(state.params):
        assert x.dtype == jnp.bfloat16
    # Steps this small do not move most bfloat16 weights; the masters keep them, unrounded and unquantised.
    master = jax.tree.leaves(state.opt_state.master)
    moved = [np.mean(np.asarray(m) != np.asarray(m.astype(jnp.bfloat16), np.float32)) for m in master if m.size > 64]
    assert min(moved) > 0.5


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stack_of_norm_scales_is_no_matrix(stage):
    # Large enough to be quantised as a whole, too small for a gather in each layer.
    params = {"s": jnp.ones((4, 64)), "w": jnp.eye(64)}
    batch = jnp.asarray(np.random.default_rng(3).normal(size=(16, 64)), jnp.float32)

    def loss_fn(params, batch):
        h, _ = jax.lax.scan(lambda h, s: (jnp.tanh(h * s) @ params["w"], None), batch, params["s"])
        return jnp.mean(h**2 * models.ramp(64))

    layout = models.make_layout(params, "2x4", stage, **PAIR, min_quantize_size=128, min_shard_size=128)
    assert layout.placements["s"].is_quantized
    _, grads = jax.jit(zerojax.value_and_grad(loss_fn, layout))(layout.shard(params), batch)
    want = jax.jit(jax.grad(loss_fn))(params, batch)
    assert models.largest_error(grads["s"], want["s"]) < FLOAT32_QUANTIZED
    assert models.largest_error(grads["w"], want["w"]) > 100 * FLOAT32_QUANTIZED


def test_a_tied_weight_is_reduced_once():
    layout = layout_of("2x4", **EVERYTHING)
    params, batch = example()
    fn = zerojax.value_and_grad(models.transformer_loss, layout)
    jaxpr = str(jax.make_jaxpr(fn)(layout.shard(params), batch))
    # The embedding, which is used twice, two matrices of the head and four of a layer, over two hops.
    assert jaxpr.count("all_to_all[") == 2 * (1 + 2 + 4)


def test_an_axis_left_to_the_compiler_keeps_its_part_of_each_leaf():
    mesh = zerojax.make_mesh(2, 4, model=2)
    params = models.dense_init(jax.random.key(2))
    specs = {"first": P(None, "model"), "stack": {"w": P(None, None, "model"), "b": P(None, "model")},
             "last": P("model", None), "gain": P()}  # fmt: skip
    batch = models.dense_batches(1, 24)[0]
    config = ZeroConfig.zero_plus_plus(min_shard_size=0, min_quantize_size=0)
    layout = zerojax.partition(params, mesh, config, specs=specs)
    with jax.set_mesh(mesh):
        loss, grads = jax.jit(zerojax.value_and_grad(models.dense_loss, layout))(layout.shard(params), batch)
    grads = layout.unshard(grads)
    want_loss, want = jax.jit(jax.value_and_grad(models.dense_loss))(params, batch)
    # Weights to 1/254 of a block's largest value, in four products; gradients to 9/8 / 14 in each of two nodes' parts.
    assert float(loss) == pytest.approx(float(want_loss), rel=4 / 254 * 4)
    assert models.largest_error(grads, want) < 2 * 9 / 8 / 14 + 4 * 4 / 254
    for (path, g), p in zip(jax.tree_util.tree_leaves_with_path(grads), layout.leaves, strict=True):
        assert g.shape == p.shape, path
