"""Simulated devices: their number, and collectives that never meet those of another place in the program."""

import concurrent.futures
import os
import re
import subprocess
import sys

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
    channels = channels_of(lowered)
    assert len(channels) == 14
    assert len(set(channels)) == 14


def for_gpus(fn):
    return fn.trace(jax.ShapeDtypeStruct((32, 256), jnp.float32)).lower(lowering_platforms=("cuda",)).as_text()


def channels_of(text):
    return re.findall(r"channel_handle<handle = (\d+)", text)


def test_programs_for_gpus_keep_the_channel_that_jax_gives_them():
    shape = jax.ShapeDtypeStruct((32, 256), jnp.float32)
    assert set(channels_of(for_gpus(on_a_mesh(collectives_beside_a_loop)))) == {"1"}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # while another thread lowers for the CPU
        gpus = [pool.submit(for_gpus, on_a_mesh(collectives_beside_a_loop)) for _ in range(8)]
        here = [on_a_mesh(collectives_beside_a_loop).lower(shape).as_text() for _ in range(8)]
    assert {channel for text in gpus for channel in channels_of(text.result())} == {"1"}
    assert all(len(set(channels_of(text))) == 14 for text in here)


@pytest.mark.parametrize("platforms", [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_program_is_exported_for_several_platforms(platforms):
    def every_kind(x):
        x = jax.lax.psum(x, "local") + jax.lax.pmax(x, "local") + jax.lax.axis_index("local")
        x = jax.lax.all_to_all(
            jax.lax.ppermute(x, "local", [(i, (i + 1) % 8) for i in range(8)]), "local", 1, 1, tiled=True
        )
        return jax.lax.psum_scatter(jax.lax.all_gather(x, "local", tiled=True), "local", tiled=True)

    exported = jax.export.export(on_a_mesh(every_kind), platforms=platforms)(
        jax.ShapeDtypeStruct((32, 256), jnp.float32)
    )
    assert exported.platforms == platforms


AFTER_THE_START = "JAX has started with {} CPU devices already"


def started_with(setting, *calls):
    """Runs `simulate_devices` with some arguments in a process of its own; the devices there are, or the error."""
    program = f"import jax, zerojax\n{'; '.join(calls)}\nprint(jax.device_count('cpu'))"
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "NPROC")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment | setting, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_the_number_is_what_was_asked_for_last_or_what_the_environment_gives():
    assert started_with({}, "zerojax.simulate_devices(8)", "zerojax.simulate_devices(3)") == "3"
    assert started_with({"JAX_NUM_CPU_DEVICES": "4"}, "zerojax.simulate_devices(8)") == "4"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"}
    assert started_with(flags, "zerojax.simulate_devices(8)", "jax.devices()", "zerojax.simulate_devices(8)") == "2"


def test_another_number_of_devices_after_the_start_is_refused():
    with pytest.raises(RuntimeError, match=r"simulate_devices\(3\): " + AFTER_THE_START.format(8)):
        zerojax.simulate_devices(3)
    late = "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'"
    assert AFTER_THE_START.format(1) in started_with({}, "jax.devices()", late, "zerojax.simulate_devices(8)")


@pytest.mark.parametrize("count", [0, -1, 2.0, "8", True, None])
def test_only_a_positive_integer_is_a_number_of_devices(count):
    with pytest.raises(ValueError, match="a positive integer is required"):
        zerojax.simulate_devices(count)
    zerojax.simulate_devices(np.int64(8))


def test_without_accelerators_jax_looks_for_the_cpu_alone_and_with_them_for_all(monkeypatch):
    """A CUDA plugin without a GPU greets with a page of traceback."""
    from zerojax.layout import simulated

    monkeypatch.setattr(simulated.glob, "glob", lambda pattern: ["/dev/nvidia0"] if "nvidia[" in pattern else [])
    assert simulated._may_have_accelerators()
    monkeypatch.undo()
    if simulated._may_have_accelerators():
        pytest.skip("this machine has accelerators")
    code = "import zerojax, jax; zerojax.simulate_devices(3); print(len(jax.devices()), jax.config.jax_platforms)"
    unset = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS", "NPROC")}
    run = subprocess.run([sys.executable, "-c", code], env=unset, capture_output=True, text=True, timeout=300)
    assert (run.stdout.split(), run.stderr) == (["3", "cpu"], "")
