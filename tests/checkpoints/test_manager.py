"""The manager of a run: saved while training goes on, resumed bit for bit, the latest whole step, stopped when told."""

import functools
import os
import signal

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest

import zerojax
from zerojax.checkpoints import manager as manager_module
from zerojax.checkpoints import paths, writing
from zerojax.hosts import preemption
from zerojax.training.first_step import AgreeingStep


@functools.cache
def make():
    layout = models.make_layout(models.dense_init(jax.random.key(0)), "2x4", 3)
    tx = zerojax.zero(optax.adam(1e-2), layout)
    return layout, tx, zerojax.make_train_step(models.dense_loss, tx, layout)


def start():
    layout, tx, _ = make()
    return zerojax.TrainState.create(layout.shard(models.dense_init(jax.random.key(0))), tx)


def draw(data):
    return {"x": data.normal(size=(16, 9)).astype(np.float32), "y": data.normal(size=(16, 5)).astype(np.float32)}


def run(directory, stop_after, **options):
    """A user's loop; the state is donated in every step while the one before is still being written."""
    layout, tx, step_fn = make()
    state, data = start(), np.random.default_rng(0)
    with zerojax.CheckpointManager(directory, layout, tx, **options) as manager:
        if (found := manager.restore()) is not None:
            state, data = found.state, found.data
        for step in range(int(state.step) + 1, stop_after + 1):
            state, metrics = step_fn(state, draw(data))
            manager.save(step, state, data=data, metrics={"loss": metrics["loss"]})
    return state


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_run_that_was_killed_anywhere_goes_on_bit_for_bit_and_retention_keeps_the_last(tmp_path):
    unstopped = run(tmp_path / "a", 9, every=3, keep=2)
    assert sorted(os.listdir(tmp_path / "a")) == ["6", "9"]
    run(tmp_path / "b", 5, every=3, keep=2)
    (tmp_path / "b" / "4.orbax-checkpoint-tmp").mkdir()  # what a killed save leaves
    (tmp_path / "b" / "notes.txt").touch()
    same(run(tmp_path / "b", 9, every=3, keep=2), unstopped)
    assert sorted(os.listdir(tmp_path / "b")) == ["6", "9", "notes.txt"]
    layout, tx, _ = make()
    same(zerojax.restore(tmp_path / "b", layout, tx), unstopped)  # the same format as zerojax.save's


def test_the_best_step_is_kept_beside_the_latest(tmp_path):
    layout, _, _ = make()
    for best, kept in (("loss", [2, 5]), ("-loss", [3, 5])):
        with zerojax.CheckpointManager(tmp_path / best, layout, keep=1, best=best, run={"name": "x"}) as manager:
            for step, value in enumerate([4.0, 1.0, 9.0, float("nan"), 2.0], 1):
                assert manager.save(step, start().params, metrics={"loss": jnp.float32(value)})
            assert not manager.save(5, start().params, metrics={"loss": 0.0}), "a step is saved once"
            assert (manager.all_steps(), manager.latest_step()) == (kept, 5)
            found = manager.restore(kept[0])
            assert (found.step, found.metrics, found.run) == (kept[0], {"loss": [4, 1, 9][kept[0] - 1]}, {"name": "x"})
            with pytest.raises(ValueError, match=r"best='-?loss'.*lacks it at step 6"):
                manager.save(6, start().params)
            with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*/4"):
                manager.restore(4)


def test_a_damaged_latest_step_falls_back_says_so_and_is_replaced_later(tmp_path):
    layout, _, _ = make()
    params = start().params
    with zerojax.CheckpointManager(tmp_path, layout) as manager:
        assert manager.restore() is None
        for step in (1, 2, 3):
            manager.save(step, params, data={"at": step})
    os.remove(tmp_path / "3" / "_CHECKPOINT_METADATA")
    for file in (tmp_path / "2").glob("**/d/*"):
        file.write_bytes(b"")
    with zerojax.CheckpointManager(tmp_path, layout) as manager:
        with pytest.warns(zerojax.ZeroNotice) as said:
            found = manager.restore()
        assert [("/3 is damaged" in str(w.message), "/2 is damaged" in str(w.message)) for w in said] == [
            (True, False), (False, True),
        ]  # fmt: skip
        assert (found.step, found.data, manager.latest_step()) == (1, {"at": 1}, 1)
        same(found.state, params)
        manager.save(2, params)
        assert manager.latest_step() == 2
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "2.damaged", "3"]
    for step in ("1", "2", "3"):
        (tmp_path / step / "manifest.ocdbt").write_bytes(b"no")
    with pytest.warns(zerojax.ZeroNotice), pytest.raises(paths.DamagedCheckpoint):
        zerojax.CheckpointManager(tmp_path, layout).restore()


def test_a_save_that_failed_in_the_background_is_raised_by_the_next_call_and_leaves_nothing(tmp_path, monkeypatch):
    layout, _, _ = make()
    params = start().params
    with zerojax.CheckpointManager(tmp_path, layout) as manager:
        manager.save(1, params)
        manager.wait()
        with monkeypatch.context() as patch:
            patch.setattr(writing, "_cut_padding", lambda *_: (_ for _ in ()).throw(OSError("No space left on device")))
            manager.save(2, params)
            with pytest.raises(OSError, match="No space left"):
                manager.wait()
        assert sorted(os.listdir(tmp_path)) == ["1"]
        assert manager.save(2, params)
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


@pytest.fixture
def not_told_yet(monkeypatch):
    monkeypatch.setattr(preemption, "_noticed", type(preemption._noticed)())
    preemption._watch.cache_clear()
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def tell_to_stop():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("not_told_yet")
def test_a_job_that_is_told_to_stop_saves_its_step_whatever_every_says(tmp_path):
    with zerojax.CheckpointManager(tmp_path, make()[0], every=100) as manager:
        assert not manager.save(6, start().params)
        assert not manager.stopping
        tell_to_stop()
        assert manager.save(7, start().params)
        assert manager.stopping
        assert os.listdir(tmp_path) == ["7"], "written when save returns"
        assert manager.exit_status == 75


@pytest.mark.usefixtures("not_told_yet")
def test_a_loop_without_a_manager_that_is_told_to_stop_ends_eight_steps_later_with_the_status_of_sigterm(capsys):
    layout = zerojax.partition({"w": jnp.ones(16)}, zerojax.make_mesh(1, 2, jax.devices()[:2]))
    tx = zerojax.zero(optax.sgd(0.1), layout)
    # As in a job of several processes; one alone ends at once.
    step_fn = AgreeingStep(zerojax.make_train_step(lambda p, x: jnp.mean(x @ p["w"]), tx, layout), layout)
    state = zerojax.TrainState.create(layout.shard({"w": jnp.ones(16)}), tx)
    state, _ = step_fn(state, np.ones((2, 16), np.float32))
    tell_to_stop()
    for _ in range(8):
        state, _ = step_fn(state, np.ones((2, 16), np.float32))
    with pytest.raises(SystemExit, match="143"):
        step_fn(state, np.ones((2, 16), np.float32))
    assert "was told to stop (SIGTERM) 8 steps ago" in capsys.readouterr().err


@pytest.mark.usefixtures("not_told_yet")
@pytest.mark.parametrize("moment", ["the copy to the host", "the writing", "the end of it"])
def test_told_to_stop_twice_while_it_saves_a_job_writes_that_step_and_the_next(tmp_path, monkeypatch, moment):
    module, name = {
        "the copy to the host": (manager_module, "snapshot"),
        "the writing": (writing, "_cut_padding"),
        "the end of it": (paths, "take_place"),
    }[moment]
    real = getattr(module, name)

    def told(*args, **options):
        tell_to_stop()
        tell_to_stop()
        return real(*args, **options)

    zerojax.save(tmp_path, start().params, make()[0], step=1)
    with zerojax.CheckpointManager(tmp_path, make()[0]) as manager:
        assert manager.restore().step == 1
        with monkeypatch.context() as patch:
            patch.setattr(module, name, told)
            assert manager.save(1, start().params)
            assert not manager.stopping
            manager.wait()
        assert manager.save(2, start().params)
        assert manager.stopping
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]
    same(zerojax.restore(tmp_path, make()[0]), start().params)


class Iterator:
    """A data iterator in grain's manner."""

    def __init__(self, position):
        self.position = position

    def get_state(self):
        return {"next": self.position, "seen": b"\x00\xff"}


def test_what_is_kept_beside_the_state_comes_back_equal(tmp_path):
    layout, _, _ = make()
    generator = np.random.Generator(np.random.MT19937(3))
    generator.normal(size=5)
    data = {
        "iterator": Iterator(7), "generator": generator, "key": jax.random.split(jax.random.key(3), 2),
        3: (1, [2.5, None]), "old": jax.random.PRNGKey(1), "half": jnp.arange(3, dtype=jnp.bfloat16), "big": 2**100,
    }  # fmt: skip
    with zerojax.CheckpointManager(tmp_path, layout) as manager:
        manager.save(1, start().params, data=data)
        back = manager.restore().data
        assert back["iterator"] == {"next": 7, "seen": b"\x00\xff"}
        assert np.array_equal(back["generator"].normal(size=3), generator.normal(size=3))
        assert np.array_equal(jax.random.key_data(back["key"]), jax.random.key_data(data["key"]))
        assert (back[3], back["big"], back["half"].dtype.name) == ((1, [2.5, None]), 2**100, "bfloat16")
        for wrong, message in [({"a": [object()]}, r"data\['a'\]\[0\] is a object"), (np.zeros(10**6), "belong into")]:
            with pytest.raises(ValueError, match=message):
                manager.save(2, start().params, data=wrong)


@pytest.mark.parametrize("options", [{"keep": 0}, {"every": 0}, {"every": 1.5}, {"keep": True}])
def test_numbers_that_keep_or_save_nothing_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=r"CheckpointManager\((keep|every)=.*positive integer"):
        zerojax.CheckpointManager(tmp_path, make()[0], **options)
