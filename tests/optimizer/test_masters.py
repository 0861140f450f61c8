"""Master weights: edited parameters win, element by element; unedited ones are their master, rounded, bit for bit."""

import functools
import math

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest

import zerojax
from zerojax.hlo.program import read_program
from zerojax.planner.gpus import target_mesh

RATE = 2.0**-6  # times a gradient it is exact, so that no fused multiplication rounds otherwise than another
DTYPES = [jnp.bfloat16, jnp.float16]


def parameters(dtype, rows=13):
    """A padded leaf, one that divides, a scalar, and one that is trained in float32."""
    draw = np.random.default_rng(0)
    shapes = {"padded": (rows, 10), "even": (56, 8), "gain": ()}
    params = {name: jnp.asarray(draw.normal(size=shape), dtype) for name, shape in shapes.items()}
    return {**params, "wide": jnp.ones((16, 8), jnp.float32)}


def gradients(layout, seed):
    draw = np.random.default_rng(seed)
    return {k: jnp.asarray(draw.normal(size=p.shape), p.dtype) for k, p in layout.placements.items()}


def prepare(stage, dtype, mesh="1x7", tx=None):
    params = parameters(dtype)
    layout = models.make_layout(params, mesh, stage)
    tx = zerojax.zero(optax.sgd(RATE, momentum=0.5) if tx is None else tx, layout)
    stored = layout.shard(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return layout, step, stored, tx.init(stored)


def whole_masters(layout, state):
    return {k: np.asarray(m)[tuple(map(slice, layout.placements[k].shape))] for k, m in state.master.items()
            if m is not None}  # fmt: skip


def bits(tree):
    return {k: np.asarray(x).tobytes() for k, x in tree.items()}


EDITS = {
    "prune": lambda x: x * (np.arange(x.size).reshape(x.shape) % 3 > 0),
    "load": lambda x: np.full(x.shape, 5.0),
    "nudge": lambda x: x * 1.01,  # two spacings of bfloat16
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_edited_elements_win_and_their_neighbours_keep_every_bit(stage, dtype):
    layout, step, params, state = prepare(stage, dtype)
    params, state = step(params, state, gradients(layout, 1))
    before, masters = layout.unshard(params), whole_masters(layout, state)
    params_kept, state_kept = step(params, state, gradients(layout, 2))
    kept, kept_masters = layout.unshard(params_kept), whole_masters(layout, state_kept)
    for edit in EDITS.values():
        changed = {k: jnp.asarray(edit(np.asarray(x, np.float32)), x.dtype) for k, x in before.items()}
        edited, state_edited = step(layout.shard(changed), state, gradients(layout, 2))
        got, got_masters = layout.unshard(edited), whole_masters(layout, state_edited)
        for k, new in got_masters.items():
            moved = np.asarray(changed[k]) != np.asarray(before[k])
            assert moved.any()
            wide = np.asarray(changed[k], np.float32)
            step_taken = kept_masters[k] - masters[k]  # the same momentum, to the rounding of two float32 sums
            np.testing.assert_allclose(new[moved], (wide + step_taken)[moved], rtol=0, atol=2.0**-22 * 8)
            np.testing.assert_array_equal(new[~moved], kept_masters[k][~moved])
            np.testing.assert_array_equal(np.asarray(got[k])[~moved], np.asarray(kept[k])[~moved])
    assert state.master["wide"] is None


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_edits_masters_are_those_of_plain_float32_training(stage, dtype):
    """Bit for bit, over 4000 elements and ten steps: ties, changes of sign and what is subnormal in float16 are among
    them. After each step the parameter is its master, rounded."""
    draw = np.random.default_rng(1)
    start = draw.normal(size=(41, 100)) * 2.0 ** draw.integers(-14, 1, (41, 100))
    params = {"w": jnp.asarray(start, dtype)}
    layout = models.make_layout(params, "2x4", stage)
    tx, plain = zerojax.zero(optax.sgd(RATE), layout), optax.sgd(RATE)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    stored, wide = layout.shard(params), {"w": params["w"].astype(jnp.float32)}
    state, plain_state = tx.init(stored), plain.init(wide)
    for _ in range(10):
        grads = {"w": jnp.asarray(draw.normal(size=(41, 100)), dtype)}
        stored, state = step(stored, state, grads)
        updates, plain_state = plain.update(jax.tree.map(lambda g: g.astype(jnp.float32), grads), plain_state)
        wide = optax.apply_updates(wide, updates)
        assert bits(whole_masters(layout, state)) == bits(wide)
        assert bits(layout.unshard(stored)) == bits({"w": wide["w"].astype(dtype)})


@pytest.mark.parametrize("stage", [1, 3])
def test_a_weight_that_almost_vanishes_in_one_step_is_no_edit(stage):
    """From 1 to 2^-20 of it: float32 holds the new weight, but not its difference to the old one."""
    params = {"w": jnp.ones((16, 8), jnp.bfloat16)}
    layout = models.make_layout(params, "2x4", stage)
    tx = zerojax.zero(optax.sgd(1.0), layout)
    small = 2.0**-20 * np.linspace(1, 1.99, 128).reshape(16, 8)
    stored = layout.shard(params)
    updates, state = tx.update({"w": jnp.asarray(1 - small, jnp.float32)}, tx.init(stored), stored)
    stored = optax.apply_updates(stored, updates)
    master = np.asarray(state.master["w"])
    np.testing.assert_array_equal(np.asarray(stored["w"]), np.asarray(jnp.asarray(master).astype(jnp.bfloat16)))
    np.testing.assert_allclose(master, small, rtol=0, atol=2.0**-24)  # the float32 spacing below 1
    _, after = tx.update({"w": jnp.zeros((16, 8))}, state, stored)
    np.testing.assert_array_equal(np.asarray(after.master["w"]), master)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_skipped_step_keeps_the_edit_for_the_next(stage, dtype):
    params = {"w": jnp.ones((13, 8), dtype)}
    layout = models.make_layout(params, "2x4", stage)
    tx = zerojax.zero(optax.sgd(2.0**-4), layout)
    scale = "float16" if dtype == jnp.float16 else None
    step = zerojax.make_train_step(
        lambda p, x: jnp.mean(x @ p["w"]).astype(jnp.float32), tx, layout, loss_scale=scale, on_nonfinite="skip"
    )
    state = zerojax.TrainState.create(layout.shard(params), tx, loss_scale=scale)
    x = jnp.ones((8, 13), dtype)
    state, _ = step(state, x)
    state = state._replace(params=layout.shard({"w": jnp.full((13, 8), 3.0, dtype)}))
    state, metrics = step(state, x * jnp.nan)
    assert int(metrics["skipped"]) == 1
    np.testing.assert_array_equal(np.asarray(layout.unshard(state.params)["w"], np.float32), 3.0)
    state, _ = step(state, x)
    want = 3.0 - 2.0**-4 / 8
    np.testing.assert_array_equal(whole_masters(layout, state.opt_state)["w"], np.float32(want))


def test_loading_parameters_alone_from_a_checkpoint_is_an_edit(tmp_path):
    layout, step, params, state = prepare(1, jnp.bfloat16)
    other = layout.shard(jax.tree.map(lambda x: x * 2, parameters(jnp.bfloat16)))
    zerojax.save(tmp_path / "it", other, layout)
    params, state = step(params, state, gradients(layout, 1))
    loaded = zerojax.restore(tmp_path / "it", layout)
    after, _ = step(loaded, state, jax.tree.map(jnp.zeros_like, gradients(layout, 1)))
    # The momentum of the first step moves on: half of it, times the rate.
    want = jax.tree.map(lambda x, g: x - RATE * 0.5 * g, layout.unshard(other), gradients(layout, 1))
    assert models.largest_error(jax.tree.map(jnp.float32, layout.unshard(after)),
                                jax.tree.map(jnp.float32, want)) < 2.0**-8  # fmt: skip


@pytest.mark.needs_cuda_plugin
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_looking_for_edits_sends_nothing(stage, dtype):
    """Compiled for 2 x 8 H100: all that the update sends is what it gathers anyway, in the narrow dtype."""
    mesh = target_mesh("h100", 2, 8)
    shapes = {"even": (1024, 512), "padded": (1000, 509), "small": (7,)}
    params = {k: jax.ShapeDtypeStruct(s, dtype) for k, s in shapes.items()}
    layout = zerojax.partition(params, mesh, zerojax.ZeroConfig(stage=stage))
    tx = zerojax.zero(optax.adam(1e-3), layout)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    held = layout.param_shapes()
    grads = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.padded_shape, p.dtype, sharding=layout.shard_sharding(p)), layout.placements
    )
    program = read_program(jax.jit(step, donate_argnums=(0, 1)).lower(held, tx.init(held), grads).compile(), mesh)
    sent = {(c.kind, c.axes, c.payload_bytes) for c in program.collectives}
    gathered = sum(2 * math.prod(p.padded_shape) for p in layout.leaves if p.is_sharded)
    hops = {("all-gather", ("node",), gathered // 8), ("all-gather", ("local",), gathered)}  # 8 in a node
    assert sent == (set() if stage == 3 else hops)
    assert len(program.collectives) == len(sent)
