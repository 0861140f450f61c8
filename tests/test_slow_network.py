"""The emulated cluster: what goes between its nodes is slow and counted, and nothing of it is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import emulated_cluster
import pytest

ROOT = Path(__file__).parents[1]
MISSING = emulated_cluster.what_is_missing()
needs_root = pytest.mark.skipif(MISSING is not None, reason=f"emulates a cluster: {MISSING}")


def left_behind():
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [name for name in names.split() if name.startswith("zerojax-")]


def start(*flags):
    command = [sys.executable, str(ROOT / "examples/slow_network.py"), "--layers", "1", "--d-model", "64", *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


@pytest.mark.aot
@needs_root
def test_a_technique_sends_what_was_predicted_and_the_cluster_is_removed(tmp_path):
    process = start("--variants", "ZeRO++", "--bandwidths", "100", "--steps", "2", "--out", str(tmp_path))
    printed, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors[-2000:]
    assert "at    100 Mbit/s" in printed
    (found,) = json.loads((tmp_path / "slow_network.json").read_text())
    (at,) = found["at"].values()
    # The interface counts headers and the exchange of the coordination service; XLA's CPU backend sends what is not
    # quantised in float32.
    assert 1 < at["sent"] / found["predicted"] < 3
    assert at["seconds"] > at["sent"] * 8 / 100e6  # no faster than the link
    assert (tmp_path / "slow_network.png").read_bytes().startswith(b"\x89PNG")
    assert not [name for name in left_behind() if name.startswith(f"zerojax-{process.pid}-")]


@pytest.mark.aot
@needs_root
def test_an_interrupt_removes_the_cluster():
    process = start("--variants", "stage 3", "--bandwidths", "100")
    mine = f"zerojax-{process.pid}-"
    deadline = time.monotonic() + 200
    while not [name for name in left_behind() if name.startswith(f"{mine}1")] and time.monotonic() < deadline:
        time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=200)
    assert not [name for name in left_behind() if name.startswith(mine)]


def test_without_root_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(emulated_cluster.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(emulated_cluster.os, "geteuid", lambda: 1000)
    assert "needs root" in str(emulated_cluster.what_is_missing())
    monkeypatch.setattr(emulated_cluster.shutil, "which", lambda name: None)
    assert "apt install iproute2" in str(emulated_cluster.what_is_missing())
