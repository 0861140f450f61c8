"""A step that is not finite: its reason in the metrics, skipped or raised by choice, and the state never lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.training.nonfinite import FLOOR, GRADIENTS, LOSS, decide, init_nonfinite

FINE, BROKEN = jnp.bool_(True), jnp.bool_(False)


def loss_fn(params, batch):
    """The last term is zero, with a gradient of 0 * inf, where `root` is zero."""
    y = jnp.tanh(batch["x"].astype(params["w"].dtype) @ params["w"]).astype(jnp.float32)
    return jnp.mean(y**2) + jnp.mean(jnp.sqrt(batch["root"] * jnp.sum(params["w"].astype(jnp.float32)) ** 2))


def batch_of(seed, *, root=1.0, x=None):
    values = jax.random.normal(jax.random.key(seed), (16, 24))
    return {"x": values if x is None else values.at[13].set(x), "root": jnp.ones((16,)).at[5].set(root)}


def prepare(dtype, loss_scale=None, **config):
    params = {"w": jnp.linspace(-1, 1.5, 24 * 8).reshape(24, 8).astype(dtype)}
    mesh = zerojax.make_mesh(2, 4)
    layout = zerojax.partition(params, mesh, zerojax.ZeroConfig(min_shard_size=0, **config))
    tx = zerojax.zero(optax.adam(1e-2), layout)
    return layout, tx, zerojax.TrainState.create(layout.shard(params), tx, layout, loss_scale)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    ("policy", "loss", "grads", "at_floor", "stopped", "keeps", "counts"),
    [
        ("ignore", BROKEN, BROKEN, None, 0, False, (1, 1)),
        ("skip", FINE, BROKEN, None, 0, True, (0, 1)),
        ("skip", BROKEN, FINE, True, 0, True, (1, 0)),
        ("raise", FINE, FINE, None, 0, False, (0, 0)),
        ("raise", BROKEN, FINE, None, LOSS, True, (1, 0)),
        ("raise", BROKEN, BROKEN, None, LOSS + GRADIENTS, True, (1, 1)),
        ("raise", FINE, BROKEN, False, 0, True, (0, 1)),  # an overflow above the floor is what scaling is for
        ("raise", FINE, BROKEN, True, GRADIENTS + FLOOR, True, (0, 1)),
    ],
)
def test_what_becomes_of_a_step(policy, loss, grads, at_floor, stopped, keeps, counts):
    one = decide(init_nonfinite(), loss, grads, policy, None if at_floor is None else jnp.bool_(at_floor))
    assert (int(one.counts.stopped), bool(one.keeps_old)) == (stopped, keeps)
    assert (int(one.counts.loss_steps), int(one.counts.grad_steps)) == counts
    after = decide(one.counts, FINE, FINE, policy, None)
    assert int(after.counts.stopped) == stopped  # the mark stays,
    assert bool(after.keeps_old) == bool(stopped)  # and so does everything else


# Stage 1 alone, and ZeRO++ with all that it carries from step to step.
CONFIGS = [{"stage": 1}, {"quantize_weights": "int8", "quantize_gradients": ("int8", "int4"), "error_feedback": True}]


@pytest.mark.filterwarnings("ignore::zerojax.ZeroNotice")
@pytest.mark.parametrize("config", CONFIGS)
def test_raising_in_bfloat16_loses_nothing_and_names_the_step_and_the_reason(config):
    layout, tx, state = prepare(jnp.bfloat16, min_quantize_size=0, **config)
    step = zerojax.make_train_step(loss_fn, tx, layout, on_nonfinite="raise")
    state, first = step(state, batch_of(0))
    before = bits((state.params, state.opt_state, state.wire))
    state, failed = step(state, batch_of(1, root=0.0))  # one example, on one device
    state, _ = step(state, batch_of(2))  # in flight already when the host could know
    with pytest.raises(zerojax.NonFiniteError, match=r"^step 1: the gradient was not finite\. .* state\.resumed"):
        step(state, batch_of(3))
    with pytest.raises(zerojax.NonFiniteError, match="step 1"):
        state.check()
    assert bits((state.params, state.opt_state, state.wire)) == before
    assert (int(state.step), int(state.nonfinite.grad_steps), int(state.nonfinite.loss_steps)) == (1, 1, 0)
    # The metrics of earlier steps were not taken over by later ones.
    assert (int(first["stopped"]), int(failed["stopped"]), int(failed["skipped"])) == (0, GRADIENTS, 0)
    assert (bool(failed["loss_finite"]), bool(failed["grads_finite"])) == (True, False)
    state, metrics = step(state.resumed(), batch_of(3))
    state.check()
    assert (int(state.step), int(metrics["grads_nonfinite_steps"])) == (2, 1)
    assert step._cache_size() == 1


def test_a_float16_overflow_is_skipped_above_the_floor_and_stops_training_at_it(tmp_path):
    rule = zerojax.DynamicScale(initial=2.0, hysteresis=1)
    layout, tx, state = prepare(jnp.float16, rule)
    step = zerojax.make_train_step(loss_fn, tx, layout, loss_scale=rule)
    broken = batch_of(1, x=jnp.inf)
    before = bits((state.params, state.opt_state))
    scales = []
    for _ in range(3):
        state, metrics = step(state, broken)
        scales.append((float(metrics["loss_scale"]), int(metrics["skipped"]), int(metrics["stopped"])))
    # Skipped at 2, stopped at 1; the third was in flight already and changes nothing.
    assert scales == [(2, 1, 0), (1, 1, LOSS + GRADIENTS + FLOOR), (1, 1, LOSS + GRADIENTS + FLOOR)]
    with pytest.raises(zerojax.NonFiniteError, match="the gradient were not finite, with the loss scale at its floor"):
        step(state, batch_of(2))
    assert bits((state.params, state.opt_state)) == before
    # A checkpoint keeps the mark: whoever restores it is told, at the first call.
    zerojax.save(tmp_path / "it", state, layout, tx)
    restored = zerojax.restore(tmp_path / "it", layout, tx)
    assert bits(restored) == bits(state)
    with pytest.raises(zerojax.NonFiniteError, match=r"^step 1:"):
        step(restored, batch_of(2))


def test_the_first_scale_fits_a_float16_loss():
    """2**16 is no float16; times one over eight devices it is, and the step is not wasted."""
    layout, tx, state = prepare(jnp.float16, "float16")
    step = zerojax.make_train_step(
        lambda p, b: loss_fn(p, b).astype(jnp.float16) * 1e-3, tx, layout, loss_scale="float16", on_nonfinite="skip"
    )
    _, metrics = step(state, batch_of(0))
    assert bool(metrics["grads_finite"])
    assert float(metrics["loss_scale"]) == 2.0**16


@pytest.mark.parametrize("how", ["jit", "scan"])
def test_inside_a_jit_of_the_users_own_training_goes_on_and_says_so(how):
    """Nothing can be raised there: before, every later step stood still without a word."""
    layout, tx, state = prepare(jnp.float32)
    step = zerojax.make_train_step(loss_fn, tx, layout, on_nonfinite="raise", donate=False)
    batches = [batch_of(0), batch_of(1, x=jnp.nan), batch_of(2), batch_of(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)

    def train():
        if how == "scan":
            return jax.jit(lambda s, b: jax.lax.scan(step, s, b))(state, stacked)[0]
        return functools.reduce(lambda s, one: jitted(s, one)[0], batches, state)

    jitted = jax.jit(step)
    with pytest.warns(zerojax.ZeroNotice, match="cannot raise inside a jax.jit or scan of your own"):
        after = train()
    assert (int(after.step), int(after.skipped)) == (4, 1)
    with pytest.raises(zerojax.NonFiniteError, match=r"inside a jax\.jit .* the loss and the gradient were not "):
        after.check()
    with pytest.raises(zerojax.NonFiniteError):  # and so does the step itself, outside
        step(after, batches[0])
    after.resumed().check()
    want = state
    for one in (batches[0], batches[2], batches[3]):
        want, _ = step(want, one)
    for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(want.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)  # float32 in another program
