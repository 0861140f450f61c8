"""The command `zerojax plan`: output for people and machines, and one line with a non-zero exit for what is wrong."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from zerojax.planner import cli

MODULE = """
import jax, jax.numpy as jnp, optax

def loss(params, x):
    return jnp.mean((x @ params["w"]).astype(jnp.float32) ** 2)

PARAMS = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
BATCH = jax.ShapeDtypeStruct((1536, 1024), jnp.bfloat16)

def four():
    return loss, PARAMS, BATCH, optax.adam(1e-3)

def fields():
    from zerojax.planner.workload import Workload
    return Workload(loss, PARAMS, BATCH, optax.adam(1e-3), name="mine")

def wrong_shapes():
    return loss, {"w": jax.ShapeDtypeStruct((7, 1024), jnp.bfloat16)}, BATCH, optax.adam(1e-3)

def wrong_result():
    return loss

def fails():
    return {}["absent"]

value = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "planned_model.py").write_text(MODULE)
    (tmp_path / "broken_model.py").write_text("absent_name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("planned_model", None)
    return tmp_path


def run(capsys, *arguments):
    status = cli.main(["plan", *arguments])
    output = capsys.readouterr()
    return status, output.out, output.err


@pytest.mark.parametrize("function", ["four", "fields"])
def test_a_users_function_is_planned(here, capsys, function):
    status, out, _ = run(capsys, f"planned_model:{function}", "--no-compile", "--json", "--stage", "2")
    assert status == 0
    plan = json.loads(out)
    assert plan["model"] == ("mine" if function == "fields" else f"planned_model:{function}")
    assert (plan["parameters"], plan["examples_per_device"]) == (1024 * 1024, 4)  # 1536 examples on 48 x 8
    (one,) = plan["configs"]
    assert one["config"]["stage"] == 2
    assert one["memory"]["classes"]["params"] == 2 * 1024 * 1024


def test_options_become_the_configuration(here, capsys):
    _, out, _ = run(
        capsys, "planned_model:four", "--no-compile", "--json", "--nodes", "2", "--gpus-per-node", "4",
        "--zero-plus-plus",
        "--quantize-gradients", "int8,int8", "--error-feedback", "--bandwidth", "100Gbit/s", "--target", "b200",
        "--examples-per-device", "2", "--microbatches", "3",
    )  # fmt: skip
    plan = json.loads(out)
    config = plan["configs"][0]["config"]
    assert [f["bits"] for f in config["quantize_gradients"]] == [8, 8]
    assert config["quantize_weights"]["bits"] == 8
    assert config["secondary"]
    assert config["error_feedback"]
    assert plan["links"]["node_bandwidth"] == 12.5e9
    assert plan["target"]["name"] == "NVIDIA B200"
    assert (plan["num_nodes"], plan["devices_per_node"], plan["examples_per_device"], plan["microbatches"]) == (
        2,
        4,
        2,
        3,
    )


def test_people_get_tables_and_a_recommendation(here, capsys):
    status, out, err = run(capsys, "gpt:18b", "--no-compile", "--recommend", "--plot", "plan.png")
    assert status == 0
    parts = (
        "18.4B parameters", "3 qwZ hpZ qgZ", "Memory per device", "Replicated on every device", "between nodes",
        "Communication: GB per step", "least exposed communication that fits", "does not fit: stage 0",
    )  # fmt: skip
    for wanted in parts:
        assert wanted in " ".join(out.split()), wanted
    picture = (here / "plan.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    assert max(map(len, out.splitlines())) <= 80
    assert "Traceback" not in err


@pytest.mark.aot
def test_a_compiled_plan_shows_prediction_and_program_side_by_side(here, capsys):
    status, out, _ = run(capsys, "planned_model:four", "--nodes", "1", "--gpus-per-node", "2", "--trace", "step.json")
    assert status == 0
    assert "The trace of stage 3: step.json" in out
    assert json.loads((here / "step.json").read_text())["traceEvents"]
    for wanted in (
        "arguments, predicted",
        "arguments, compiled",
        "compiled program",
        "line through compiles",
        "predicted",
    ):
        assert wanted in " ".join(out.split()), wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt:18b", "--target", "h900"], "unknown GPU 'h900'"),
        (["gpt:18b", "--target", "absent.toml"], "absent.toml cannot be read"),
        (["gpt:3b"], "unknown model 'gpt:3b'"),
        (["planned_model"], "give MODULE:FUNCTION"),
        (["no_such_module:four"], "cannot be imported"),
        (["planned_model:absent"], "no function 'absent'"),
        (["planned_model:value"], "no function 'value'"),
        (["planned_model:wrong_result"], "must return"),
        (["planned_model:fails"], "planned_model:fails failed: KeyError: 'absent'"),
        (["broken_model:four"], "module 'broken_model' cannot be imported: NameError"),
        (["planned_model:wrong_shapes"], "cannot be traced"),
        (["planned_model:four", "--nodes", "7"], "multiple of 56"),
        (["planned_model:four", "--sequence-length", "8"], "built-in models"),
        (["planned_model:four", "--stage", "1", "--quantize-weights", "int8"], "gathered only at stage 3"),
        (["planned_model:four", "--quantize-gradients", "int3"], "int3"),
        (["planned_model:four", "--global-batch", "8"], "--global-batch is for --fastest"),
        (["planned_model:four", "--bandwidth", "fast"], "bandwidth 'fast'"),
        (["planned_model:four", "--plot", "absent/plan.png"], "does not exist"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_a_non_zero_exit(here, capsys, arguments, message):
    status, _, err = run(capsys, *arguments, "--no-compile", "--json")
    assert status == 2
    assert message in err
    assert len(err.splitlines()) == 1
    assert err.startswith("zerojax plan: ")


def test_a_model_that_fits_nowhere_is_one_line_and_a_non_zero_exit(here, capsys):
    (here / "tiny.toml").write_text('extends = "h100"\nmemory_bytes = 1000\n')
    status, out, err = run(capsys, "planned_model:four", "--no-compile", "--json", "--compare", "--target", "tiny.toml")
    assert status == 1
    assert len(err.splitlines()) == 1
    assert "nothing fits" in err
    assert json.loads(out)["recommended"] is None


def test_a_missing_plugin_is_said_with_the_command_that_adds_it(here, capsys, monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name.startswith("jax-cuda"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    status, out, _ = run(capsys, "planned_model:four", "--json")
    assert status == 0
    assert "pip install --no-deps jax-cuda13-plugin==" in json.loads(out)["lacking"]
    assert json.loads(out)["configs"][0]["predicted_node"] > 0
    status, _, err = run(capsys, "planned_model:four", "--json", "--compile")
    assert status == 2
    assert "pip install --no-deps jax-cuda13-plugin==" in err
    assert len(err.splitlines()) == 1


def test_a_plugin_of_another_version_is_one_line_and_a_non_zero_exit(here, capsys, monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.1" if name.startswith("jax-cuda") else real(name)
    )
    status, _, err = run(capsys, "planned_model:four", "--json", "--compile")
    assert status == 2
    assert "must be of jaxlib's version" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(("package", "arguments"), [("rich", []), ("matplotlib", ["--json", "--plot", "plan.png"])])
def test_a_package_that_is_missing_is_named(here, capsys, monkeypatch, package, arguments):
    real = cli._is_installed
    monkeypatch.setattr(cli, "_is_installed", lambda name: name != package and real(name))
    status, _, err = run(capsys, "planned_model:four", "--no-compile", *arguments)
    assert status == 2
    assert f" {package}: pip install" in err


def test_the_command_runs_as_a_program(here):
    done = subprocess.run(
        [sys.executable, "-m", "zerojax", "plan", "planned_model:four", "--no-compile", "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] == 1024 * 1024


@pytest.mark.aot
def test_a_compiled_plan_that_fits_nowhere_leaves_one_line_on_the_standard_error(here):
    (here / "tiny.toml").write_text('extends = "h100"\nmemory_bytes = 1000000\n')
    arguments = ["planned_model:four", "--nodes", "1", "--gpus-per-node", "1", "--stage", "0"]
    arguments += ["--json", "--target", "tiny.toml", "--no-largest-microbatch"]
    environment = {key: value for key, value in os.environ.items() if key != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-m", "zerojax", "plan", *arguments],
        env={**environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    # The compiler's own remarks on programs larger than the device are not among it.
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["zerojax plan"], done.stderr
    assert json.loads(done.stdout)["configs"][0]["memory"]["compiled"]


def test_wrong_usage_exits_with_two(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan"])
    assert caught.value.code == 2
