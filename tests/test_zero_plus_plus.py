"""ZeRO++ from the outside: gradients, training, carried state and bad input, for each technique and all together.

Two oracles. Quantised weights: every device computes with the same dequantised values, so loss and gradient are those
of a plain model whose weights went through the format once. Quantised gradients: the gradient of each device is known,
and the error of the sum has a bound that follows from the formats (`quantization_bounds`).
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from quantization_bounds import as_gathered, reduction_bound

import zerojax
from zerojax import QuantFormat, ZeroConfig

# Another order of float32 sums over a few hundred terms, through three layers; as in test_oracle.
FLOAT32 = 2e-5
PAIR = {"quantize_gradients": ("int8", "int4")}
# These programs take seconds to compile and milliseconds to run.
compile_fast = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
EVERYTHING = {"quantize_weights": "int8", "secondary": True, **PAIR, "min_quantize_size": 0}


@pytest.fixture(autouse=True)
def _small_leaves():
    with warnings.catch_warnings():  # blocks larger than the shards of these tiny leaves
        warnings.simplefilter("ignore", zerojax.ZeroNotice)
        yield


@functools.cache
def example(dtype="float32"):
    params = models.transformer_init(jax.random.key(1), jnp.dtype(dtype))
    return params, models.token_batches(1, 24)[0]


def layout_of(mesh, stage=3, **options):
    params, _ = example(options.pop("dtype", "float32"))
    return models.make_layout(params, mesh, stage, **{"min_quantize_size": 0, **options})


def gradients(layout, loss_fn=models.transformer_loss, params=None, batch=None, **options):
    params, batch = example()[0] if params is None else params, example()[1] if batch is None else batch
    fn = compile_fast(zerojax.value_and_grad(loss_fn, layout, **options))
    loss, grads = fn(layout.shard(params), batch)
    return float(loss), layout.unshard(grads)


plain_loss = compile_fast(models.transformer_loss)
plain_gradients = compile_fast(jax.value_and_grad(models.transformer_loss))
gradients_of_devices = compile_fast(jax.vmap(jax.grad(models.transformer_loss), in_axes=(None, 0)))


def weights_as_gathered(params, layout):
    """The parameters as every device sees them; a stack that is scanned over is gathered layer by layer."""
    fmt = layout.config.quantize_weights

    def one(path, x, placement):
        if "layers" not in jax.tree_util.keystr(path):
            return as_gathered(x, placement, fmt)
        return jax.lax.map(lambda part: as_gathered(part, placement.without_leading_dim(), fmt), x)

    return compile_fast(lambda tree: jax.tree_util.tree_map_with_path(one, tree, layout.placements))(params)


def check_within_bounds(got, params, batch, layout):
    """Every leaf within the bound of its reduction, and the quantised ones not exact."""
    parts = jax.tree.map(lambda x: x.reshape(layout.num_shards, -1, *x.shape[1:]), batch)
    of_devices = gradients_of_devices(params, parts)
    nodes, local = (layout.mesh.shape[axis] for axis in layout.config.axes)
    inexact = 0
    for (path, g), d, p in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(of_devices), layout.leaves, strict=True
    ):
        each = np.asarray(d, np.float64) / layout.num_shards
        error = np.abs(np.asarray(g, np.float64) - each.sum(axis=0)).max(initial=0.0)
        exact = FLOAT32 * np.abs(each.sum(axis=0)).max(initial=0.0)
        quantized = p.is_quantized and each.ndim - 1 - ("layers" in p.path) >= 2  # a stack of vectors is no matrix
        bound = reduction_bound(each, nodes, local, layout.config.quantize_gradients) if quantized else 0.0
        assert error <= bound + exact, (jax.tree_util.keystr(path), error, bound)
        inexact += error > exact
    assert inexact >= 5


@pytest.mark.parametrize(
    ("mesh", "remat", "fmt"), [("2x4", False, "int8"), ("3x2", True, QuantFormat(4, 32))]
)
def test_quantised_weights_give_the_gradient_at_the_dequantised_weights(mesh, remat, fmt):
    params, batch = example()
    layout = layout_of(mesh, quantize_weights=fmt)
    loss_fn = functools.partial(models.transformer_loss, remat=remat)
    loss, grads = gradients(layout, loss_fn, batch=batch)
    want_loss, want = plain_gradients(weights_as_gathered(params, layout), batch)
    assert loss == pytest.approx(float(want_loss), rel=FLOAT32)
    assert models.largest_error(grads, want) < FLOAT32
    assert abs(loss - float(plain_loss(params, batch))) > 1e-5  # the weights did travel quantised


@pytest.mark.parametrize(("mesh", "stage"), [("2x4", 3), ("3x2", 2), ("2x4", 1), ("1x7", 3)])
def test_quantised_reductions_stay_within_their_bounds(mesh, stage):
    layout = layout_of(mesh, stage, **PAIR)
    params, batch = example()
    batch = jax.tree.map(lambda x: x[: 21 if mesh == "1x7" else 24], batch)
    loss, grads = gradients(layout, batch=batch)
    assert loss == pytest.approx(float(plain_loss(params, batch)), rel=FLOAT32)
    check_within_bounds(grads, params, batch, layout)


@pytest.mark.parametrize("remat", [False, True])
def test_all_three_techniques_together(remat):
    params, batch = example()
    layout = layout_of("2x4", **EVERYTHING)
    loss_fn = functools.partial(models.transformer_loss, remat=remat)
    loss, grads = gradients(layout, loss_fn)
    weights = weights_as_gathered(params, layout)
    assert loss == pytest.approx(float(plain_loss(weights, batch)), rel=FLOAT32)
    check_within_bounds(grads, weights, batch, layout)


def test_microbatches_reduce_each_part_and_use_one_secondary_partition():
    params, batch = example()
    layout = layout_of("2x4", **EVERYTHING)
    loss, grads = gradients(layout, microbatches=3)
    weights = weights_as_gathered(params, layout)
    assert loss == pytest.approx(float(plain_loss(weights, batch)), rel=FLOAT32)
    # Three reductions, each of a third: the bound of a sum is the sum of the bounds of its parts.
    parts = jax.tree.map(lambda x: x.reshape(24, 1, *x.shape[1:]), batch)
    # Device by device, then microbatch by microbatch, to the reverse.
    of_parts = jax.tree.map(
        lambda x: x.reshape(8, 3, *x.shape[1:]).swapaxes(0, 1), gradients_of_devices(weights, parts)
    )
    for g, d, p in zip(jax.tree.leaves(grads), jax.tree.leaves(of_parts), layout.leaves, strict=True):
        each = np.asarray(d, np.float64) / 24
        error = np.abs(np.asarray(g) - each.sum(axis=(0, 1))).max(initial=0.0)
        bounds = [reduction_bound(part, 2, 4, layout.config.quantize_gradients) for part in each]
        exact = FLOAT32 * np.abs(each.sum(axis=(0, 1))).max(initial=0.0)
        assert error <= (sum(bounds) if p.is_quantized else 0.0) + exact, p.path


@pytest.mark.parametrize(
    ("mesh", "remat", "microbatches", "dtype"),
    [("2x4", False, 1, "float32"), ("4x2", True, 1, "bfloat16"), ("3x2", False, 2, "float32")],
)
def test_a_secondary_partition_alone_changes_no_bit_in_several_steps(mesh, remat, microbatches, dtype):
    params, batch = example(dtype)
    loss_fn = functools.partial(models.transformer_loss, remat=remat, compute=jnp.dtype(dtype))
    results = []
    for secondary in (False, True):
        layout = layout_of(mesh, secondary=secondary, dtype=dtype)
        tx = zerojax.zero(optax.adam(1e-2), layout)
        state = zerojax.TrainState.create(layout.shard(params), tx)
        step = compile_fast(zerojax.make_train_step(loss_fn, tx, layout, microbatches=microbatches))
        for _ in range(3):
            state, metrics = step(state, batch)
        results.append((jax.tree.map(lambda x: np.asarray(x, np.float32), state.params), float(metrics["loss"])))
    (off, off_loss), (on, on_loss) = results
    jax.tree.map(np.testing.assert_array_equal, on, off)
    assert on_loss == off_loss
    assert models.largest_error(on, jax.tree.map(lambda x: np.asarray(x, np.float32), layout.shard(params))) > 1e-3


def test_bfloat16_parameters_train_on_exact_float32_masters():
    params, batch = example("bfloat16")
    layout = layout_of("2x4", dtype="bfloat16", **EVERYTHING)
    tx = zerojax.zero(optax.sgd(2.0**-12), layout)
    loss_fn = functools.partial(models.transformer_loss, compute=jnp.bfloat16)
    step = compile_fast(zerojax.make_train_step(loss_fn, tx, layout))
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


def test_frozen_leaves_are_gathered_quantised_and_get_no_gradient():
    params, batch = example()
    options = {**EVERYTHING, "trainable": lambda path, leaf: "embed" not in path}
    layout = layout_of("2x4", **options)
    loss, grads = compile_fast(zerojax.value_and_grad(models.transformer_loss, layout))(layout.shard(params), batch)
    assert grads["embed"] is None
    assert grads["layers"]["up"].shape == params["layers"]["up"].shape
    loss = float(loss)
    weights = weights_as_gathered(params, layout)
    assert loss == pytest.approx(float(plain_loss(weights, batch)), rel=FLOAT32)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stack_of_norm_scales_is_no_matrix(stage):
    # Large enough to be quantised as a whole, too small for a gather in each layer.
    params = {"s": jnp.ones((4, 64)), "w": jnp.eye(64)}
    batch = jnp.asarray(np.random.default_rng(3).normal(size=(16, 64)))

    def loss_fn(params, batch):
        h, _ = jax.lax.scan(lambda h, s: (jnp.tanh(h * s) @ params["w"], None), batch, params["s"])
        return jnp.mean(h**2 * models.ramp(64))

    layout = models.make_layout(params, "2x4", stage, **PAIR, min_quantize_size=128, min_shard_size=128)
    assert layout.placements["s"].is_quantized
    _, grads = gradients(layout, loss_fn, params, batch.astype(jnp.float32))
    want = compile_fast(jax.grad(loss_fn))(params, batch.astype(jnp.float32))
    assert models.largest_error(grads["s"], want["s"]) < FLOAT32
    assert models.largest_error(grads["w"], want["w"]) > 100 * FLOAT32


def test_a_tied_weight_is_reduced_once():
    layout = layout_of("2x4", **EVERYTHING)
    params, batch = example()
    fn = zerojax.value_and_grad(models.transformer_loss, layout)
    jaxpr = str(jax.make_jaxpr(fn)(layout.shard(params), batch))
    # The embedding, which is used twice, two matrices of the head and four of a layer, over two hops.
    assert jaxpr.count("all_to_all[") == 2 * (1 + 2 + 4)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_gradient_that_is_not_finite_is_seen_by_all(stage):
    params, batch = example()
    layout = layout_of("2x4", stage, **PAIR)
    scale = jnp.ones((24, 1)).at[7].set(jnp.nan)  # one example on one device

    def loss_fn(params, batch):
        return models.transformer_loss(params, batch) + jnp.sum(params["embed"][:2] * batch["scale"].mean())

    tx = zerojax.zero(optax.sgd(0.1), layout)
    step = compile_fast(zerojax.make_train_step(loss_fn, tx, layout))
    _, metrics = step(zerojax.TrainState.create(layout.shard(params), tx), {**batch, "scale": scale})
    for value in models.values_on_devices(metrics["grad_norm"]):
        assert not np.isfinite(value)


def test_an_axis_left_to_the_compiler_keeps_its_part_of_each_leaf():
    mesh = zerojax.make_mesh(2, 4, model=2)
    params = models.dense_init(jax.random.key(2))
    specs = {"first": P(None, "model"), "stack": {"w": P(None, None, "model"), "b": P(None, "model")},
             "last": P("model", None), "gain": P()}  # fmt: skip
    batch = models.dense_batches(1, 24)[0]
    config = ZeroConfig.zero_plus_plus(min_shard_size=0, min_quantize_size=0)
    layout = zerojax.partition(params, mesh, config, specs=specs)
    with jax.set_mesh(mesh):
        loss, grads = compile_fast(zerojax.value_and_grad(models.dense_loss, layout))(layout.shard(params), batch)
    grads = layout.unshard(grads)
    want_loss, want = compile_fast(jax.value_and_grad(models.dense_loss))(params, batch)
    # Weights to 1/254 of a block's largest value, in four products; gradients to 9/8 / 14 in each of two nodes' parts.
    assert float(loss) == pytest.approx(float(want_loss), rel=4 / 254 * 4)
    assert models.largest_error(grads, want) < 2 * 9 / 8 / 14 + 4 * 4 / 254
    for (path, g), p in zip(jax.tree_util.tree_leaves_with_path(grads), layout.leaves, strict=True):
        assert g.shape == p.shape, path


def test_error_feedback_makes_the_mean_over_steps_exact():
    params, batch = example()
    layout = layout_of("2x4", **PAIR, error_feedback=True)
    plain = layout_of("2x4", **PAIR)
    fn, feedback = compile_fast(zerojax.value_and_grad(models.transformer_loss, layout)), zerojax.init_feedback(layout)
    stored, total, steps = layout.shard(params), None, 8
    for _ in range(steps):
        _, grads, feedback = fn(stored, batch, feedback=feedback)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    mean = layout.unshard(jax.tree.map(lambda x: x / steps, total))
    _, want = plain_gradients(params, batch)
    once = gradients(plain)[1]

    def error(got, name):
        return np.linalg.norm(got["layers"][name] - want["layers"][name]) / np.linalg.norm(want["layers"][name])

    for name in ("qkv", "up", "down"):
        # What is carried is bounded, so the error between nodes falls as 1 / steps; that of int8 inside stays (1/254).
        assert error(mean, name) < 2 / steps * error(once, name) + 1 / 127


@pytest.mark.parametrize(("stage", "microbatches"), [(3, 1), (1, 3)])
def test_error_feedback_is_carried_saved_and_restored_bit_for_bit(stage, microbatches, tmp_path):
    params, batch = models.dense_init(jax.random.key(4)), models.dense_batches(1, 24)[0]
    layout = models.make_layout(params, "2x4", stage, **PAIR, error_feedback=True, min_quantize_size=0)
    tx = zerojax.zero(optax.adam(1e-3), layout)
    step = compile_fast(zerojax.make_train_step(models.dense_loss, tx, layout, microbatches=microbatches, donate=False))
    state = zerojax.TrainState.create(layout.shard(params), tx, layout)
    for _ in range(2):
        state, _ = step(state, batch)
    lost = jax.tree.leaves(state.feedback)
    # The first, the last and the stacked matrices; stacks of vectors lose nothing.
    assert sum(np.abs(np.asarray(x, np.float32)).max() > 0 for x in lost) == 3
    # Two nodes, each leaf split inside the node: a quarter of the leaf on each device.
    assert max(models.largest_shard(x) / (x.nbytes / 2) for x in lost) == 1 / 4
    zerojax.save(tmp_path / "run", state, layout, tx)
    restored = zerojax.restore(tmp_path / "run", layout, tx)
    for x in (*jax.tree.leaves(restored.feedback),):
        assert x.dtype == jnp.bfloat16
    on, again = step(state, batch)[0], step(restored, batch)[0]
    for a, b in zip(*(jax.tree.leaves((s.params, s.feedback)) for s in (on, again)), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        assert a.sharding == b.sharding


REFUSED = [
    ({"stage": 2, "quantize_weights": "int8"}, "quantize_weights.*weights are gathered only at stage 3"),
    ({"stage": 1, "secondary": True}, "secondary.*weights are gathered only at stage 3"),
    ({"axes": ("data",), "secondary": True}, "secondary.*needs two axes"),
    ({"stage": 0, "quantize_gradients": "int8"}, "quantize_gradients.*stage 0 all-reduces whole gradients"),
    ({"rounding": "stochastic"}, "rounding.*quantize_gradients, which is None"),
    ({"error_feedback": True}, "error_feedback.*quantize_gradients, which is None"),
    ({"axes": ("data",), **PAIR, "error_feedback": True}, "error_feedback.*there is one axis"),
    ({"quantize_weights": "int2"}, "quantize_weights='int2'.*'int8', 'int4' or a QuantFormat"),
    ({"quantize_gradients": ("int8", "int4", "int4")}, "one format, or a pair"),
    ({"quantize_gradients": "int8", "rounding": "up"}, "rounding must be 'nearest' or 'stochastic'"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_can_never_take_effect_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        ZeroConfig(**options)


MALFORMED = [
    ({"bits": 3}, "bits must be 8 or 4"),
    ({"bits": 4, "block_size": 48}, "block_size must be a power of two from 16 to 2048"),
    ({"scale_dtype": "float8_e5m2"}, "scale_dtype must be"),
    ({"block_size": 2048, "scale_dtype": "float8_e4m3fn"}, "float8_e4m3fn scales need a block_size of at most 1024"),
    ({"bits": 8, "levels": "e2m1"}, "levels must be 'integer', or 'e2m1' with 4 bits"),
    ({"block_size": 32, "rotate": 64}, "rotate must be None, 32 or 64, and divide block_size"),
]


@pytest.mark.parametrize(("fields", "message"), MALFORMED, ids=[m for _, m in MALFORMED])
def test_a_malformed_format_is_refused_when_it_is_made(fields, message):
    with pytest.raises(ValueError, match=message):
        QuantFormat(**fields)


NOTICED = [
    ("1x7", {"secondary": True}, "secondary has no effect: axis 'node' has one device, there is one node"),
    ("1x3", PAIR, "quantize_gradients reduces in a single hop over 'local', in the format for inside the node"),
    ("1x3", {**PAIR, "error_feedback": True}, "error_feedback has no effect: axis 'node' has one device"),
    ("1x1", EVERYTHING, "stage 3 has no effect"),
    ("data", {"quantize_gradients": "int8"}, "reduces in a single hop over 'data', in the format for between nodes"),
    ("2x4", {"quantize_weights": "int8"}, r"quantize_weights has blocks of 256 elements, more than the shard of"),
    ("2x4", {**PAIR, "min_quantize_size": 10**6}, "no leaf is quantised: none has two dims"),
]


@pytest.mark.parametrize(("mesh", "options", "message"), NOTICED)
def test_what_has_no_effect_on_this_mesh_is_noticed_by_name(mesh, options, message):
    with pytest.warns(zerojax.ZeroNotice, match=message):
        layout = layout_of(mesh, **options)
    assert any(message[:12] in line for line in layout.describe().splitlines())


def test_feedback_that_does_not_fit_is_refused():
    layout = layout_of("2x4", **PAIR, error_feedback=True)
    params, batch = example()
    fn = zerojax.value_and_grad(models.transformer_loss, layout)
    with pytest.raises(ValueError, match=r"pass feedback=zerojax.init_feedback\(layout\)"):
        fn(layout.shard(params), batch)
