"""Killed, failed, full, damaged: a checkpoint that was there is there, or one error says what is wrong."""

import functools
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.checkpoints import paths, saving, writing
from zerojax.layout.checksums import checksums


@functools.cache
def make(nodes=2, local=4, stage=3):
    mesh = zerojax.make_mesh(nodes, local, jax.devices()[: nodes * local])
    shapes = {"w": jax.ShapeDtypeStruct((13, 40), "float32"), "b": jax.ShapeDtypeStruct((5,), "float32")}
    return zerojax.partition(shapes, mesh, zerojax.ZeroConfig(stage=stage, min_shard_size=0))


def params(seed, layout=None):
    w = jax.random.normal(jax.random.key(seed), (13, 40))
    return (layout or make()).shard({"w": w, "b": jnp.full(5, seed + 1.0)})


def is_seed(restored, seed):
    return all(map(np.array_equal, jax.tree.leaves(restored), jax.tree.leaves(params(seed))))


def names(folder):
    return sorted(child.name for child in folder.iterdir())


@pytest.mark.parametrize(
    ("left", "seed"),
    [
        ({"run": 0, "run.zerojax-new.orbax-checkpoint-tmp": 1}, 0),  # killed while the new one is written,
        ({"run": 0, "run.zerojax-new": 1}, 0),  # before the renaming,
        ({"run.zerojax-old": 0, "run.zerojax-new": 1}, 1),  # between the two,
        ({"run": 1, "run.zerojax-old": 0}, 1),  # before the old one is deleted.
    ],
)
def test_wherever_a_replacement_is_killed_one_whole_checkpoint_is_read_and_the_next_one_cleans_up(tmp_path, left, seed):
    for name, value in left.items():
        zerojax.save(tmp_path / "made", params(value), make())
        (tmp_path / "made").rename(tmp_path / name)
    assert is_seed(zerojax.restore(tmp_path / "run", make()), seed)
    with pytest.raises(ValueError, match="exists; pass overwrite=True"):
        zerojax.save(tmp_path / "run", params(2), make())
    zerojax.save(tmp_path / "run", params(2), make(), overwrite=True)
    assert is_seed(zerojax.restore(tmp_path / "run", make()), 2)
    assert names(tmp_path) in (["run"], ["run", "run.zerojax-new.orbax-checkpoint-tmp"])
    paths.remove_unfinished(paths.checkpoint_path(tmp_path), "run")
    assert names(tmp_path) == ["run"]


def test_a_save_that_fails_leaves_nothing_and_keeps_what_was_there(tmp_path, monkeypatch):
    zerojax.save(tmp_path, params(0), make(), step=1)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writing, "_cut_padding", full_disk)
        for options in ({"step": 2}, {"step": 1, "overwrite": True}):
            with pytest.raises(OSError, match="No space left"):
                zerojax.save(tmp_path, params(1), make(), **options)
            assert names(tmp_path) == ["1"]
    assert is_seed(zerojax.restore(tmp_path, make()), 0)


def test_only_a_checkpoint_of_its_own_is_replaced(tmp_path):
    save = functools.partial(zerojax.save, state=params(0), layout=make(), overwrite=True)
    run = tmp_path / "run"
    for step in (1, np.int64(20), jnp.int32(300)):
        zerojax.save(run, params(0), make(), step=step)
    (run / "train.log").write_text("precious")
    with pytest.raises(ValueError, match=r"run holds steps 1, 20, 300; pass step="):
        save(run)
    with pytest.raises(ValueError, match=r"run/1 is itself a checkpoint; save beside it"):
        save(run / "1", step=5)
    (tmp_path / "notes").mkdir()
    save(tmp_path / "notes")  # empty: nothing is lost
    (tmp_path / "notes" / "mine.txt").touch()
    with pytest.raises(ValueError, match=r"notes is not a checkpoint; choose another folder"):
        save(tmp_path / "notes")
    with pytest.raises(ValueError, match=r"train.log is a file"):
        save(run / "train.log")
    with ocp.PyTreeCheckpointer() as other:
        other.save(tmp_path / "other", {"a": np.ones(3)})
    with pytest.raises(ValueError, match="is not a checkpoint"):
        save(tmp_path / "other")
    os.remove(run / "20" / "_CHECKPOINT_METADATA")  # damaged, but its own
    save(run, step=20)
    assert names(run) == ["1", "20", "300", "train.log"]


def test_paths_mean_what_they_mean_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    zerojax.save("~/a", params(0), make())
    zerojax.save(f"file://{tmp_path}/b", params(1), make())
    zerojax.save("c", params(2), make(), step=0)
    for path, seed in [(tmp_path / "home" / "a", 0), (f"file://localhost{tmp_path}/b", 1), (tmp_path / "c", 2)]:
        assert is_seed(zerojax.restore(path, make()), seed)
    for wrong in ("file://host/x", "file:x://y", "http://x/y"):
        with pytest.raises(ValueError, match=r"file:///absolute/path|checkpoints go to a local path"):
            zerojax.save(wrong, params(0), make())


@pytest.mark.parametrize("step", [-1, 1.5, True, "latest", np.float32(2), np.bool_(True)])
def test_a_step_that_is_no_number_from_zero_is_refused_when_saving_and_when_reading(tmp_path, step):
    for call in (functools.partial(zerojax.save, tmp_path, params(0)), functools.partial(zerojax.restore, tmp_path)):
        with pytest.raises(ValueError, match="an integer from 0 is required"):
            call(layout=make(), step=step)
    assert not names(tmp_path)


def shorten(step, there):
    shorter = zerojax.partition({"w": jnp.ones((13, 7)), "b": jnp.ones(5)}, make().mesh, make().config)
    shutil.rmtree(step)
    zerojax.save(step, shorter.shard({"w": jnp.ones((13, 7)), "b": jnp.ones(5)}), shorter)
    shutil.copy(there / "_CHECKPOINT_METADATA", step)


def change_metadata(step, there, **changes):
    file = step / "_CHECKPOINT_METADATA"
    text = json.loads(file.read_text())
    text["custom_metadata"]["zerojax"] |= changes
    file.write_text(json.dumps(text))


DAMAGES = {
    "no metadata": (lambda step, _: os.remove(step / "_CHECKPOINT_METADATA"), "lacks _CHECKPOINT_METADATA"),
    "half of it": (lambda step, _: (step / "_CHECKPOINT_METADATA").write_text('{"cus'), "_CHECKPOINT_METADATA is dam"),
    "no arrays": (lambda step, _: shutil.rmtree(step / "d"), "is damaged"),
    "no directory": (lambda step, _: os.remove(step / "manifest.ocdbt"), "is damaged: the array . cannot be opened"),
    "shorter": (shorten, r"the array w has shape \(13, 7\), but \(13, 40\) was saved"),
    "other values": (functools.partial(change_metadata, checksums={"w": 1}), r"1 of 1 leaves .* checksum .*\['w'\]"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_step_is_one_short_error_that_names_the_whole_steps(tmp_path, kind):
    damage, message = DAMAGES[kind]
    for step in (7, 30):
        zerojax.save(tmp_path, params(step), make(), step=step)
    damage(tmp_path / "30", tmp_path / "7")
    with pytest.raises(ValueError, match=message) as caught:
        zerojax.restore(tmp_path, make())
    assert "Restore step=7 instead" in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert is_seed(zerojax.restore(tmp_path, make(), step=7), 7)


def test_a_checkpoint_of_a_newer_version_is_not_called_damaged_nor_overwritten_unasked(tmp_path):
    zerojax.save(tmp_path / "run", params(0), make())
    change_metadata(tmp_path / "run", None, format=99)
    with pytest.raises(ValueError, match=r"written by a newer zerojax \(format 99.*update") as caught:
        zerojax.restore(tmp_path / "run", make())
    assert not isinstance(caught.value, paths.DamagedCheckpoint)


def test_no_flipped_bit_comes_back_as_another_value(tmp_path):
    # Chunks of 5 kB: smaller ones lie in the directory of the arrays, which has checksums of its own.
    values = {"w": jax.random.normal(jax.random.key(0), (205, 50))}
    layout, other = (zerojax.partition(values, make(*where).mesh, make().config) for where in ((2, 4), (1, 3)))
    zerojax.save(tmp_path / "run", layout.shard(values), layout)
    by_checksum = 0
    for file in (tmp_path / "run").glob("**/d/*"):
        good = file.read_bytes()
        at = len(good) // 2
        file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        try:
            restored = zerojax.restore(tmp_path / "run", layout)
            np.testing.assert_array_equal(restored["w"][:205], values["w"])  # what was merged is not read again
        except ValueError as error:
            by_checksum += "is damaged" in str(error) and "checksum" in str(error)
        file.write_bytes(good)
    assert by_checksum
    np.testing.assert_array_equal(zerojax.restore(tmp_path / "run", other)["w"][:205], values["w"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64", "int4"])
def test_checksums_depend_on_values_and_places_alone(dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(-3, 4, (6, 8))).astype(dtype)
    (whole,) = checksums([x])
    mesh = make().mesh
    for spec in (PartitionSpec(), PartitionSpec(None, ("local", "node")), PartitionSpec("node")):
        assert checksums([jax.device_put(x, NamedSharding(mesh, spec))]) == [whole]
    assert checksums([jnp.concatenate([x, jnp.zeros((2, 8), x.dtype)])]) == [whole]
    swapped = x.at[0, 1].set(x[1, 0]).at[1, 0].set(x[0, 1])
    assert (checksums([swapped]) == [whole]) == bool(x[0, 1] == x[1, 0])


def test_every_single_bit_of_a_float_counts():
    bits = np.arange(32, dtype=np.uint32)
    flipped = (np.float32(1.5).view(np.uint32) ^ (np.uint32(1) << bits)).view(np.float32)
    sums = checksums([jnp.asarray([[1.0, value]], jnp.float32) for value in flipped])
    assert len({*sums, *checksums([jnp.asarray([[1.0, 1.5]], jnp.float32)])}) == 33


def test_orbax_alone_restores_what_has_padding(tmp_path):
    zerojax.save(tmp_path / "run", params(3), make())
    with ocp.PyTreeCheckpointer() as plain:
        read = plain.restore(tmp_path / "run")
    assert read["w"].shape == (13, 40)
    np.testing.assert_array_equal(read["w"], params(3)["w"][:13])
    assert isinstance(read["w"], jax.Array)


def test_without_checksums_nothing_is_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "checksums", None)
    monkeypatch.setattr(saving, "checksums_of", lambda values: [0 for _ in values])
    zerojax.save(tmp_path / "run", params(0), make(), checksums=False)
    assert is_seed(zerojax.restore(tmp_path / "run", make()), 0)
