"""The command `zerojax pilot`."""

import json

import pytest

from zerojax.tuning import cli

MODULE = """
import jax.numpy as jnp
import optax
import zerojax

def job():
    return dict(
        loss_fn=lambda p, x, scale: scale * jnp.mean((x @ p["w"]) ** 2), params=lambda: {"w": jnp.ones((32, 24))},
        tx=optax.sgd(0.1), batches=[jnp.ones((8, 32))], rest=(jnp.float32(0.5),), techniques={},
        config=zerojax.ZeroConfig(min_shard_size=0), mesh=zerojax.make_mesh(num_nodes=2, devices_per_node=4),
    )

def short():
    return {"loss_fn": None}

def number():
    return 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "pilot_jobs.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.aot
def test_a_job_is_tried_and_reported_as_json(capsys):
    assert cli.main(["pilot_jobs:job", "--steps", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"] == "ZeroConfig(stage=3, min_shard_size=0)"
    assert [each["name"] for each in found["trials"]] == ["exact"]
    assert len(found["final"]["losses"]) == 4


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("pilot_jobs", "give MODULE:FUNCTION"),
        ("pilot_jobs:absent", "cannot be imported"),
        ("pilot_jobs:short", "lacks 'params', 'tx', 'batches'"),
        ("pilot_jobs:number", "returned int"),
    ],
)
def test_what_is_no_job_is_one_line_and_status_2(job, message, capsys):
    assert cli.main([job]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
