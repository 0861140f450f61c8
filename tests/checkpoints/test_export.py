"""Parameters for other systems, and from them: the same values, read and written in pieces, or one error."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest

import zerojax
from zerojax import __main__ as command
from zerojax.checkpoints import export as exporting


def whole(dtype="float32"):
    return jax.tree.map(lambda x: x.astype(dtype), models.dense_init(jax.random.key(0)))


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


@pytest.fixture(params=["float32", "bfloat16"])
def saved(request, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "_PIECE_BYTES", 100)  # rows of 96 bytes: many pieces
    layout = models.make_layout(whole(request.param), "3x2", 3)
    tx = zerojax.zero(optax.adam(1e-2), layout)
    state = zerojax.TrainState.create(layout.shard(whole(request.param)), tx)
    zerojax.save(tmp_path / "run", state, layout, tx, step=4)
    return tmp_path, layout, state, request.param


def test_a_model_goes_out_in_several_files_and_comes_back_into_any_layout(saved, monkeypatch, capsys):
    folder, _, _, dtype = saved
    (file,) = zerojax.export(folder / "run", folder / "one.safetensors")
    monkeypatch.setattr(sys, "argv", ["zerojax", "export", f"{folder}/run", f"{folder}/many.safetensors",
                                      "--file-bytes", "2000", "--step", "4"])  # fmt: skip
    assert command.main() == 0
    *parts, index = capsys.readouterr().out.split()
    assert len(parts) == len(set(json.loads(Path(index).read_text())["weight_map"].values())) > 1
    for mesh, stage in (("2x4", 3), ("1x3", 1)):
        other = models.make_layout(whole(dtype), mesh, stage)
        for path in (file, index):
            loaded = other.load(path)
            same(loaded, other.shard(whole(dtype)))
            assert jax.tree.map(lambda x: x.sharding, loaded) == other.param_shardings()
    assert not list(folder.glob("*.part"))


def test_masters_are_exported_except_where_a_parameter_was_edited(saved):
    folder, layout, state, dtype = saved
    if dtype == "float32":
        with pytest.raises(ValueError, match="has no master copies"):
            zerojax.export(folder / "run", folder / "x.npz", masters=True)
        return
    wide = jax.tree.map(lambda x: x + jnp.float32(2**-20) * (x == x), state.opt_state.master)
    edited = state.params | {"first": state.params["first"].at[0].set(7)}
    state = state._replace(params=edited, opt_state=dataclasses.replace(state.opt_state, master=wide))
    tx = zerojax.zero(optax.adam(1e-2), layout)
    zerojax.save(folder / "run", state, layout, tx, step=5)
    (file,) = zerojax.export(folder / "run", folder / "m.npz", masters=True, names={"stack.w": "blocks/w"})
    read = np.load(file)
    assert sorted(read) == ["blocks/w", "first", "gain", "last", "stack.b"]
    assert {x.dtype.name for x in read.values()} == {"float32"}
    np.testing.assert_array_equal(read["first"][0], np.full(24, 7))
    rounds_to_param = np.asarray(wide["first"][1:9]).astype(jnp.bfloat16) == np.asarray(edited["first"][1:9])
    np.testing.assert_array_equal(
        read["first"][1:],
        np.where(rounds_to_param, wide["first"][1:9], np.asarray(edited["first"][1:9]).astype(np.float32)),
    )


def test_what_does_not_fit_is_one_error(saved):
    folder, layout, _, dtype = saved
    (file,) = zerojax.export(folder / "run", folder / "one.safetensors", names={"gain": "g"})
    with pytest.raises(ValueError, match=r"params\['gain'\] \(\).*one.safetensors has nothing .* as 'gain'"):
        layout.load(file)
    same(layout.load(file, names={"gain": "g"}), layout.shard(whole(dtype)))
    narrow = models.make_layout(whole("float16"), "2x4", 3)
    with pytest.raises(ValueError, match=rf"params\['first'\] \(9, 24\) float16: .* has \(9, 24\) {dtype}"):
        narrow.load(file, names={"gain": "g"})
    assert narrow.load(file, names={"gain": "g"}, cast=True)["first"].dtype == jnp.float16
    for bad, message in [({"no": "x"}, "are no leaves"), ({"gain": "first"}, "two leaves the same name")]:
        with pytest.raises(ValueError, match=message):
            zerojax.export(folder / "run", folder / "y.npz", names=bad)
    with pytest.raises(ValueError, match=r"must end with .safetensors or .npz"):
        zerojax.export(folder / "run", folder / "y.bin")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        zerojax.export(folder / "nothing", folder / "y.npz")
    cut = folder / "cut.safetensors"
    cut.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"cut.safetensors is not a complete safetensors file: .*its data is cut"):
        layout.load(cut)
    (folder / "empty.safetensors").touch()
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        layout.load(folder / "empty.safetensors")


def test_help_of_the_command_lists_export_beside_the_planner(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zerojax", "--help"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert not ended.value.code
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("plan", "doctor", "export", "pilot"))
