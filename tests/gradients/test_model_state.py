"""Batch statistics and other state of a model, dropout keys, and what metrics cost."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tolerances import FLOAT32

import zerojax
from zerojax.hlo.program import read_program
from zerojax.planner.gpus import target_mesh

PARAMS = {"first": jnp.linspace(-1, 1, 9 * 24).reshape(9, 24), "last": jnp.linspace(1, -1, 24 * 5).reshape(24, 5)}
STATE = {"mean": jnp.zeros(24), "var": jnp.ones(24), "count": jnp.int32(0)}
BATCH = models.dense_batches(1, 48)[0]


def normalised_loss(params, batch, state, *, axes=None):
    """Batch normalisation over this device's examples, or over all devices' (`axes`)."""
    h = batch["x"] @ params["first"] * models.ramp(24)
    mean, square = jnp.mean(h, 0), jnp.mean(h**2, 0)
    if axes is not None:
        mean, square = lax.pmean((mean, square), axes)
    var = square - mean**2
    y = jnp.tanh((h - mean) / jnp.sqrt(var + 1e-3)) @ params["last"]
    moved = {"mean": 0.9 * state["mean"] + 0.1 * mean, "var": 0.9 * state["var"] + 0.1 * var}
    return jnp.mean((y - batch["y"]) ** 2), {**moved, "count": state["count"] + 1}


def start(stage, mesh="2x4", **options):
    layout = models.make_layout(PARAMS, mesh, stage)
    tx = zerojax.zero(optax.sgd(0.1), layout)
    state = zerojax.TrainState.create(layout.shard(PARAMS), tx, model_state=STATE)
    return layout, tx, state


@pytest.mark.parametrize(("stage", "microbatches"), [(1, 1), (3, 2)])
def test_running_statistics_are_the_mean_over_devices_and_microbatches(stage, microbatches):
    layout, tx, state = start(stage)
    step = zerojax.make_train_step(normalised_loss, tx, layout, mutable=True, microbatches=microbatches)
    parts = jax.tree.map(lambda x: x.reshape(8 * microbatches, -1, *x.shape[1:]), BATCH)
    params, carried = PARAMS, STATE

    def mean_loss(params, carried):
        losses, states = jax.vmap(normalised_loss, in_axes=(None, 0, None))(params, parts, carried)
        return jnp.mean(losses), jax.tree.map(lambda x: jnp.mean(x, 0).astype(x.dtype), states)

    for count in (1, 2):
        state, metrics = step(state, BATCH)
        (loss, carried), grads = jax.value_and_grad(mean_loss, has_aux=True)(params, carried)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=FLOAT32)
        assert models.largest_error(state.model_state, carried) < FLOAT32
        assert int(state.model_state["count"]) == count
    assert models.largest_error(layout.unshard(state.params), params) < FLOAT32
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state.model_state))
    assert step._cache_size() == 1


def test_a_model_that_names_the_data_axes_normalises_over_the_whole_batch():
    layout, tx, state = start(3)
    loss_fn = functools.partial(normalised_loss, axes=layout.config.axes)
    step = zerojax.make_train_step(loss_fn, tx, layout, mutable=True, donate=False)
    after, metrics = step(state, BATCH)
    (loss, carried), grads = jax.value_and_grad(normalised_loss, has_aux=True)(PARAMS, BATCH, STATE)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=FLOAT32)
    assert models.largest_error(after.model_state, carried) < FLOAT32
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, grads)
    assert models.largest_error(layout.unshard(after.params), moved) < FLOAT32


def test_a_skipped_step_leaves_the_state_alone_and_a_checkpoint_keeps_it(tmp_path):
    layout, tx, state = start(2)
    with_aux = lambda p, b, s: (lambda loss, new: (loss, (new, {"x": jnp.mean(b["x"])})))(*normalised_loss(p, b, s))  # noqa: E731
    step = zerojax.make_train_step(
        with_aux, tx, layout, mutable=True, has_aux=True, on_nonfinite="skip", donate=False
    )
    state, metrics = step(state, BATCH)
    np.testing.assert_allclose(metrics["aux"]["x"], jnp.mean(BATCH["x"]), rtol=FLOAT32)
    kept, _ = step(state, {**BATCH, "x": BATCH["x"].at[0, 0].set(jnp.nan)})
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(kept.model_state)] == [
        np.asarray(x).tobytes() for x in jax.tree.leaves(state.model_state)
    ]
    zerojax.save(tmp_path / "it", state, layout, tx)
    like = zerojax.TrainState.create(layout.param_shapes(), tx, model_state=jax.eval_shape(lambda: STATE))
    again = zerojax.restore(tmp_path / "it", layout, tx, like=like)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=r"a model state: .* like=zerojax\.TrainState\.create"):
        zerojax.restore(tmp_path / "it", layout, tx)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {**s, "mean": s["mean"][:3]}, r"model state\['mean'\] that loss_fn returns has shape \(3,\)"),
        (lambda s: {**s, "count": s["count"] * 1.0}, r"\['count'\] .* dtype float32, .* cast or reshape"),
        (lambda s: {"mean": s["mean"]}, "must have the structure of the one it was given"),
    ],
)
def test_a_state_of_another_form_is_refused(change, message):
    layout, tx, state = start(3)
    step = zerojax.make_train_step(lambda p, b, s: (normalised_loss(p, b, s)[0], change(s)), tx, layout, mutable=True)
    with pytest.raises(ValueError, match=message):
        step(state, BATCH)


def test_a_state_that_the_step_does_not_take_is_refused_and_so_are_keys_in_it():
    layout, tx, state = start(3)
    with pytest.raises(ValueError, match="belong together"):
        zerojax.make_train_step(models.dense_loss, tx, layout)(state, BATCH)
    keyed = state._replace(model_state={"key": jax.random.key(0)})
    with pytest.raises(ValueError, match=r"model_state\['key'\] holds PRNG keys: pass a new key to every step"):
        zerojax.make_train_step(lambda p, b, s: (0.0, s), tx, layout, mutable=True)(keyed, BATCH)


def test_dropout_of_a_step_differs_by_device_and_microbatch_and_repeats():
    layout = models.make_layout(PARAMS, "2x4", 3)
    tx = zerojax.zero(optax.sgd(0.0), layout)

    def loss_fn(p, b, key):
        kept = jax.random.bernoulli(key, 0.5, (24,))
        each = jnp.sum(kept * 2.0 ** jnp.arange(24))  # the mask as a number, exact in float32
        return jnp.mean((b["x"] @ p["first"] * kept) ** 2), jnp.broadcast_to(each, b["x"].shape[:1])

    step = zerojax.make_train_step(loss_fn, tx, layout, has_aux=True, microbatches=3)
    state = zerojax.TrainState.create(layout.shard(PARAMS), tx)
    masks = []
    for seed in (0, 0, 1):
        state, metrics = step(state, BATCH, jax.random.key(seed))
        masks.append(np.asarray(metrics["aux"]))
    np.testing.assert_array_equal(masks[0], masks[1])
    # 48 examples, two in each microbatch of each device; the mask of the first on device 5 is that of its folded key.
    assert len(set(masks[0].tolist())) == 24
    assert len(set(masks[0].tolist()) & set(masks[2].tolist())) == 0
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 5), 0)
    assert masks[0][5 * 6] == float(jnp.sum(jax.random.bernoulli(key, 0.5, (24,)) * 2.0 ** jnp.arange(24)))


def test_tokens_are_the_sum_of_all_weights():
    layout = models.make_layout(PARAMS, "3x2", 3)
    tx = zerojax.zero(optax.sgd(0.1), layout)
    counts = jnp.arange(48, dtype=jnp.int32) % 7

    def loss_fn(p, b):
        errors = jnp.mean((jnp.tanh(b["x"] @ p["first"]) @ p["last"] - b["y"]) ** 2, -1)
        return jnp.sum(errors * b["count"]), jnp.sum(b["count"])

    step = zerojax.make_train_step(loss_fn, tx, layout, weighted=True, microbatches=2)
    _, metrics = step(zerojax.TrainState.create(layout.shard(PARAMS), tx), {**BATCH, "count": counts})
    assert (float(metrics["tokens"]), int(metrics["examples"])) == (float(counts.sum()), 48)
    assert {float(v) for v in models.values_on_devices(metrics["tokens"])} == {float(counts.sum())}


@pytest.mark.needs_cuda_plugin
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.aot), 3])
def test_metrics_clipping_and_skipping_send_nothing_but_scalars(stage):
    mesh = target_mesh("h100", 2, 8)
    width, over_batch = 1024, NamedSharding(mesh, P(("node", "local")))
    extents = {"w": (width, 4 * width), "v": (4 * width, width)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in extents.items()}
    layout = zerojax.partition(params, mesh, zerojax.ZeroConfig(stage=stage))
    tx = zerojax.zero(optax.adam(1e-3), layout)
    batch = jax.ShapeDtypeStruct((16 * 64, width), jnp.bfloat16, sharding=over_batch)

    def loss_fn(p, x):
        y = jax.nn.gelu(x @ p["w"].astype(x.dtype)) @ p["v"].astype(x.dtype)
        return jnp.sum(y.astype(jnp.float32) ** 2), jnp.float32(x.shape[0])

    def sent(loss_scale=None, **options):
        step = zerojax.make_train_step(loss_fn, tx, layout, weighted=True, loss_scale=loss_scale, **options)
        state = zerojax.TrainState.create(layout.param_shapes(), tx, loss_scale=loss_scale)
        program = read_program(step.lower(state, batch).compile(), mesh)
        large = sorted((c.kind, c.received_bytes * c.executions) for c in program.collectives if c.payload_bytes > 1024)
        return large, sum(c.payload_bytes for c in program.collectives if c.payload_bytes <= 1024)

    def plain():
        grad_fn = zerojax.value_and_grad(loss_fn, layout, weighted=True)

        def step(params, state, batch):
            _, grads = grad_fn(params, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        shapes = layout.param_shapes()
        jitted = jax.jit(step, donate_argnums=(0, 1))
        program = read_program(jitted.lower(shapes, tx.init(shapes), batch).compile(), mesh)
        return sorted((c.kind, c.received_bytes * c.executions) for c in program.collectives if c.payload_bytes > 1024)

    large, small = sent("float16", clip_norm=1.0, on_nonfinite="skip")
    assert large == plain() != []
    assert small <= 1024


@pytest.mark.parametrize("microbatches", [1, 2])
def test_of_an_integer_that_devices_count_differently_the_largest_is_kept(microbatches):
    layout = models.make_layout({"w": jnp.ones((8,))}, "2x4", 3)
    tx = zerojax.zero(optax.sgd(0.1), layout)
    marks = jnp.asarray([3, 0, 1, 2, 9, 5, 4, 4, 0, 1, 2, 2, 6, 8, 7, 7], jnp.int32)

    def loss_fn(p, batch, state):
        return jnp.mean(p["w"]) * jnp.mean(batch.astype(jnp.float32)), {"most": state["most"] + jnp.max(batch)}

    step = zerojax.make_train_step(loss_fn, tx, layout, mutable=True, microbatches=microbatches)
    state = zerojax.TrainState.create(layout.shard({"w": jnp.ones((8,))}), tx, model_state={"most": jnp.int32(10)})
    state, _ = step(state, marks)
    assert {int(x) for x in models.values_on_devices(state.model_state["most"])} == {19}
