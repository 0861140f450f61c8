"""From a state in memory to the arrays of a checkpoint: what Orbax is given, and what is set right after it wrote.

Orbax writes stored arrays shard by shard. Before the checkpoint is committed its padded arrays are declared to end
where the padding begins, and the sharding recorded beside them becomes one that the logical shape divides by, so that
Orbax alone restores them too. Knows how to write, not where.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax.checkpoints import paths
from zerojax.checkpoints.saved_leaves import describe_leaves, raw
from zerojax.layout.checksums import checksums
from zerojax.layout.layout import Layout
from zerojax.training.state import TrainState

Tree = Any
Shapes = dict[str, tuple[int, ...]]
# This job among those that write checkpoints: when it started, and a random number. Process 0's is written.
JOB = [time.time_ns(), secrets.randbits(53)]


class Snapshot(NamedTuple):
    """What is to be written.

    Attributes:
        tree: the arrays by name, nested.
        about: what is written beside them, JSON.
        padded: logical shapes of the arrays that are padded.
    """

    tree: Tree
    about: dict[str, Any]
    padded: Shapes


def snapshot(state: Tree, layout: Layout, tx: optax.GradientTransformation | None, *, with_checksums: bool) -> Snapshot:
    """A state as a checkpoint holds it.

    Raises:
        ValueError: a leaf is not of the layout, or none is.
    """
    if isinstance(state, TrainState):
        layout.check(state.params, stored=True)
    leaves = describe_leaves(state, layout, tx)
    if not any(leaf.placement for leaf in leaves):
        raise ValueError(
            "save: nothing in this tree is of the layout; pass parameters, a TrainState or a tree with them"
        )
    about: dict[str, Any] = {
        "format": paths.FORMAT,
        "job": JOB,
        "kind": type(state).__name__,
        "mesh": dict(layout.mesh.shape),
        "stage": layout.stage,
        "leaves": {leaf.name: [leaf.dtype, list(leaf.shape)] for leaf in leaves},
    }
    held = {leaf.names: _of_the_job(raw(leaf.value)) for leaf in leaves if not leaf.is_empty}
    if with_checksums:
        names = [leaf.name for leaf in leaves if not leaf.is_empty]
        about["checksums"] = dict(zip(names, checksums(list(held.values())), strict=True))
    padded = {leaf.name: leaf.shape for leaf in leaves if leaf.shape != jnp.shape(raw(leaf.value))}
    return Snapshot(nested(held), about, padded)


def _of_the_job(value: Any) -> Any:
    """An array of this process alone, in a job of several, as the value that all of them hold: process 0 writes it."""
    local = isinstance(value, jax.Array) and value.is_fully_addressable
    return np.asarray(value) if local and jax.process_count() > 1 else value


def make_handler(ocp: Any, tensorstore: Any, padded: Shapes) -> Any:
    """Orbax's handler of a pytree; `padded` is read when a checkpoint is committed."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)
    commit = handler.finalize

    def finalize(directory: Any) -> None:  # run by one process, after all have written and before the renaming
        commit(directory)
        _cut_padding(tensorstore, directory, padded)
        _record_divisible_shardings(directory, padded)

    handler.finalize = finalize  # an instance's own: a subclass would put its name into every checkpoint
    return handler


def stored_shapes(tensorstore: Any, directory: Any, names: list[str]) -> Shapes:
    """The shapes of arrays as they are on disk.

    Raises:
        DamagedCheckpoint: one cannot be opened.
    """
    opening = open_arrays(tensorstore, directory, names)
    found: Shapes = {}
    for name, array in opening.items():
        try:
            found[name] = tuple(array.result().shape)
        except Exception as error:
            raise paths.DamagedCheckpoint(
                f"{directory} is damaged: the array {name} cannot be opened ({str(error)[:200]}). "
                + paths.remedy(directory)
            ) from None
    return found


def nested(flat: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    """A tree of dicts from values by names."""
    out: dict[str, Any] = {}
    for names, value in flat.items():
        node = out
        for name in names[:-1]:
            node = node.setdefault(name, {})
        node[names[-1]] = value
    return out


def orbax() -> tuple[Any, Any]:
    """Orbax and the library it writes with.

    Raises:
        ImportError: they are not installed.
    """
    try:
        import orbax.checkpoint
        import tensorstore
    except ImportError as err:
        raise ImportError("checkpoints need Orbax: pip install orbax-checkpoint") from err
    return orbax.checkpoint, tensorstore


def open_arrays(tensorstore: Any, directory: Any, names: list[str]) -> dict[str, Any]:
    """Futures of the arrays of a checkpoint, by name."""
    base: Any = str(directory).rstrip("/") + "/"
    store = {"driver": "ocdbt", "base": base if "://" in base else {"driver": "file", "path": base}}
    return {
        name: tensorstore.open({"driver": "zarr", "kvstore": {**store, "path": f"{name}/"}}, open=True)
        for name in names
    }


def _cut_padding(tensorstore: Any, directory: Any, shapes: Shapes) -> None:
    """Declares the arrays of a written checkpoint to end where the padding begins."""
    opened = {name: array.result() for name, array in open_arrays(tensorstore, directory, list(shapes)).items()}
    for array in [opened[name].resize(exclusive_max=shape, resize_metadata_only=True)
                  for name, shape in shapes.items()]:  # fmt: skip
        array.result()


def _record_divisible_shardings(directory: Any, shapes: Shapes) -> None:
    """Records arrays without their padding as not split along the dims that the recorded axes do not divide."""
    file = directory / "_sharding"
    if not shapes or not file.exists():
        return
    recorded = json.loads(file.read_text())
    for name, shape in shapes.items():
        key = base64.b64encode(name.encode()).decode()
        sharding = json.loads(recorded.get(key) or "{}")
        if "partition_spec" not in sharding:
            continue
        sizes = dict(zip(sharding["axis_names"], sharding["shape"], strict=True))
        for dim, entry in enumerate(sharding["partition_spec"]):
            parts = 1
            for axis in [entry] if isinstance(entry, str) else entry or ():
                parts *= sizes[axis]
            if shape[dim] % parts:
                sharding["partition_spec"][dim] = None
        recorded[key] = json.dumps(sharding)
    file.write_text(json.dumps(recorded))
