"""Checkpoints at "gs://", on a bucket in memory: what is there is complete, though nothing can be renamed.

What this does not show: a bucket of Google's with its credentials, its consistency, its speed, or "s3://".
"""

import functools
import os

import jax
import jax.numpy as jnp
import object_store
import pytest

import zerojax
from zerojax.checkpoints import paths

Bucket = object_store.Bucket


@pytest.fixture(autouse=True, scope="module")
def server():
    os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = object_store.start()


@pytest.fixture(autouse=True)
def empty():
    Bucket.store.clear()
    Bucket.changes, Bucket.most = 0, float("inf")


@functools.cache
def make():
    params = {"w": jax.random.normal(jax.random.key(0), (13, 40)), "b": jnp.ones(5)}
    layout = zerojax.partition(params, zerojax.make_mesh(2, 4), zerojax.ZeroConfig(min_shard_size=0))
    return layout, layout.shard(params)


def params(factor):
    return jax.tree.map(lambda x: factor * x, make()[1])


def factor_of(path, **options):
    restored = zerojax.restore(path, make()[0], **options)
    factor = float(restored["b"][0])
    assert bool((restored["w"] == factor * make()[1]["w"]).all())
    return factor


def steps():
    return sorted({name.split("/")[3] for name in Bucket.store})


def test_saving_replacing_listing_and_deleting_work_as_on_a_disk():
    layout, _ = make()
    with zerojax.CheckpointManager("gs://bucket/run", layout, keep=2) as manager:
        assert manager.restore() is None
        for step in (1, 2, 3):
            manager.save(step, params(step), data={"at": step})
        assert manager.all_steps() == [2, 3]
        found = manager.restore()
        assert (found.step, found.data, float(found.state["b"][0])) == (3, {"at": 3}, 3.0)
    assert steps() == ["2", "3"]
    with pytest.raises(ValueError, match="exists; pass overwrite=True"):
        zerojax.save("gs://bucket/run", params(4.0), layout, step=3)
    zerojax.save("gs://bucket/run", params(4.0), layout, step=3, overwrite=True)
    assert (factor_of("gs://bucket/run"), factor_of("gs://bucket/run", step=2), steps()) == (4.0, 2.0, ["2", "3"])
    with pytest.raises(ValueError, match=r"run holds steps 2, 3; pass step="):
        zerojax.save("gs://bucket/run", params(4.0), layout, overwrite=True)


def changes_of(call):
    before = Bucket.changes
    call()
    return Bucket.changes - before


@pytest.mark.parametrize(
    "part", [0.7, *(pytest.param(part, marks=pytest.mark.aot) for part in (0.3, 0.5, 0.6, 0.8, 0.9))]
)
def test_wherever_a_replacement_is_killed_the_old_or_the_new_one_is_read(part):
    replace = functools.partial(zerojax.save, "gs://bucket/run/3", layout=make()[0], overwrite=True)
    replace(params(1.0))
    count = changes_of(lambda: replace(params(2.0)))
    Bucket.most = Bucket.changes + int(part * count)
    with pytest.raises(Exception, match=r"killed|403|denied|PERMISSION"):
        replace(params(3.0))
    Bucket.most = float("inf")
    assert factor_of("gs://bucket/run") in (2.0, 3.0)
    with zerojax.CheckpointManager("gs://bucket/run", make()[0]) as manager:
        assert manager.restore().step == 3
        manager.save(4, params(4.0))
    assert factor_of("gs://bucket/run", step=3) in (2.0, 3.0)
    replace(params(5.0))
    assert (factor_of("gs://bucket/run", step=3), steps()) == (5.0, ["3", "4"])


@pytest.mark.parametrize("part", [0.1, pytest.param(0.95, marks=pytest.mark.aot)])
def test_a_new_step_that_was_killed_is_none_and_is_removed_by_the_next_run(part):
    layout, _ = make()
    count = changes_of(lambda: zerojax.save("gs://bucket/run", params(1.0), layout, step=1))
    Bucket.most = Bucket.changes + int(part * count)
    with pytest.raises(Exception, match=r"killed|403|denied|PERMISSION"):
        zerojax.save("gs://bucket/run", params(2.0), layout, step=2)
    Bucket.most = float("inf")
    with pytest.raises(paths.DamagedCheckpoint, match=r"lacks .*Restore step=1 instead"):
        zerojax.restore("gs://bucket/run", layout)
    with zerojax.CheckpointManager("gs://bucket/run", layout) as manager:
        with pytest.warns(zerojax.ZeroNotice, match="/2 "):
            assert manager.restore().step == 1
        manager.save(3, params(3.0))
    assert steps() == ["1", "3"]


def test_a_deletion_that_is_killed_leaves_no_step():
    layout, _ = make()
    for step in (1, 2):
        zerojax.save("gs://bucket/run", params(step), layout, step=step)
    with zerojax.CheckpointManager("gs://bucket/run", layout, keep=1) as manager:
        manager.save(3, params(3.0))
        manager._checkpointer.wait_until_finished()
        Bucket.most = Bucket.changes + 3
        with pytest.warns(zerojax.ZeroNotice, match="an old step was not deleted"):
            manager.wait()
        Bucket.most = float("inf")
        assert manager.all_steps() == [2, 3]
