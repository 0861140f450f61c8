"""`zerojax export CHECKPOINT OUT`: the parameters of a checkpoint for other systems, on a machine without devices.

Read leaf by leaf, a large one in pieces along its first dim, so that a small machine exports a model of any size. As
`.safetensors` (above a size as several files with an index) or `.npz`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from zerojax.checkpoints import paths
from zerojax.checkpoints.writing import open_arrays, orbax
from zerojax.layout.safetensors import NAMES, header_of

_PIECE_BYTES = 256 << 20
_MASTERS = "opt_state.master."


class Leaf:
    """One parameter of a checkpoint, read in pieces along its first dim."""

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], array: Any, master: Any = None) -> None:
        self.name, self.shape = name, shape
        self._dtype, self._array, self._master = jnp.dtype(dtype), array, master
        self.dtype = self._dtype.name if master is None else jnp.dtype(master.dtype.numpy_dtype).name

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return jnp.dtype(self.dtype).itemsize * int(np.prod(self.shape, dtype=np.int64))

    def pieces(self) -> Iterator[np.ndarray]:
        """Its values in order, each piece of at most 256 MiB unless one row is larger."""
        if not self.nbytes:
            return
        rows = self.shape[0] if self.shape else 1
        step = max(1, _PIECE_BYTES // max(1, self.nbytes // rows))
        for start in range(0, rows, step):
            part = (slice(start, min(start + step, rows)),) if self.shape else ()
            values = np.asarray(self._array[part].read().result()).view(self._dtype)
            if self._master is not None:  # a parameter that is not its master, rounded, was edited, and counts
                wide = np.asarray(self._master[part].read().result())
                values = np.where(wide.astype(self._dtype) == values, wide, values.astype(wide.dtype))
            yield np.ascontiguousarray(values)


def export(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    masters: bool = False,
    names: Mapping[str, str] | None = None,
    file_bytes: int = 5_000_000_000,
) -> list[Path]:
    """Writes the parameters of a checkpoint as `.safetensors` or `.npz`.

    Args:
        checkpoint: as for `zerojax.restore`.
        out: the file; where several are needed, OUT-00001-of-00003.safetensors and OUT.safetensors.index.json.
        step: as for `zerojax.restore`.
        masters: the master copies of parameters that have one (float32), instead of the narrower parameters.
        names: another name for some of the leaves, which are called by their keys joined with ".".
        file_bytes: largest size of one file of `.safetensors`.

    Returns:
        The files that were written.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: another suffix, an unknown name, a dtype that the format does not know, a damaged checkpoint.

    >>> import tempfile, zerojax
    >>> params = {"w": jnp.arange(26.0).reshape(13, 2)}
    >>> layout = zerojax.partition(params, zerojax.make_mesh(2, 4), zerojax.ZeroConfig(min_shard_size=0))
    >>> folder = tempfile.mkdtemp()
    >>> zerojax.save(f"{folder}/run", layout.shard(params), layout)
    >>> [file] = zerojax.export(f"{folder}/run", f"{folder}/model.safetensors")
    >>> bool((layout.load(file)["w"] == layout.shard(params)["w"]).all())
    True
    """
    target = Path(out).expanduser()
    if target.suffix not in (".safetensors", ".npz"):
        raise ValueError(f"export: {target} must end with .safetensors or .npz")
    leaves = read_leaves(checkpoint, step, masters, dict(names or {}))
    if target.suffix == ".npz":
        with _written(target) as file, zipfile.ZipFile(file, "w") as archive:
            for leaf in leaves:
                _write_npy(archive, leaf)
        return [target]
    for leaf in leaves:
        if leaf.dtype not in NAMES:
            raise ValueError(f"export: {leaf.name} has dtype {leaf.dtype}, which safetensors does not know; cast it")
    groups: list[list[Leaf]] = [[]]
    for leaf in leaves:
        if groups[-1] and sum(each.nbytes for each in groups[-1]) + leaf.nbytes > file_bytes:
            groups.append([])
        groups[-1].append(leaf)
    files = [target]
    if len(groups) > 1:
        files = [target.with_name(f"{target.stem}-{i:05}-of-{len(groups):05}.safetensors")
                 for i in range(1, len(groups) + 1)]  # fmt: skip
    for path, group in zip(files, groups, strict=True):
        with _written(path) as file:
            file.write(header_of({leaf.name: (leaf.dtype, leaf.shape) for leaf in group}))
            for leaf in group:
                for piece in leaf.pieces():
                    file.write(piece.tobytes())
    if len(groups) == 1:
        return files
    index = target.with_name(f"{target.name}.index.json")
    weight_map = {leaf.name: path.name for path, group in zip(files, groups, strict=True) for leaf in group}
    total = sum(leaf.nbytes for leaf in leaves)
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))
    return [*files, index]


def read_leaves(
    checkpoint: str | os.PathLike[str], step: int | None, masters: bool, names: dict[str, str]
) -> list[Leaf]:
    """The parameters of a checkpoint, opened."""
    _, tensorstore = orbax()
    found = paths.find(paths.checkpoint_path(checkpoint), None if step is None else paths.check_step(step))
    about = paths.read_about(found)
    saved = {str(name): (str(dtype), tuple(shape)) for name, (dtype, shape) in about["leaves"].items()}
    prefix = "params." if about["kind"] == "TrainState" else ""
    chosen = [name for name in saved if name.startswith(prefix)]
    if masters and not any(name.startswith(_MASTERS) for name in saved):
        raise ValueError(f"export: {found} has no master copies: leave out masters")
    own = {name: name.removeprefix(prefix) for name in chosen}
    if unknown := names.keys() - set(own.values()):
        raise ValueError(f"export: names has {sorted(unknown)[:4]}, which are no leaves of {found}")
    wide = {name: _MASTERS + own[name] for name in chosen if masters and _MASTERS + own[name] in saved}
    opened = open_arrays(tensorstore, found, [n for n in (*chosen, *wide.values()) if 0 not in saved[n][1]])
    arrays = {}
    for name, opening in opened.items():
        try:
            arrays[name] = opening.result()
        except Exception as error:
            raise paths.DamagedCheckpoint(f"{found} is damaged: the array {name}: {str(error)[:200]}") from None
        if tuple(arrays[name].shape) != saved[name][1]:
            raise paths.DamagedCheckpoint(f"{found} is damaged: the array {name} has another shape than was saved")
    called = {name: str(names.get(own[name], own[name])) for name in chosen}
    leaves = [Leaf(called[n], *saved[n], arrays.get(n), arrays.get(wide.get(n, ""))) for n in chosen]
    if len({leaf.name for leaf in leaves}) < len(leaves):
        raise ValueError("export: names gives two leaves the same name")
    return leaves


class _written:
    """A file that is there complete or not at all."""

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, path.with_name(f"{path.name}.part")

    def __enter__(self) -> BinaryIO:
        self._file = self._part.open("wb")
        return self._file

    def __exit__(self, kind: Any, *_: object) -> None:
        self._file.close()
        if kind is None:
            self._part.replace(self._path)
        else:
            self._part.unlink()


def _write_npy(archive: zipfile.ZipFile, leaf: Leaf) -> None:
    known = jnp.dtype(leaf.dtype)
    dtype = known if known.kind in "biufc" and known.isbuiltin == 1 else np.dtype(np.float32)  # NumPy has no bfloat16
    with archive.open(f"{leaf.name}.npy", "w", force_zip64=True) as file:
        about = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": leaf.shape}
        np.lib.format.write_array_header_1_0(file, about)
        for piece in leaf.pieces():
            file.write(piece.astype(dtype).tobytes())


def main(argv: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="zerojax export", description="Parameters for other systems.")
    parser.add_argument("checkpoint", help="folder of a checkpoint, or of several by step: then the latest")
    parser.add_argument("out", help="OUT.safetensors or OUT.npz")
    parser.add_argument("--step", type=int, help="this step instead of the latest")
    parser.add_argument("--masters", action="store_true", help="the float32 master copies where there are any")
    parser.add_argument("--names", type=Path, help="JSON file with other names for some leaves: {own: other}")
    parser.add_argument("--file-bytes", type=int, default=5_000_000_000, help="largest size of a file")
    options = parser.parse_args(argv)
    try:
        names = json.loads(options.names.read_text()) if options.names else None
        files = export(options.checkpoint, options.out, step=options.step, masters=options.masters, names=names,
                       file_bytes=options.file_bytes)  # fmt: skip
    except (ValueError, OSError, ImportError) as error:
        print(f"zerojax export: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, files)))
    return 0
