"""Any optax optimizer, sharded, is the optax optimizer: values, shardings that stay, one compilation.

Two ways in: the gradients of `zerojax.value_and_grad` at stage 3, with padding, and the optimizer alone inside the
user's own `jax.jit` with `jax.grad` at stages 1 and 2.
"""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import optax.contrib
import pytest
from tolerances import FLOAT32, MUON

import zerojax
from zerojax.optimizer.zero import ZeroState
from zerojax.planner.memory import model_state_bytes

STEPS = 3
TOLERANCE = {"muon": MUON}


def matrices_only(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def groups(tree):
    return {name: "frozen" if name == "last" else "trained" for name in tree}


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "adamw_schedule": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10), weight_decay=0.1),
    "clip_chain": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.adam(1e-2), optax.add_decayed_weights(-0.01)
    ),
    "masked": lambda: optax.masked(optax.adam(1e-2), matrices_only),
    "decay_mask": lambda: optax.adamw(1e-2, weight_decay=0.3, mask=matrices_only),
    "multi_transform": lambda: optax.multi_transform(
        {"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}, groups
    ),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.cosine_decay_schedule(0.01, 9)
    ),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9),
    "lion": lambda: optax.lion(1e-3),
    "lamb": lambda: optax.lamb(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "ema_of_updates": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
}
# What both ways in share was tried on all; the drop-in is compiled for those whose states differ most.
DROP_IN = [("adamw_schedule", 1), ("clip_chain", 2), ("adafactor", 1), ("multi_transform", 2), ("muon", 1)]


@functools.cache
def parameters():
    return models.dense_init(jax.random.key(1))


@functools.cache
def oracle(name):
    return models.train_plain(models.dense_loss, OPTIMIZERS[name](), parameters(), models.dense_batches(STEPS))


def train_and_check(name, layout, grad_fn):
    tx = zerojax.zero(OPTIMIZERS[name](), layout)
    params = layout.shard(parameters())
    state = tx.init(params)
    born = jax.tree.map(lambda x: x.sharding, (params, state))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        _, grads = grad_fn(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for batch in models.dense_batches(STEPS):
        params, state = step(params, state, batch)
    assert step._cache_size() == 1, "one compilation over all steps"
    assert jax.tree.map(lambda x: x.sharding, (params, state)) == born
    want, want_state, _, _ = oracle(name)
    tolerance = TOLERANCE.get(name, FLOAT32)
    assert models.largest_error(layout.unshard(params), want) < tolerance
    return state, want_state, tolerance


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_optimizer_equals_the_unsharded_one(name):
    layout = models.make_layout(parameters(), "1x7" if name in ("adafactor", "lamb", "clip_chain") else "2x4", 3)
    state, want_state, _ = train_and_check(name, layout, zerojax.value_and_grad(models.dense_loss, layout))
    # Every leaf of the state as large as a matrix is split; none is held in full by a device.
    for x in jax.tree.leaves(state):
        assert x.size < 24 * 5 or models.largest_shard(x) <= -(-x.nbytes // layout.num_shards), x.shape
    # Scalars of the state (counts, injected rates, norms) are those of the oracle.
    scalars = [x for x in jax.tree.leaves(state.inner) if x.ndim == 0]
    wanted = [x for x in jax.tree.leaves(want_state) if jnp.ndim(x) == 0]
    # A scalar parameter has scalar moments: only they are subject to rounding.
    np.testing.assert_allclose(np.array(scalars, np.float64), np.array(wanted, np.float64), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(("name", "stage"), DROP_IN)
def test_the_optimizer_alone_in_the_users_own_step_equals_the_unsharded_one(name, stage):
    layout = models.make_layout(parameters(), "2x4", stage)
    state, _, _ = train_and_check(name, layout, jax.value_and_grad(models.dense_loss))
    assert all(x.size < 24 * 5 or models.largest_shard(x) < x.nbytes for x in jax.tree.leaves(state))


def test_multi_steps_as_an_object():
    """optax.MultiSteps itself, which is no GradientTransformation but has init and update."""
    layout = models.make_layout(parameters(), "1x3", 1)
    tx = zerojax.zero(optax.MultiSteps(optax.sgd(0.1), 2), layout)  # type: ignore[arg-type]
    params = layout.shard(parameters())
    grads = jax.tree.map(jnp.ones_like, params)
    state = tx.init(params)
    first, state = tx.update(grads, state, params)
    second, state = tx.update(grads, state, params)
    assert float(jnp.abs(first["first"]).max()) == 0
    np.testing.assert_allclose(second["first"], -0.1, rtol=1e-6)


def test_values_that_depend_on_the_loss_are_passed_on():
    layout = models.make_layout(parameters(), "2x4", 3)
    plain = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0))
    tx = zerojax.zero(plain, layout)
    params, state = layout.shard(parameters()), None
    state, want_state = tx.init(params), plain.init(parameters())
    ones = jax.tree.map(jnp.ones_like, parameters())
    grads = layout.shard(ones)
    for value in (1.0, 1.0, 1.0, 1.0):
        updates, state = tx.update(grads, state, params, value=jnp.float32(value))
        want, want_state = plain.update(ones, want_state, parameters(), value=jnp.float32(value))
    assert models.largest_error(layout.unshard(updates), want) < 1e-6
    assert float(jnp.abs(layout.unshard(updates)["first"]).max()) < 0.1


def test_abstract_state_is_that_of_init():
    for name in ("adamw_schedule", "adafactor", "multi_transform"):
        layout = models.make_layout(parameters(), "1x7", 3)
        tx = zerojax.zero(OPTIMIZERS[name](), layout)
        born, abstract = tx.init(layout.shard(parameters())), tx.init(layout.param_shapes())
        assert jax.tree.structure(born) == jax.tree.structure(abstract)
        for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(born), strict=True):
            assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)


def test_a_history_of_updates_is_split_by_its_own_shape():
    """L-BFGS keeps (memory, *shape): the parameter's dim would be another one there."""
    params = {"w": jnp.ones((16, 24))}
    layout = models.make_layout(params, "2x4", 3)
    state = zerojax.zero(optax.scale_by_lbfgs(memory_size=3), layout).init(layout.shard(params))
    assert isinstance(state, ZeroState)
    history = [x for x in jax.tree.leaves(state.inner) if x.ndim == 3]
    assert history
    assert {x.addressable_shards[0].data.shape for x in history} == {(3, 16, 3)}


def test_init_makes_no_full_copy_of_a_state_leaf():
    """The compiled initialiser's results are shards, and it needs no temporary of a full leaf."""
    shapes = {"w": jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)}
    layout = models.make_layout(shapes, "2x4", 3)
    params = layout.init(lambda: {"w": jnp.ones((1024, 512), jnp.bfloat16)})
    state = zerojax.zero(optax.adam(1e-3), layout).init(params)
    assert max(models.largest_shard(x) for x in jax.tree.leaves(state)) == 1024 * 512 * 4 // 8


def test_keys_of_an_optimizer_are_state_like_any_other(tmp_path):
    """Noise is drawn from a typed key in the state: placed, counted, saved and restored."""
    params = {"w": jnp.ones((13, 4))}
    eight, three = models.make_layout(params, "2x4", 3), models.make_layout(params, "1x3", 1)
    plain = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1))
    tx, other = zerojax.zero(plain, eight), zerojax.zero(plain, three)
    state = zerojax.TrainState.create(eight.shard(params), tx)
    grads = eight.shard(params)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    state = state._replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)
    held = model_state_bytes(eight, tx).per_device.moments
    assert held == sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(opt_state))
    zerojax.save(tmp_path, state, eight, tx, step=1)
    again = zerojax.restore(tmp_path, three, other)
    first, _ = tx.update(grads, state.opt_state, state.params)
    second, _ = other.update(three.shard(params), again.opt_state, again.params)
    assert models.largest_error(three.unshard(second), eight.unshard(first)) < 1e-6  # the same draws, and the same sums


def test_frozen_leaves_have_no_gradient_no_state_and_do_not_move():
    params = {**parameters(), "table": jnp.arange(16 * 8).reshape(16, 8)}
    frozen = ("['first']", "['table']")
    layout = models.make_layout(params, "2x4", 3, trainable=lambda path, leaf: path not in frozen)

    def loss_fn(p, batch):
        return models.dense_loss({k: v for k, v in p.items() if k != "table"}, batch) + 0.0 * p["table"].sum()

    tx = zerojax.zero(optax.adamw(1e-2), layout)
    step = zerojax.make_train_step(loss_fn, tx, layout)
    state = zerojax.TrainState.create(layout.shard(params), tx)
    batches = models.dense_batches(2)
    grads = zerojax.value_and_grad(loss_fn, layout)(state.params, batches[0])[1]
    assert grads["first"] is None
    assert grads["table"] is None
    assert len(jax.tree.leaves(state.opt_state)) == 2 * 4 + 1  # two moments of four leaves, one counter
    for batch in batches:
        state, _ = step(state, batch)
    whole = layout.unshard(state.params)
    np.testing.assert_array_equal(whole["first"], params["first"])
    np.testing.assert_array_equal(whole["table"], params["table"])

    def plain_loss(trained, batch):
        return models.dense_loss({**trained, "first": params["first"]}, batch)

    trained = {k: v for k, v in parameters().items() if k != "first"}
    want, *_ = models.train_plain(plain_loss, optax.adamw(1e-2), trained, batches)
    assert models.largest_error({k: whole[k] for k in want}, want) < FLOAT32


def test_weights_stored_narrow_get_their_updates_in_two_bytes_and_keep_small_ones():
    """An update below the spacing of bfloat16 is not lost: it accumulates in the master."""
    params = {"w": jnp.ones((16, 8), jnp.bfloat16)}
    layout = models.make_layout(params, "2x4", 1)
    tx = zerojax.zero(optax.sgd(1e-3), layout)
    params = layout.shard(params)
    state = tx.init(params)
    for _ in range(8):  # 1 - 8e-3 rounds to 0.9921875 in bfloat16, while 1 - 1e-3 rounds to 1
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(np.asarray(params["w"], np.float32), 0.9921875)


def test_no_master_copy_where_none_is_wanted():
    params = {"w": jnp.ones((16, 8), jnp.bfloat16)}
    layout = models.make_layout(params, "2x4", 1, master_dtype=None)
    state = zerojax.zero(optax.adam(1e-3), layout).init(layout.shard(params))
    assert isinstance(state, ZeroState)
    assert not jax.tree.leaves(state.master)
    assert {x.dtype.name for x in jax.tree.leaves(state.inner)} == {"bfloat16", "int32"}
