"""`zerojax doctor` on simulated devices and on two processes: what it measures, checks, and says it cannot know."""

import json
import sys
from pathlib import Path

import jax
import pytest

import pallas_kernels
import zerojax
from zerojax.planner import bandwidths, doctor
from zerojax.planner.cli import main
from zerojax.planner.gpus import load_target

sys.path.append(str(Path(__file__).parents[1] / "hosts"))
from processes import finish, start


def test_as_json_it_holds_what_was_measured_and_what_is_not_known_here(capsys):
    assert main(["doctor", "--json", "--sizes", "4096"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert found["mesh"]["axes"] == {"node": 1, "local": 8}
    assert found["software"]["jax"] == jax.__version__
    assert [(r["axis"], r["kind"]) for r in found["collectives"]] == [("local", kind) for kind in bandwidths.KINDS]
    assert all(r["is_right"] and r["bytes_per_second"] > 0 and r["size"] == 4096 for r in found["collectives"])
    assert found["copy"] > 0
    assert set(found["host"]) == {"to_host", "to_device"}
    assert all(rate > 0 for rate in found["host"].values())
    unknown = "\n".join(found["unknown"])
    for word in ("simulated devices", "over 'node'", "no GPU here to check", "give --target"):
        assert word in unknown
    assert found["plan"] is None


def test_in_words_it_plans_with_the_measured_bandwidths_for_a_target(capsys, monkeypatch, tmp_path):
    rates = [
        bandwidths.Rate(kind, axis, 1, 1.0, rate, True)
        for kind in bandwidths.KINDS
        for axis, rate in (("node", 1e9), ("local", 3e11))
    ]
    monkeypatch.setattr(doctor, "make_mesh", lambda: zerojax.make_mesh(num_nodes=2))
    monkeypatch.setattr(doctor, "measure_mesh", lambda mesh, sizes: rates)
    planned = []
    real = doctor.plan_workload
    monkeypatch.setattr(doctor, "plan_workload", lambda *args, **how: planned.append(how) or real(*args, **how))
    file = tmp_path / "measured.toml"
    assert main(["doctor", "gpt:18b", "--target", "h100", "--save-target", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "Mesh       node 2 x local 4" in printed
    assert "Plan       gpt:18b on NVIDIA H100" in printed
    assert "qwZ: do" in printed
    # Four devices of a node receive at once.
    assert (planned[0]["bandwidth"], planned[0]["target"].link_bandwidth) == (4e9, 3e11)
    # The command that it names plans the same machine.
    (command,) = (line for line in printed.splitlines() if "zerojax plan" in line)
    assert f"--nodes 2 --gpus-per-node 4 --recommend --target {file} --bandwidth 4GB/s" in command
    assert load_target(file) == planned[0]["target"]


def test_kernels_are_told_with_their_share_of_a_copy(monkeypatch):
    rates = {"takes_kernel": True, "reason": "equal to the reference, 0.50 of the time of XLA's program"}
    found = pallas_kernels.choice.Decision(**rates, ratio=0.5, bytes_per_second=1.5e12)
    monkeypatch.setattr(doctor.pallas_kernels, "decision", lambda variant: found)
    unknown = []
    kernels = doctor._kernels(2e12, unknown)
    assert unknown == []
    assert {one["of_a_copy"] for one in kernels.values()} == {0.75}
    record = {
        "software": {}, "devices": {"kinds": {}, "processes": 1, "in_each_process": 1}, "copy": 2e12, "host": None,
        "mesh": {"axes": {}, "why": ""}, "memory": {"host_free": None, "pinned": False, "device": None},
        "collectives": [], "kernels": kernels, "plan": None, "problems": [], "unknown": [],
    }  # fmt: skip
    assert "0.50 of the time of XLA's program, 1500 GB/s, 75% of a copy" in doctor.in_words(record)


@pytest.mark.parametrize("kind", bandwidths.KINDS)
@pytest.mark.parametrize("axis", ["node", "local"])
def test_rates_count_what_a_device_receives_and_values_are_checked(kind, axis, monkeypatch):
    mesh = zerojax.make_mesh(num_nodes=2, devices=jax.devices()[:6])
    monkeypatch.setattr(bandwidths, "_rounds", lambda function, given: iter([2.0, 0.5, 1.0]))
    rate = bandwidths.measure_collective(mesh, axis, kind, 12 << 10)
    devices = mesh.shape[axis]
    assert rate == bandwidths.Rate(kind, axis, 12 << 10, 0.5, (12 << 10) * (devices - 1) / devices / 0.5, True)
    moves = bandwidths._moves

    def broken(*args):
        move, taken, wanted = moves(*args)
        return (lambda x: move(x).at[3].add(1)), taken, wanted

    monkeypatch.setattr(bandwidths, "_moves", broken)
    assert not bandwidths.measure_collective(mesh, axis, kind, 12 << 10).is_right


def test_wrong_values_are_a_problem_and_the_exit_status(capsys, monkeypatch):
    rate = bandwidths.Rate("all-gather", "local", 64, 1.0, 1.0, False)
    monkeypatch.setattr(doctor, "measure_mesh", lambda mesh, sizes: [rate])
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "VALUES WRONG" in printed
    assert "Problem    all-gather over 'local' of 64 bytes gave wrong values" in printed


def test_a_driver_that_is_too_old_or_unused_is_a_problem(monkeypatch, tmp_path):
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n")
    monkeypatch.setattr(doctor, "_DRIVER", file)
    versions = {"jax": "0.10.2", "jaxlib": "0.10.1", "jax-cuda13-plugin": "0.10.2"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    found, problems = doctor._software(on_gpu=False)
    assert found["driver"] == "535.104.05"
    for text in ("jax 0.10.2 and jaxlib 0.10.1", "535.104.05 is too old for CUDA 13", "JAX runs on the CPU"):
        assert any(text in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--save-target", "absent/x.toml"], "the folder does not exist"),
        (["nonsense"], "MODULE:FUNCTION"),
        (["--sizes", "1MB"], "1MB"),
        (["--target", "v100"], "unknown GPU 'v100'"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "measure_mesh", lambda mesh, sizes: [])
    assert main(["doctor", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("zerojax doctor: ")
    assert message in lines[0]


@pytest.mark.aot
def test_two_processes_are_two_nodes_and_the_first_one_speaks():
    script = """
from zerojax.planner.cli import main
sys.exit(main(["doctor", "--json", "--sizes", "4096"]))
"""
    (first, spoken), (second, silent) = finish(start(script, 2, 2))
    assert (first, second) == (0, 0), spoken + silent
    found = json.loads(spoken[spoken.index("{") :])
    assert found["mesh"]["axes"] == {"node": 2, "local": 2}
    assert "2 processes with 2 devices each" in found["mesh"]["why"]
    assert {r["axis"] for r in found["collectives"]} == {"node", "local"}
    assert all(r["is_right"] for r in found["collectives"])
    assert "processes on CPUs" in found["unknown"][0]
    assert "{" not in silent
