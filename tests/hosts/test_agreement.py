"""A job of real processes: what they must agree on, what each passes, what is saved, and how it is told to stop."""

import collections
import json
import os

import jax
import models
import processes
import pytest

from zerojax import _compat
from zerojax.hosts.agreement import _short, agree, compare
from zerojax.layout.facts import layout_facts

JOB = """
import re
import numpy as np, optax, jax.numpy as jnp, zerojax, models
from zerojax.checkpoints import paths
from jax.sharding import NamedSharding, PartitionSpec

def refused(pattern, call):
    try:
        call()
    except (ValueError, OSError) as error:
        assert re.search(pattern, str(error)), error
    else:
        raise AssertionError(f"not refused: {pattern}")

mesh = zerojax.make_mesh()
assert dict(mesh.shape) == {"node": 2, "local": 2}
init, loss_fn = models.dense_init, models.dense_loss
shapes = jax.eval_shape(init, jax.random.key(0))

def make(stage, rate=1e-2):
    layout = zerojax.partition(shapes, mesh, zerojax.ZeroConfig(stage=stage, min_shard_size=30))
    tx = zerojax.zero(optax.adam(rate), layout)
    return layout, tx, zerojax.make_train_step(loss_fn, tx, layout)

layout, tx, step = make(3)
# Seeds and values.
refused(r"layout.init: .*\\[0\\] \\(another seed\\?\\)", lambda: layout.init(init, jax.random.key(RANK)))
refused(r"layout.shard: .*\\['first'\\]", lambda: layout.shard(init(jax.random.key(RANK))))
other = make(1)
whole = NamedSharding(mesh, PartitionSpec())
mixed = jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, whole, lambda i: np.asarray(x + RANK)[i]),
                     init(jax.random.key(0)))
refused(r"init: processes do not agree on the values of replicated parameters", lambda: other[1].init(mixed))
# Arrays on a device of this process are placed like host arrays, and nothing else than that is in them.
params = layout.shard(jax.device_put(init(jax.random.key(0)), jax.local_devices()[1]))
for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(layout.init(init, jax.random.key(0)))):
    for mine, theirs in zip(x.addressable_shards, y.addressable_shards, strict=True):
        assert mine.index == theirs.index and np.allclose(mine.data, theirs.data, atol=1e-6)
# Each process's own rows.
batches = [jax.device_get(b) for b in models.dense_batches(3, 24)]
rows = slice(12 * RANK, 12 * RANK + 12)
mine = lambda batch: jax.tree.map(lambda x: x[rows], batch)
batch = layout.batch(mine(batches[0]) | {"scale": 2.0})
assert batch["x"].shape == (24, 9) and batch["scale"].shape == ()
for shard in batch["x"].addressable_shards:
    assert 12 * RANK <= shard.index[0].start < 12 * RANK + 12
    assert np.array_equal(shard.data, batches[0]["x"][shard.index])
refused(r"layout.batch: processes do not agree on batch\\['x'\\]: \\(8, 9\\)",
        lambda: layout.batch({"x": np.ones((8 + 4 * RANK, 9))}))
refused("11 rows must be a positive multiple of its 2 parts", lambda: layout.batch(np.ones((11, 9))))
# Arrays of one process as the batch of all.
state = zerojax.TrainState.create(params, tx)
host = mine(batches[0])
first = zerojax.apply(lambda p, b: b["x"] @ p["first"], layout)
grad = zerojax.value_and_grad(loss_fn, layout)
for call in (lambda b: step(state, b), lambda b: jax.jit(first)(params, b), lambda b: first(params, b),
             lambda b: jax.jit(lambda p, b: grad(p, jax.tree.map(lambda x: 2 * x, b)))(params, b)):
    for kind in (np.asarray, jnp.asarray):
        refused(r"batch\\['x'\\] .* in a job of 2.*layout.batch\\(rows\\)", lambda: call(jax.tree.map(kind, host)))
ragged = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec(("node", "local"))),
                                                np.ones((4 + 4 * RANK, 9), np.float32))
wrong = make(3)[2]
refused("the first step: .*shapes of the batch", lambda: wrong(state, {"x": ragged, "y": ragged[:, :5]}))
ragged = {"x": ragged, "y": ragged[:, :5]}
of_batch = jax.jit(lambda p, b: jax.grad(lambda b: grad(p, b)[0])(b))
for name, fn in (("value_and_grad", grad), ("value_and_grad", jax.jit(grad)), ("value_and_grad", of_batch),
                 ("apply", jax.jit(first))):
    sides = r"\\(8, 9\\) float32 \\(process 0\\), \\(16, 9\\) float32 \\(process 1\\)"
    refused(name + r": processes do not agree on batch\\['x'\\]: " + sides, lambda: fn(params, ragged))
# Another optimizer on one process.
strange = make(3, 1e-2 * (1 + RANK))[2]
refused(r"the first step: .*a hyperparameter", lambda: strange(state, layout.batch(host)))
# Training equals plain optax on all rows.
_, _, expected, _ = models.train_plain(loss_fn, optax.adam(1e-2), init(jax.random.key(0)), batches)
losses = []
for b in batches:
    state, metrics = step(state, layout.batch(mine(b)))
    losses.append(float(metrics["loss"]))
assert np.allclose(losses, expected, rtol=1e-5), (losses, expected)  # sums of 24 rows in another order
# Saving and restoring.
folder = sys.argv[1]
save = lambda path, **options: zerojax.save(path, state, layout, tx, **options)
refused(r"save: processes do not agree on path: .*0 \\(process 0\\), .*1 \\(process 1\\)",
        lambda: save(f"{folder}/{RANK}"))
refused("save: processes do not agree on path", lambda: save(folder, step=RANK))
paths._SEEN_SECONDS = 0
exists = type(paths.checkpoint_path("/")).exists
if RANK:
    type(paths.checkpoint_path("/")).exists = lambda self: "zerojax-shared" not in self.name and exists(self)
refused("an unshared folder: use one that all processes see", lambda: save(folder + "/local/run"))
type(paths.checkpoint_path("/")).exists = exists
for overwrite in (False, True):
    save(folder, step=1, overwrite=overwrite)
refused("restore: processes do not agree on step", lambda: zerojax.restore(folder, layout, tx, step=RANK))
restored = zerojax.restore(folder, layout, tx)
for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
    for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True):
        assert a.index == b.index and np.array_equal(a.data, b.data)
stage_1 = zerojax.restore(folder, *make(1)[:2])
assert np.array_equal(stage_1.params["gain"].addressable_data(0), state.params["gain"].addressable_data(0))
# What one process cannot write is a failure of all.
with zerojax.CheckpointManager(folder + "/fails", layout, tx) as manager:
    manager.save(1, state)
    written = manager._checkpointer.wait_until_finished
    if RANK:
        manager._checkpointer.wait_until_finished = lambda: [written(), open("/dev/full", "w").write("x" * 99999)]
    refused("No space left" if RANK else "fails/1 was not written by process 1: OSError: .*No space left", manager.wait)
    manager._checkpointer.wait_until_finished = written
    assert manager.save(2, state)
# A loop until the job is told to stop: any process may be the one that hears of it.
with zerojax.CheckpointManager(folder + "/run", layout, tx, every=1000, keep=1) as manager:
    for number in range(1, 10000):
        state, metrics = step(state, layout.batch(host))
        metrics["loss"].block_until_ready()
        manager.save(number, state, data={"rank": RANK})
        if manager.stopping:
            found = manager.restore()
            assert (found.step, found.data) == (number, {"rank": RANK})
            print("stopped at", number)
            raise SystemExit(manager.exit_status)
        if number == 5:
            open(f"{folder}/{RANK}.going", "w")
"""


def test_two_processes_agree_on_everything_train_on_their_own_rows_save_and_stop_when_told(tmp_path):
    job = processes.start(JOB, 2, 2, str(tmp_path))
    processes.wait_until(lambda: all((tmp_path / f"{rank}.going").exists() for rank in range(2)), job)
    for process in (job[1], *job, *job):  # and again: a scheduler tells all, perhaps more than once
        processes.terminate(process)
    ends = processes.finish(job, 60)
    assert [status for status, _ in ends] == [75, 75], ends[0][1][-3000:] + ends[1][1][-3000:]
    said = {line for _, out in ends for line in out.splitlines() if line.startswith("stopped at")}
    assert len(said) == 1, "both stop at the same step"
    assert os.listdir(tmp_path / "run") == [said.pop().split()[-1]]


def test_what_differs_is_named_with_the_processes_on_each_side():
    said = {rank: {"batch": "(8, 2)", "step": str(rank == 3)} for rank in range(20)} | {7: {"batch": "(4, 2)"}}
    text = compare("the first step", said)
    assert "the first step: processes do not agree on batch: (8, 2) (processes 0, 1, 2, 3, 4, 5, 6, 8 and 11" in text
    assert "(4, 2) (process 7)" in text
    assert "True (process 3), nothing (process 7)" in text
    assert compare("x", {0: {"a": "1"}, 1: {"a": "1"}}) == ""


class Service:
    """The coordination service of a large job, where all others have said the same; counts what this process does."""

    def __init__(self, text):
        self._text, self.calls, self.bytes = text, collections.Counter(), 0

    def blocking_key_value_get(self, key, _):
        self.calls["get"] += 1
        self.bytes += len(self._text)
        return self._text

    def key_value_set(self, key, text):
        self.calls["set"] += 1
        self.bytes += len(text)

    def key_value_delete(self, key):
        self.calls["delete"] += 1


def test_an_agreement_of_4096_processes_costs_process_0_a_text_of_each_and_the_others_two_messages(monkeypatch):
    layout = models.make_layout(models.dense_init(jax.random.key(0)), "2x4", 3)
    facts = layout_facts(layout) | {"shapes of the batch": "x" * 5000}
    monkeypatch.setattr(jax, "process_count", lambda: 4096)

    def costs(rank, text):
        service = Service(text)
        monkeypatch.setattr(jax, "process_index", lambda: rank)
        monkeypatch.setattr(_compat, "coordination_client", lambda: service)
        for _ in range(4):
            agree("a step", facts, lambda: "decided")
        return {name: number / 4 for name, number in service.calls.items()}, service.bytes / 4

    calls, size = costs(0, json.dumps({name: _short(str(value)) for name, value in facts.items()}))
    assert calls == {"get": 4095, "set": 1, "delete": 0.5}
    assert size < 4096 * 1200
    calls, size = costs(4095, "fine:decided")
    assert calls == {"get": 1, "set": 1}
    assert size < 1200


@pytest.mark.parametrize("count", [4096])
def test_what_grows_with_the_processes_is_one_short_text_of_each(count):
    assert len(compare("x", {rank: {"seed": str(rank)} for rank in range(count)})) < 300
