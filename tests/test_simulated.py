"""Simulated devices: their number, and collectives that never meet those of another place in the program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zerojax


def collectives_beside_a_loop(x: jax.Array) -> jax.Array:
    """Gathers in a loop, and equal ones after it that do not wait for it; local shards (4, 256)."""
    weights = jnp.eye(256) / 256

    def layer(carry, _):
        whole = jax.lax.all_gather(carry @ weights, "local", tiled=True)
        return jax.lax.psum_scatter(jnp.sin(whole @ weights), "local", tiled=True), None

    looped, _ = jax.lax.scan(layer, x, None, length=12)
    beside = x
    for _ in range(6):
        whole = jax.lax.all_gather(jnp.cos(beside @ weights), "local", tiled=True)
        beside = jax.lax.psum_scatter(whole @ weights, "local", tiled=True)
    return looped + beside


def on_a_mesh(fn, nodes=1, local=8):
    mesh = zerojax.make_mesh(nodes, local)
    spec = P(("node", "local"))
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def test_collectives_in_and_beside_a_loop_do_not_meet():
    x = np.random.default_rng(0).standard_normal((32, 256)).astype(np.float32)
    fn = on_a_mesh(collectives_beside_a_loop)
    weights = np.eye(256, dtype=np.float32) / 256
    looped, beside = x, x
    for _ in range(12):
        looped = np.sin(looped @ weights @ weights) * 8
    for _ in range(6):
        beside = np.cos(beside @ weights) @ weights * 8
    for _ in range(10):
        np.testing.assert_allclose(fn(x), looped + beside, rtol=1e-4)


def test_every_collective_of_a_program_has_its_own_channel():
    lowered = on_a_mesh(collectives_beside_a_loop).lower(jax.ShapeDtypeStruct((32, 256), jnp.float32)).as_text()
    channels = re.findall(r"channel_handle<handle = (\d+)", lowered)
    assert len(channels) == 14
    assert len(set(channels)) == 14


def test_programs_for_gpus_keep_the_channel_that_jax_gives_them():
    lowered = on_a_mesh(collectives_beside_a_loop).trace(jax.ShapeDtypeStruct((32, 256), jnp.float32))
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert set(re.findall(r"channel_handle<handle = (\d+)", text)) == {"1"}


def test_another_number_of_devices_after_the_start_is_refused():
    with pytest.raises(RuntimeError, match=r"simulate_devices\(3\): JAX has started with 8 CPU devices already"):
        zerojax.simulate_devices(3)


@pytest.mark.parametrize("count", [0, -1, 2.0, "8"])
def test_only_a_positive_integer_is_a_number_of_devices(count):
    with pytest.raises(ValueError, match="a positive integer is required"):
        zerojax.simulate_devices(count)
