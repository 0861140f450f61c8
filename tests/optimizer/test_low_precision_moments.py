"""Adam with moments in bfloat16 and in 8-bit blocks: split like the parameters, no communication, the same training."""

import functools
import math

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest

import zerojax
from zerojax.hlo.program import memory_figures, read_program
from zerojax.optimizer.moments import BlockMoment
from zerojax.planner.gpus import target_mesh
from zerojax.planner.memory import model_state_bytes

KINDS = ("bfloat16", "int8")


def low_precision(moments, **options):
    return zerojax.scale_by_low_precision_adam(moments=moments, **{"min_quantize_size": 0, **options})


@functools.cache
def parameters():
    return models.transformer_init(jax.random.key(0))


def gradients(count):
    """Gradients whose size differs along each dim by a factor of ten."""

    def draw(key, *shape):
        out = jax.random.normal(key, shape)
        for d, n in enumerate(shape):
            out *= 10.0 ** jnp.linspace(-1, 0, n).reshape((n, *(1,) * (len(shape) - 1 - d)))
        return out

    return [{"a": draw(key, 40, 96), "b": draw(key, 3, 130, 48)} for key in jax.random.split(jax.random.key(9), count)]


@pytest.mark.parametrize(("moments", "expected"), [("bfloat16", 0.008), ("int8", 0.085)])
def test_updates_are_those_of_float32_moments_up_to_their_rounding(moments, expected):
    """Stochastic rounding to steps of q errs by q / sqrt(6) on the average. The first moment remembers 1 / (1 - 0.81)
    such errors, the second all of the 30 so far: 0.94 q of the first and 2.2 q of the root of the second.

    bfloat16: q is 2^-8 at most, of the first moment and of the second, which the root halves: 0.4 % and 0.4 %.
    int8: q is 1/127 of the largest ratio in a block, 2.9 times the typical one: 2 %; and of the largest root in it,
    from one to ten times that of a coordinate, 4.6 times on the (square) average of such sizes: 8 %. Together 8.2 %.
    """
    grads = gradients(30)
    plain, rounded = optax.scale_by_adam(), low_precision(moments)
    state, other = plain.init(grads[0]), rounded.init(grads[0])
    step, other_step = jax.jit(plain.update), jax.jit(rounded.update)
    for one in grads:
        want, state = step(one, state)
        got, other = other_step(one, other)
        for name in want:
            error = jnp.linalg.norm(got[name] - want[name]) / jnp.linalg.norm(want[name])
            assert error < expected, (name, float(error))


@functools.cache
def losses(moments):
    batches = models.token_batches(3, 24) * 9
    core = optax.scale_by_adam() if moments == "float32" else low_precision(moments)
    tx = optax.chain(core, optax.scale(-3e-3))
    return models.train_plain(models.transformer_loss, tx, parameters(), batches)[2]


@pytest.mark.aot
@pytest.mark.parametrize("moments", KINDS)
def test_training_loses_as_much_as_with_float32_moments(moments):
    """To first order the loss falls by the gradient times the updates. Their errors (0.8 and 8 %, above) are random
    with mean zero, and a sum over thousands of coordinates and 27 steps averages them: to less than 1 %."""
    want, got = losses("float32"), losses(moments)
    fall = want[0] - want[-1]
    assert fall > 1
    assert abs(got[-1] - want[-1]) < 0.01 * fall


@pytest.mark.parametrize("moments", KINDS)
def test_a_second_moment_follows_gradients_that_become_small(moments):
    """Rounded to nearest it would stand still, since each update changes it by less than half a step."""
    tx = low_precision(moments, b2=0.99)
    params = {"w": jnp.ones((64, 64))}
    state = tx.init(params)
    step = jax.jit(tx.update)
    for i in range(300):
        grads = {"w": jnp.full((64, 64), 1.0 if i < 50 else 0.1)}
        update, state = step(grads, state)
    # v = 0.01 + 0.4 * 0.99^250 after the change, of which 0.033 remain: m / sqrt(v) = 0.1 / 0.21 on the average.
    second = 0.01 + (1 - 0.99**50 - 0.01 * (1 - 0.99**50)) * 0.99**250
    assert float(jnp.mean(update["w"])) == pytest.approx(0.1 / math.sqrt(second), rel=0.05)


@pytest.mark.parametrize("moments", KINDS)
@pytest.mark.parametrize(("mesh", "stage"), [("2x4", 3), ("1x3", 1)])
def test_sharded_is_the_same_as_on_one_device(moments, mesh, stage):
    params = gradients(1)[0]
    layout = models.make_layout(params, mesh, stage)
    plain = zerojax.low_precision_adamw(1e-2, moments=moments, min_quantize_size=0, block_size=16)
    tx = zerojax.zero(plain, layout)
    state, want_state = tx.init(layout.shard(params)), plain.init(params)
    step, want_step = jax.jit(tx.update), jax.jit(plain.update)
    for one in gradients(3):
        updates, state = step(layout.shard(one), state, layout.shard(params))
        want, want_state = want_step(one, want_state, params)
        # The draws of the rounding are the same; where the compilers differ by an ulp, a value may round the other way.
        got = layout.unshard(updates)
        for name in want:
            assert np.mean(np.abs(got[name] - want[name]) > 1e-5 * np.abs(want[name]).max()) < 1e-3
    assert step._cache_size() == 1
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.inner))
    assert model_state_bytes(layout, tx).per_device.moments == held
    for leaf in jax.tree.leaves(state.inner):
        assert leaf.ndim < 2 or models.largest_shard(leaf) <= -(-leaf.nbytes // layout.num_shards) * 1.2, leaf.shape


def test_saved_and_restored_into_another_layout(tmp_path):
    params = {"w": jax.random.normal(jax.random.key(0), (96, 40)), "b": jnp.ones((7,))}
    eight, three = models.make_layout(params, "2x4", 3), models.make_layout(params, "1x3", 1)
    plain = zerojax.low_precision_adamw(1e-2, min_quantize_size=0, block_size=16)
    tx, other = zerojax.zero(plain, eight), zerojax.zero(plain, three)
    state = zerojax.TrainState.create(eight.shard(params), tx)
    _, opt_state = tx.update(eight.shard(params), state.opt_state, state.params)
    zerojax.save(tmp_path, state._replace(opt_state=opt_state), eight, tx, step=1)
    back = zerojax.restore(tmp_path, three, other).opt_state
    first, _ = tx.update(eight.shard(params), opt_state, state.params)
    second, _ = other.update(three.shard(params), back, three.shard(params))
    assert models.largest_error(three.unshard(second), eight.unshard(first)) < 1e-5


@pytest.mark.needs_cuda_plugin
def test_on_gpus_nothing_is_communicated_and_memory_is_as_predicted():
    mesh = target_mesh("h100", 2, 8)
    shapes = {"stack": (4, 1024, 2048), "tall": (4096, 1000), "bias": (2048,)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    layout = zerojax.partition(params, mesh, zerojax.ZeroConfig(stage=3, min_shard_size=1024))
    tx = zerojax.zero(zerojax.low_precision_adamw(1e-3), layout)
    stored = layout.param_shapes()
    state = tx.init(stored)
    compiled = jax.jit(lambda g, s, p: tx.update(g, s, p), donate_argnums=(1,)).lower(stored, state, stored).compile()
    assert not read_program(compiled, mesh).collectives
    figures, held = memory_figures(compiled), model_state_bytes(layout, tx).per_device
    assert figures is not None
    assert figures.argument == held.params + held.grads + held.moments
    assert figures.alias == held.moments, "moments are updated in place"
    elements = sum(map(math.prod, shapes.values()))
    # Two levels of a byte and two scales of two bytes for 64 of them, and the float32 moments of the bias; "tall" has
    # 1000 columns, the last of whose 16 blocks is not full.
    blocks = 2 * (4 * 1024 * 2048 + 4096 * 1024) * (1 + 2 / 64)
    assert held.moments == pytest.approx((blocks + 2 * 2048 * 4) / 16, rel=1e-3)
    assert held.moments * 16 / elements == pytest.approx(2.08, abs=0.02)


def test_blocks_that_do_not_fit_the_shards_are_named():
    """No dim but that of the blocks divides: parts of 5 elements do not hold whole blocks of 16."""
    params = {"w": jnp.ones((41, 40))}
    layout = models.make_layout(params, "2x4", 3)
    assert layout.leaves[0].dim == 1
    with pytest.warns(zerojax.ZeroNotice, match=r"\['w'\].*dim 1.*block_size"):
        state = zerojax.zero(low_precision("int8", block_size=16), layout).init(layout.shard(params))
    assert isinstance(state.inner.mu["w"], BlockMoment)


def test_blocks_of_tensor_parallel_leaves_are_split_over_their_axis():
    mesh = zerojax.make_mesh(2, 4, model=2)
    params = {"w": jnp.ones((96, 64)), "v": jnp.ones((64, 96))}
    specs = {"w": jax.sharding.PartitionSpec(None, "model"), "v": jax.sharding.PartitionSpec(None, "model")}
    layout = zerojax.partition(params, mesh, zerojax.ZeroConfig(min_shard_size=0), specs=specs)
    tx = zerojax.zero(low_precision("int8", block_size=16), layout)
    stored = layout.shard(params)
    state = tx.init(stored)
    step = jax.jit(tx.update)
    _, after = step(stored, state, stored)
    moments = {name: after.inner.mu[name].qvalue for name in params}
    # "w" has its blocks along the dim that tensor parallelism splits, "v" along the one that the data axes split.
    assert moments["w"].addressable_shards[0].data.shape == (96 // 4, 64 // 16 // 2, 16)
    assert moments["v"].addressable_shards[0].data.shape == (96 // 2, 64 // 16 // 4, 16)
    assert jax.tree.map(lambda x: x.sharding, after) == jax.tree.map(lambda x: x.sharding, state)


def test_a_gradient_that_is_not_finite_is_not_laundered():
    for moments in KINDS:
        tx = low_precision(moments)
        grads = {"w": jnp.ones((32, 32)).at[3, 4].set(jnp.nan)}
        step = jax.jit(tx.update)
        update, state = step(grads, tx.init(grads))
        again, _ = step({"w": jnp.ones((32, 32))}, state)
        assert not jnp.isfinite(update["w"][3, 4])
        assert not jnp.isfinite(again["w"][3, 4])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moments": "int4"}, "use 'bfloat16' or 'int8'"),
        ({"b2": 1.0}, "both must be in"),
        ({"block_size": 48}, "power"),
    ],
)
def test_arguments_outside_their_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        zerojax.scale_by_low_precision_adam(**options)
