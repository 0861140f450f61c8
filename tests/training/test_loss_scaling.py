"""Loss scaling, steps that are not finite, clipping: decisions from global values, the same on every device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.training.loss_scaling import DynamicScale, init_loss_scale, is_at_floor, loss_scale_rule, next_loss_scale

RULE = DynamicScale(initial=2.0**16, growth_interval=3, hysteresis=2, floor=2.0**15)


def parameters():
    return {"w": jnp.linspace(-1, 1, 24 * 8).reshape(24, 8), "b": jnp.linspace(0, 1, 8)}


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]).astype(jnp.float32) ** 2)


def batch_of(seed, dtype=jnp.float32):
    x, y = jax.random.normal(jax.random.key(seed), (48, 24)), jax.random.normal(jax.random.key(seed + 99), (48, 8))
    return {"x": x.astype(dtype), "y": y.astype(dtype)}


def layout_for(params, stage, shape=(2, 4), **config):
    mesh = zerojax.make_mesh(*shape, devices=jax.devices()[: shape[0] * shape[1]])
    return zerojax.partition(params, mesh, zerojax.ZeroConfig(stage=stage, min_shard_size=0, **config))


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def test_scale_follows_the_rule_step_by_step():
    outcomes = [True, True, True, False, True, False, False, False, True, True, True]
    # Three good steps double. The first overflow only uses up the hysteresis, the second and all later ones halve down
    # to the floor; a growth restores the hysteresis.
    expected = [2.0**16, 2.0**16, 2.0**17, 2.0**17, 2.0**17, 2.0**16, 2.0**15, 2.0**15, 2.0**15, 2.0**15, 2.0**16]
    state, seen = init_loss_scale(RULE), []
    for finite in outcomes:
        state = next_loss_scale(state, jnp.bool_(finite), RULE)
        seen.append(float(state.scale))
    assert seen == expected
    assert int(state.overflows_left) == RULE.hysteresis


def test_the_named_profile_starts_at_2_to_the_16_doubles_every_1000_good_steps_and_ends_at_1():
    rule = loss_scale_rule("float16")
    assert loss_scale_rule("bfloat16") is None
    advance = jax.jit(lambda state, finite: next_loss_scale(state, finite, rule))

    def run(state, *outcomes):
        seen = []
        for finite in outcomes:
            state = advance(state, jnp.bool_(finite))
            seen.append(float(state.scale))
        return state, seen

    state, seen = run(init_loss_scale(rule), *[True] * 999)
    assert set(seen) == {2.0**16}
    # One overflow uses up the hysteresis and begins the count of good steps anew; further ones halve, all the way to 1.
    state, seen = run(state, False, *[True] * 999)
    assert set(seen) == {2.0**16}
    state, seen = run(state, True)
    assert seen == [2.0**17]
    state, seen = run(state, *[False] * 20)
    assert seen == [2.0**17] + [2.0**e for e in range(16, 0, -1)] + [1.0] * 3
    assert bool(is_at_floor(state, rule))


def test_a_scale_that_nothing_limits_stays_a_number():
    """All gradients zero, as of a frozen model: an infinite scale would make them NaN permanently."""
    rule = DynamicScale(growth_interval=1)
    state = init_loss_scale(rule)
    for _ in range(200):
        state = next_loss_scale(state, jnp.bool_(True), rule)
    assert np.isfinite(float(state.scale))


@pytest.mark.parametrize(("stage", "shape"), [(1, (2, 4)), (2, (1, 3)), (3, (3, 2))])
def test_scaled_float16_training_equals_the_unscaled_one(stage, shape):
    # A power of two scales a float16 product exactly as long as nothing under- or overflows, which holds here: what
    # differs is the rounding of the reduced gradient to float16, one part in 2**11 of it, and three SGD steps of size
    # 0.1 carry it into the master copy as 3 * 0.1 * 2**-11 of the gradient, whose leaves are below 0.5.
    params = jax.tree.map(lambda x: x.astype(jnp.float16), parameters())
    layout = layout_for(params, stage, shape)
    tx = zerojax.zero(optax.sgd(0.1), layout)
    ends = []
    for rule in (None, DynamicScale(initial=2.0**10)):
        state = zerojax.TrainState.create(layout.shard(params), tx, loss_scale=rule)
        step = zerojax.make_train_step(loss_fn, tx, layout, loss_scale=rule)
        for seed in range(3):
            state, metrics = step(state, batch_of(seed, jnp.float16))
            assert bool(metrics["grads_finite"])
        ends.append(layout.unshard(state.params))
        assert step._cache_size() == 1
    for a, b in zip(jax.tree.leaves(ends[0]), jax.tree.leaves(ends[1]), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), atol=2.0**-10)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overflow_on_one_device_skips_the_step_on_all(stage):
    params = parameters()
    layout = layout_for(params, stage)
    tx = zerojax.zero(optax.adam(1e-2), layout)
    step = zerojax.make_train_step(loss_fn, tx, layout, loss_scale=RULE, donate=False)
    before, _ = step(zerojax.TrainState.create(layout.shard(params), tx, loss_scale=RULE), batch_of(0))
    broken = batch_of(1)
    broken["x"] = broken["x"].at[17].set(jnp.inf)  # one example, on one device
    after, metrics = step(before, broken)
    assert bits((after.params, after.opt_state)) == bits((before.params, before.opt_state))
    assert not bool(metrics["grads_finite"])
    assert (int(metrics["skipped"]), int(after.step)) == (1, 2)
    assert int(after.loss_scale.overflows_left) == 1
    for shards in (x.addressable_shards for x in jax.tree.leaves((after.loss_scale, after.skipped, metrics))):
        assert len({np.asarray(s.data).tobytes() for s in shards}) == 1


def test_skip_without_scaling_and_its_reason():
    params = parameters()
    layout = layout_for(params, 3)
    tx = zerojax.zero(optax.adam(1e-2), layout)
    state = zerojax.TrainState.create(layout.shard(params), tx)
    broken = batch_of(1)
    broken["y"] = broken["y"].at[3].set(jnp.nan)
    kept, metrics = zerojax.make_train_step(loss_fn, tx, layout, on_nonfinite="skip", donate=False)(state, broken)
    assert (bool(metrics["loss_finite"]), bool(metrics["grads_finite"])) == (False, False)
    assert bits(kept.params) == bits(state.params)
    spoiled, _ = zerojax.make_train_step(loss_fn, tx, layout, donate=False)(state, broken)
    assert not np.isfinite(np.asarray(spoiled.params["w"])).all()


@pytest.mark.parametrize("clip_norm", [0.05, 100.0])
def test_clipping_equals_that_of_optax(clip_norm):
    params = parameters()
    layout = layout_for(params, 3, (3, 2))
    tx = zerojax.zero(optax.sgd(0.1), layout)
    step = zerojax.make_train_step(loss_fn, tx, layout, clip_norm=clip_norm)
    state, metrics = step(zerojax.TrainState.create(layout.shard(params), tx), batch_of(0))
    plain = optax.chain(optax.clip_by_global_norm(clip_norm), optax.sgd(0.1))
    grads = jax.grad(loss_fn)(params, batch_of(0))
    updates, _ = plain.update(grads, plain.init(params), params)
    for a, b in zip(
        jax.tree.leaves(layout.unshard(state.params)),
        jax.tree.leaves(optax.apply_updates(params, updates)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # float32 sums in another order
    norm = float(optax.tree.norm(grads))
    np.testing.assert_allclose(float(metrics["grad_norm"]), norm, rtol=1e-5)
    np.testing.assert_allclose(float(metrics["clipped_norm"]), min(norm, clip_norm), rtol=1e-5)


def test_scale_and_counters_survive_a_checkpoint(tmp_path):
    params = parameters()
    layout = layout_for(params, 3)
    tx = zerojax.zero(optax.adam(1e-2), layout)
    state = zerojax.TrainState.create(layout.shard(params), tx, loss_scale=RULE)
    step = zerojax.make_train_step(loss_fn, tx, layout, loss_scale=RULE, on_nonfinite="skip", donate=False)
    broken = batch_of(1)
    broken["x"] = broken["x"].at[0].set(jnp.nan)
    for batch in (batch_of(0), broken, broken):
        state, _ = step(state, batch)
    zerojax.save(tmp_path / "it", state, layout, tx)
    again = zerojax.restore(tmp_path / "it", layout, tx)
    assert bits(again) == bits(state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert (float(again.loss_scale.scale), int(again.skipped)) == (2.0**15, 2)


def test_bad_settings_are_refused_in_words():
    params = parameters()
    layout = layout_for(params, 3)
    tx = zerojax.zero(optax.sgd(0.1), layout)
    with pytest.raises(ValueError, match="floor > 0"):
        DynamicScale(floor=0.0)
    with pytest.raises(ValueError, match="use 'ignore', 'skip' or 'raise'"):
        zerojax.make_train_step(loss_fn, tx, layout, on_nonfinite="stop")
    with pytest.raises(ValueError, match="must not be applied; use 'skip' or 'raise'"):
        zerojax.make_train_step(loss_fn, tx, layout, on_nonfinite="ignore", loss_scale="float16")
    with pytest.raises(ValueError, match="use 'float16', 'bfloat16', a DynamicScale or None"):
        zerojax.make_train_step(loss_fn, tx, layout, loss_scale="fp8")
    with pytest.raises(ValueError, match="positive norm"):
        zerojax.make_train_step(loss_fn, tx, layout, clip_norm=0.0)
    state = zerojax.TrainState.create(layout.shard(params), tx)
    with pytest.raises(ValueError, match="the same rule"):
        zerojax.make_train_step(loss_fn, tx, layout, loss_scale=RULE)(state, batch_of(0))
