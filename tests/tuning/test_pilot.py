"""The pilot on a small network: what it measures is right, what it keeps follows from the clock."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest

import zerojax
from zerojax.tuning import pilot as pilots
from zerojax.tuning.errors import gradient_error
from zerojax.tuning.trial import Run, Timing

CONFIG = zerojax.ZeroConfig(min_shard_size=0, min_quantize_size=0)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, models.dense_init(jax.random.key(0)))


@pytest.fixture(scope="module")
def report(params):
    return zerojax.pilot(
        models.dense_loss, params, optax.adamw(1e-2), models.dense_batches(4), config=CONFIG,
        mesh=models.make_mesh("2x4"), steps=6, gradient_batches=2,
    )  # fmt: skip


def trial(report, name):
    (found,) = (each for each in report.trials if each.name == name)
    return found


def test_every_technique_is_tried_alone_on_top_of_what_was_kept(report):
    exact, int8, secondary, quantised, deltas = report.trials
    assert deltas.config.weight_deltas is not None
    assert exact.config == CONFIG
    assert int8.config.quantize_weights is not None
    assert not int8.config.secondary
    assert (secondary.config.quantize_weights is not None) == int8.kept
    assert (quantised.config.secondary, quantised.config.quantize_weights is not None) == (secondary.kept, int8.kept)
    kept = [each for each in report.trials if each.kept]
    assert report.config == kept[-1].config


def test_losses_are_those_of_training_by_hand(report, params):
    want = models.train_plain(models.dense_loss, optax.adamw(1e-2), params, models.dense_batches(4))
    np.testing.assert_allclose(trial(report, "exact").run.losses[:4], want[2], rtol=1e-4)


def test_errors_tell_quantisation_from_what_only_moves(report):
    int8, quantised = trial(report, "int8 weight gathers"), trial(report, "quantised gradients")
    assert 1e-4 < int8.error.raw < 0.1
    assert 1e-3 < quantised.error.raw < 0.5
    assert trial(report, "exact").error is None
    if trial(report, "secondary partition").config.quantize_weights is None:
        assert trial(report, "secondary partition").error.raw == 0
    assert all(abs(each.loss_difference) < 0.1 for each in report.trials)


def test_bytes_between_nodes_fall_with_a_secondary_partition(report):
    exact = trial(report, "exact").run.node_bytes
    # Blocks of 256 in shards of 27 elements are mostly padding: only what sends no padding is smaller here.
    secondary = trial(report, "secondary partition")
    base = trial(report, "int8 weight gathers").run.node_bytes if secondary.config.quantize_weights else exact
    assert secondary.run.node_bytes < base


def test_the_report_is_text_and_json_and_names_the_configuration(report):
    text = str(report)
    assert text.splitlines()[0] == "Mesh node 2 x local 4, 1 process"
    assert f"Use ZeroConfig(stage={report.config.stage}, min_shard_size=0" in text
    assert "wait for communication" in text
    assert json.loads(json.dumps(report.to_dict()))["mesh_shape"] == {"node": 2, "local": 4}
    assert report.final.exposed >= 0
    assert eval(text.rsplit("Use ", 1)[1], {"ZeroConfig": zerojax.ZeroConfig, "QuantFormat": zerojax.QuantFormat}) == (
        report.config
    )


def test_nothing_of_the_callers_is_donated(report, params):
    del report
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))


def test_on_one_node_what_has_no_effect_is_not_tried_and_a_present_configuration_is_a_row():
    loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2)  # noqa: E731
    mesh = zerojax.make_mesh(num_nodes=1, devices_per_node=8)
    present = dataclasses.replace(CONFIG, quantize_weights="int8")
    found = zerojax.pilot(
        loss, lambda: {"w": jnp.ones((32, 24))}, optax.sgd(0.1), [jnp.ones((8, 32))], config=present, mesh=mesh, steps=4
    )
    assert [each.name for each in found.trials][:2] == ["exact", "present"]
    assert trial(found, "present").kept
    assert (trial(found, "int8 weight gathers").run, trial(found, "int8 weight gathers").why) == (None, "is on already")
    assert trial(found, "secondary partition").why == "there is one node"
    assert "not tried: there is one node" in str(found)


def run(step, spread=0.0, losses=(1.0,)):
    return Run(Timing(step, spread), None, losses, 0, None)


@pytest.mark.parametrize(
    ("after", "kept", "why"),
    [
        (run(0.8), True, "saves 20% of the step"),
        (run(0.99), False, "saves 1.0% of the step, less than 2%"),
        (run(1.2), False, "makes the step 20% longer"),
        (run(0.9, spread=0.2), False, "too close to call"),
        (run(0.5, losses=(1.0, float("nan"))), False, "its loss is not finite"),
    ],
)
def test_a_technique_stays_only_where_the_clock_shows_it(after, kept, why):
    found, words = pilots._decide(run(1.0), after, 0.02)
    assert found == kept
    assert words.startswith(why)


def test_gradient_errors_are_those_of_numpy(rng):
    exact = [{"a": rng.normal(size=(5, 3)).astype(np.float32), "b": np.zeros(4, np.float32)} for _ in range(3)]
    found = [jax.tree.map(lambda x: x + np.float32(0.01) * rng.normal(size=x.shape).astype(x.dtype), e) for e in exact]
    moments = np.mean([e["a"] ** 2 for e in exact], axis=0)
    raw, preconditioned = [], []
    for e, f in zip(exact, found, strict=True):
        wrong = sum(np.sum((f[k] - e[k]) ** 2) for k in e)
        raw.append(np.sqrt(wrong / np.sum(e["a"] ** 2)))
        # "b" was zero in all batches: no scale, and no part in the preconditioned figure.
        preconditioned.append(np.sqrt(np.sum((f["a"] - e["a"]) ** 2 / moments) / np.sum(e["a"] ** 2 / moments)))
    got = gradient_error(jax.tree.map(jnp.asarray, exact), jax.tree.map(jnp.asarray, found))
    np.testing.assert_allclose(got, (np.mean(raw), np.mean(preconditioned)), rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": []}, "at least one batch"),
        ({"steps": 3}, "steps=3"),
        ({"gradient_batches": 0}, "gradient_batches=0"),
        ({"batches": [jnp.ones((8, 4)), jnp.ones((16, 4))]}, "batch 1 has shapes"),
        ({"mesh": jax.make_mesh((8,), ("data",))}, "axes .* are not in the mesh"),
        ({"wrapped": True}, "pass the optax optimizer itself"),
    ],
)
def test_bad_input_is_one_error_before_anything_runs(change, message):
    params = {"w": jnp.ones((4, 4))}
    mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    tx = optax.sgd(0.1)
    if change.pop("wrapped", False):
        tx = zerojax.zero(tx, zerojax.partition(params, mesh, CONFIG))
    given = {"batches": [jnp.ones((8, 4))], "mesh": mesh, "config": CONFIG, **change}
    batches = given.pop("batches")
    with pytest.raises(ValueError, match=message):
        zerojax.pilot(lambda p, x: jnp.mean(x @ p["w"]), params, tx, batches, **given)
