"""Who writes into the folder of a run, and what becomes of the steps there: nothing is lost, nothing is mixed."""

import functools
import os
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from zerojax.checkpoints import folders, step_folder, writing


@functools.cache
def make():
    params = {"w": jax.random.normal(jax.random.key(0), (205, 50)), "b": jnp.ones(5)}
    layout = zerojax.partition(params, zerojax.make_mesh(2, 4), zerojax.ZeroConfig(min_shard_size=0))
    return layout, layout.shard(params)


def manager(folder, **options):
    return zerojax.CheckpointManager(folder, make()[0], **options)


def save(of, step, factor=1.0):
    of.save(step, jax.tree.map(lambda x: factor * x, make()[1]))
    of.wait()


def factor_of(folder, step):
    restored = zerojax.restore(folder, make()[0], step=step)
    return float(restored["b"][0])


def names(folder):
    return sorted(os.listdir(folder))


@pytest.fixture
def as_job(monkeypatch):
    def become(started):
        for module in (writing, step_folder):
            monkeypatch.setattr(module, "JOB", [started, 5])

    return become


def test_of_two_jobs_that_save_into_one_folder_the_one_that_started_first_ends(tmp_path, as_job):
    as_job(1)
    with manager(tmp_path) as first:
        save(first, 1)
        as_job(2)
        with manager(tmp_path) as second:
            assert second.restore().step == 1
            save(second, 2)
            as_job(1)
            with pytest.raises(ValueError, match=r"/2 was written by another job, which started after this one"):
                first.save(3, make()[1])
            zerojax.save(tmp_path, make()[1], make()[0], step=4)
            as_job(2)
            with pytest.warns(zerojax.ZeroNotice, match=r"/4 was written by another job, which started before"):
                save(second, 5)
    assert names(tmp_path) == ["1", "2", "4", "5"]


@pytest.mark.parametrize("restored", [None, 2])
def test_a_run_that_does_not_go_on_from_the_latest_step_keeps_what_is_newer_under_another_name(tmp_path, restored):
    with manager(tmp_path) as first:
        for step in (1, 2, 3, 4):
            save(first, step, step)
    for attempt in ("", "1"):
        with manager(tmp_path, keep=1) as again:
            if restored is not None:
                assert again.restore(restored).step == restored
            with pytest.warns(zerojax.ZeroNotice, match=r"steps \[(3, )?4\].*saves step 3: .*N.aside"):
                save(again, 3, 30.0)
            save(again, 4, 40.0)
            assert again.all_steps() == [4]
        assert {f"3.aside{attempt}", "4", f"4.aside{attempt}"} - {"3.aside1"} <= {*names(tmp_path)}
        if restored is not None:
            break
    os.rename(tmp_path / "4.aside", tmp_path / "7")
    assert factor_of(tmp_path, 7) == 4.0, "as it was"
    assert factor_of(tmp_path, 4) == 40.0


def test_the_step_that_was_restored_may_be_saved_again(tmp_path):
    for factor in (1.0, 2.0):
        with manager(tmp_path) as of:
            assert factor == 1.0 or of.restore().step == 3
            save(of, 3, factor)
    assert names(tmp_path) == ["3"]
    assert factor_of(tmp_path, 3) == 2.0


def test_a_deletion_that_is_killed_leaves_no_half_step(tmp_path, monkeypatch):
    with manager(tmp_path, keep=1) as of:
        save(of, 1)
        with monkeypatch.context() as patch:
            patch.setattr(folders, "remove", lambda folder: folder.exists() and os.remove(folder / "manifest.ocdbt"))
            save(of, 2)
    assert len(names(tmp_path)) == 2, "what is left of step 1 has another name"
    with manager(tmp_path, keep=1) as of:
        assert of.all_steps() == [2]
        save(of, 3)
    assert names(tmp_path) == ["3"]


def test_an_old_step_that_cannot_be_deleted_stops_no_run(tmp_path, monkeypatch):
    def busy(*_):
        raise OSError(16, "Device or resource busy")

    with manager(tmp_path, keep=1) as of:
        save(of, 1)
        monkeypatch.setattr(folders, "discard", busy)
        with pytest.warns(zerojax.ZeroNotice, match="an old step was not deleted: .*busy"):
            save(of, 2)
    assert names(tmp_path) == ["1", "2"]


def test_a_disk_that_is_full_while_training_goes_on_is_one_error_and_leaves_the_last_step(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with manager(tmp_path) as of:
        save(of, 1, 7.0)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))  # writing beyond fails, as on a full disk
            of.save(2, make()[1])
            with pytest.raises(Exception, match=r"File too large|write"):
                of.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert names(tmp_path) == ["1"]
        save(of, 2, 8.0)
    assert (factor_of(tmp_path, 1), factor_of(tmp_path, 2)) == (7.0, 8.0)


def test_links_are_followed_and_stay_links(tmp_path):
    layout, params = make()
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    (tmp_path / "later").symlink_to(tmp_path / "disk" / "new")  # to what is not there yet
    zerojax.save(tmp_path / "run", params, layout)  # an empty folder behind a link
    zerojax.save(tmp_path / "run", jax.tree.map(lambda x: 3 * x, params), layout, overwrite=True)
    assert (factor_of(tmp_path / "run", None), names(tmp_path)) == (3.0, ["disk", "later", "run"])
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "1").symlink_to(tmp_path / "disk")
    with manager(tmp_path / "steps", keep=1) as of:
        assert of.restore().step == 1
        save(of, 2)
    assert names(tmp_path / "steps") == ["2"], "the link is gone,"
    assert factor_of(tmp_path / "disk", None) == 3.0, "what it led to is not"
    assert (tmp_path / "run").is_symlink()


def test_restoring_writes_nothing(tmp_path, monkeypatch):
    with manager(tmp_path) as of:
        save(of, 1)
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()

    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    for name in ("mkdir", "rename", "remove", "rmdir", "unlink", "rmtree"):
        monkeypatch.setattr(os, name, read_only, raising=False)
    with manager(tmp_path) as of:
        assert of.restore().step == 1
        np.testing.assert_array_equal(zerojax.restore(tmp_path, make()[0])["b"], make()[1]["b"])
        with pytest.raises(OSError, match="Read-only"):
            of.save(2, make()[1])
