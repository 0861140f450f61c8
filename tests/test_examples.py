"""The examples run as a user would run them, in short form, and reach what they claim."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

ROOT = Path(__file__).parents[1]
TINY = ("--layers", "2", "--d-model", "64", "--heads", "2", "--seq", "32", "--batch", "8")


def start_example(name: str, *flags: str, **environment: str) -> subprocess.Popen[str]:
    # Not the devices that conftest.py simulates: the script must do that itself.
    kept = " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
    environment |= {"XLA_FLAGS": kept, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / name), *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | environment, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    try:
        printed, errors = process.communicate(timeout=900)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-4000:]
    return printed


def run_example(name: str, *flags: str) -> str:
    return finish(start_example(name, *flags))


def train_gpt(out: Path, *flags: str) -> dict:
    printed = run_example("train_gpt.py", *TINY, "--steps", "4", "--out", str(out), *flags)
    assert "Bytes on one device" in printed
    assert (out / "losses_and_memory.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((out / "results.json").read_text())


# Which classes of training state a stage divides.
DIVIDED = {
    1: {"optimizer state", "gradients"},  # full only while the backward pass runs
    3: {"optimizer state", "gradients", "parameters"},
}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.aot), 3])
def test_each_stage_trains_as_plain_optax_does_and_holds_less(stage, tmp_path):
    plain, zero = train_gpt(tmp_path, "--stage", str(stage), "--precision", "float32")["runs"]
    # Equal up to the order of float32 sums: each loss is a mean over 256 bytes, and 4 steps do not amplify 1e-6 much.
    assert zero["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert zero["validation_loss"] == pytest.approx(plain["validation_loss"], rel=1e-5)
    for state, plain_bytes in plain["bytes"].items():
        part = zero["bytes"][state] / plain_bytes
        if state in DIVIDED[stage]:
            # An eighth, and the small leaves that stay replicated: less than a fifth of this tiny model.
            assert 1 / 8 <= part < 0.3, state
        else:
            assert part == 1, state


@pytest.mark.aot
def test_bfloat16_parameters_train_on_float32_master_weights(tmp_path):
    plain, zero = train_gpt(tmp_path, "--precision", "bfloat16")["runs"]
    # bfloat16 keeps 8 bits: 2**-9 relative in each rounding, a few of which differ with the order of sums.
    assert zero["losses"] == pytest.approx(plain["losses"], rel=2**-7)
    # 2 bytes a parameter, and 12 in the optimizer state: master weight and two moments.
    assert plain["bytes"]["optimizer state"] / plain["bytes"]["parameters"] == pytest.approx(6, rel=1e-3)
    assert zero["bytes"]["optimizer state"] < 0.3 * plain["bytes"]["optimizer state"]


@pytest.mark.aot
def test_dropout_remat_a_mesh_of_three_devices_and_a_run_that_is_started_again_bit_for_bit(tmp_path):
    flags = ("--dropout", "0.1", "--remat", "--nodes", "1", "--devices-per-node", "3", "--batch", "6", "--skip-plain")
    folder = tmp_path / "checkpoints"
    flags += ("--checkpoint", str(folder), "--checkpoint-every", "2")
    record = train_gpt(tmp_path, *flags)
    assert record["mesh"] == {"node": 1, "local": 3}
    (run,) = record["runs"]
    # A uniform guess over 256 bytes costs 5.55 nats; the first steps already do better.
    assert run["losses"][-1] < run["losses"][0] < 6
    assert sorted(os.listdir(folder)) == ["2", "4"]
    shutil.rmtree(folder / "4")  # as if the job had been killed after step 2
    (again,) = train_gpt(tmp_path, *flags)["runs"]
    assert (again["losses"], again["validation_loss"]) == (run["losses"], run["validation_loss"])


def free_port(lowest: int, highest: int) -> int:
    for port in range(lowest, highest):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise OSError(f"no free port from {lowest} to {highest}")


@pytest.mark.aot
def test_two_processes_of_a_launcher_train_together(tmp_path):
    # What Open MPI sets; JAX takes the coordinator's port from the job's number: 61440 + number modulo 4096.
    job = free_port(61440, 65535) - 61440
    flags = (*TINY, "--steps", "3", "--precision", "float32")
    processes = [
        start_example(
            "train_gpt.py",
            *flags,
            "--out",
            str(tmp_path / str(rank)),
            OMPI_MCA_orte_hnp_uri=f"{job}.0;tcp://127.0.0.1:1",
            OMPI_COMM_WORLD_SIZE="2",
            OMPI_COMM_WORLD_RANK=str(rank),
            OMPI_COMM_WORLD_LOCAL_RANK="0",
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            finish(process)
    finally:
        for process in processes:
            process.kill()
    record = json.loads((tmp_path / "0" / "results.json").read_text())
    assert not (tmp_path / "1").exists()
    assert record["mesh"] == {"node": 2, "local": 4}
    plain, zero = record["runs"]
    assert zero["losses"] == pytest.approx(plain["losses"], rel=1e-5)  # as on one process, above


@pytest.mark.aot
def test_the_linen_loop_learns():
    lines = [
        line.split() for line in run_example("train_linen.py", "--steps", "8").splitlines() if line.startswith("step")
    ]
    losses = [float(line[-1]) for line in lines]
    assert losses[-1] < losses[0]


def plain_loop(init_fn, loss_fn, key, batches):
    """What the README's loop replaces."""
    params, tx = init_fn(key), optax.adamw(3e-4)
    opt_state = tx.init(params)
    for batch in batches:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, loss


def test_the_loop_in_the_readme_runs_as_printed_and_equals_the_plain_one():
    (code,) = re.findall(r"```python\n(import functools.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

    def init_fn(key):
        first, second = jax.random.split(key)
        return {"in": jax.random.normal(first, (24, 1024)) / 5, "out": jax.random.normal(second, (1024, 24)) / 32}

    def loss_fn(params, batch):
        # A ramp over the hidden units: a permutation of them would show.
        hidden = jnp.tanh(batch @ params["in"]) * jnp.linspace(0.5, 1.5, 1024)
        return jnp.mean((hidden @ params["out"] - batch) ** 2)

    key = jax.random.key(0)
    batches = np.random.default_rng(0).standard_normal((3, 16, 24), dtype=np.float32)
    names = {"init_fn": init_fn, "loss_fn": loss_fn, "key": key, "batches": batches}
    exec(compile(code, "README.md", "exec"), names)
    params, loss = plain_loop(init_fn, loss_fn, key, batches)
    assert float(names["loss"]) == pytest.approx(float(loss), rel=1e-5)
    trained = names["layout"].unshard(names["params"])
    for name, expected in params.items():
        # Sums over 8 devices in another order differ by 1e-6 relative; Adam divides by the gradient's own size, so that
        # three steps of 3e-4 on weights of size 0.03 move by at most 3 * 3e-4 * 1e-3 where a gradient is near zero.
        np.testing.assert_allclose(trained[name], expected, atol=1e-6, err_msg=name)
        assert names["params"][name].addressable_shards[0].data.size == expected.size // 8


def test_the_cost_of_saving_is_measured_apart_for_the_call_and_for_the_steps_meanwhile(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import saving_cost

    cost = saving_cost.measure(megabytes=1, saves=1, rows=8, width=64)
    assert 0.9e6 < cost.state_bytes < 1.1e6
    assert 0 < cost.step < cost.written
    assert 0 < cost.call < cost.written, "save returns before the step is on disk"
    assert cost.ratio == cost.step_while_saving / cost.step
