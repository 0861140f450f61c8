"""The step with nothing on the wire: no collective over the data axes is left in it, and nothing else is changed."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.tuning.stand_ins import without_sending

CONFIGS = {
    "stage 1": zerojax.ZeroConfig(stage=1, min_shard_size=0),
    "ZeRO++": zerojax.ZeroConfig.zero_plus_plus(min_shard_size=0, min_quantize_size=0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_no_collective_is_left_and_results_keep_their_shapes(name):
    params = models.dense_init(jax.random.key(0))
    mesh = models.make_mesh("2x4")
    layout = zerojax.partition(params, mesh, CONFIGS[name])
    tx = zerojax.zero(optax.adamw(1e-3), layout)
    step = zerojax.make_train_step(models.dense_loss, tx, layout, on_nonfinite="ignore")
    state = zerojax.TrainState.create(layout.shard(params), tx, layout)
    (batch,) = models.dense_batches(1)
    traced = step.trace(state, batch)
    compiled = jax.jit(without_sending(traced, layout.config.axes)).lower(*jax.tree.leaves((state, batch))).compile()
    assert zerojax.read_program(traced.lower().compile(), mesh).collectives
    left = zerojax.read_program(compiled, mesh).collectives
    # The norm of the gradient is summed by the compiler, outside of what zerojax wrote: scalars.
    assert max((one.payload_bytes for one in left), default=0) <= 64
    results = compiled(*jax.tree.leaves((state, batch)))
    assert [x.shape for x in results] == [v.aval.shape for v in traced.jaxpr.jaxpr.outvars]


def test_collectives_over_other_axes_stay():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))

    def body(x):
        return lax.psum(x, "data") + lax.psum(2 * x, "model")

    summed = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(("data", "model")), out_specs=P(), check_vma=False))
    x = jnp.array([1.0, 10.0, 100.0, 1000.0])
    (alone,) = jax.jit(without_sending(summed.trace(x), ["data"]))(x)
    # On device 0: its own 1 instead of the sum over "data", and twice the sum over "model".
    np.testing.assert_allclose(alone.addressable_shards[0].data, [1 + 2 * 11.0])


def test_gathers_repeat_and_reductions_cut():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    def body(x):
        gathered = lax.all_gather(x, "data", tiled=True)
        stacked = lax.all_gather(x, "data")
        return gathered, stacked, lax.psum_scatter(gathered, "data", tiled=True), lax.all_to_all(gathered, "data", 0, 0)

    moved = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False))
    x = jnp.arange(4.0)
    traced = moved.trace(x)
    gathered, stacked, scattered, exchanged = jax.jit(without_sending(traced, ["data"]))(x)
    first = [y.addressable_shards[2].data for y in (gathered, stacked, scattered, exchanged)]
    for got, want in zip(first, ([2.0] * 4, [[2.0]] * 4, [2.0], [2.0] * 4), strict=True):
        np.testing.assert_array_equal(np.ravel(got), np.ravel(want))
