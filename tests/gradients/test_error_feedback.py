"""Error feedback in training: what is lost between nodes comes back, is carried, saved and restored, or is refused."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from quantized_training import PAIR

import zerojax

# Blocks are larger than the shards of these tiny leaves.
pytestmark = pytest.mark.filterwarnings("ignore::zerojax.ZeroNotice")
PARAMS, BATCH = models.dense_init(jax.random.key(4)), models.dense_batches(1, 24)[0]


def make_layout(stage=3, **options):
    return models.make_layout(PARAMS, "2x4", stage, **PAIR, error_feedback=True, min_quantize_size=0, **options)


def test_the_mean_over_steps_becomes_exact():
    layout, steps = make_layout(), 8
    fn, wire = jax.jit(zerojax.value_and_grad(models.dense_loss, layout)), zerojax.init_wire_state(layout)
    stored, of_steps = layout.shard(PARAMS), []
    for _ in range(steps):
        _, grads, wire = fn(stored, BATCH, wire=wire)
        of_steps.append(layout.unshard(grads))
    want = jax.jit(jax.grad(models.dense_loss))(PARAMS, BATCH)

    def error(got, want):
        return np.linalg.norm(got - want) / np.linalg.norm(want)

    for path in (("first",), ("stack", "w"), ("last",)):
        exact, *got = (np.asarray(get(tree, path), np.float64) for tree in (want, *of_steps))
        # What is carried is bounded, so the error between nodes falls as 1 / steps from that of the first step, before
        # which nothing was lost; that of int8 inside the node stays (1 / 254).
        assert error(got[0], exact) > 1 / 127
        assert error(np.mean(got, axis=0), exact) < 2 / steps * error(got[0], exact) + 1 / 127, path


def get(tree, path):
    for key in path:
        tree = tree[key]
    return tree


@pytest.mark.parametrize(("stage", "microbatches"), [(3, 1), (1, 3)])
def test_it_is_carried_saved_and_restored_bit_for_bit(stage, microbatches, tmp_path):
    layout = make_layout(stage)
    tx = zerojax.zero(optax.sgd(1e-2), layout)
    step = jax.jit(zerojax.make_train_step(models.dense_loss, tx, layout, microbatches=microbatches, donate=False))
    state = zerojax.TrainState.create(layout.shard(PARAMS), tx, layout)
    for _ in range(2):
        state, _ = step(state, BATCH)
    lost = jax.tree.leaves(state.wire)
    # The first, the last and the stacked matrices; stacks of vectors lose nothing.
    assert sum(np.abs(np.asarray(x, np.float32)).max() > 0 for x in lost) == 3
    # Two nodes, each leaf split inside the node: a quarter of the leaf on each device.
    assert max(models.largest_shard(x) / (x.nbytes / 2) for x in lost) == 1 / 4
    zerojax.save(tmp_path / "run", state, layout, tx)
    restored = zerojax.restore(tmp_path / "run", layout, tx)
    for x in (*jax.tree.leaves(restored.wire),):
        assert x.dtype == jnp.bfloat16
    on, again = step(state, BATCH)[0], step(restored, BATCH)[0]
    for a, b in zip(*(jax.tree.leaves((s.params, s.wire)) for s in (on, again)), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        assert a.sharding == b.sharding


def test_what_does_not_fit_is_refused():
    layout = make_layout()
    fn = zerojax.value_and_grad(models.dense_loss, layout)
    right = zerojax.init_wire_state(layout)
    for wire in (None, right.feedback, zerojax.WireState({**right.feedback, "last": None}), zerojax.WireState()):
        with pytest.raises(ValueError, match=r"pass wire=zerojax.init_wire_state\(layout\)"):
            fn(layout.shard(PARAMS), BATCH, wire=wire)


def test_a_leaf_that_is_reduced_in_two_places_is_refused_by_its_path():
    layout = make_layout()

    def loss_fn(params, batch):  # one layer is used again after the loop over them
        return models.dense_loss(params, batch) + jnp.sum(batch["x"][:, :1] * jnp.sum(params["stack"]["w"]))

    fn = zerojax.value_and_grad(loss_fn, layout)
    with pytest.raises(ValueError, match=r"params\['stack'\]\['w'\] is reduced in more than one place"):
        jax.eval_shape(fn, layout.shard(PARAMS), BATCH, wire=zerojax.init_wire_state(layout))
