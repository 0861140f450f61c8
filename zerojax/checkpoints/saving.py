"""`save` and `restore`: checkpoints that do not depend on the layout they were written under.

A checkpoint holds *logical* values, written and read shard by shard through Orbax: the padding of a stored leaf is cut
off before the checkpoint is committed and grown again, as zeros, while each shard is read. So what 8 devices wrote at
stage 1 is read by 6 at stage 3, each reading its own slices, and no device or host holds a full leaf that the layout
splits. Shapes, dtypes and key paths are written beside the values and checked before anything is read. Knows how a
state is placed (`zerojax.optimizer.stored`), not how it is trained.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax.checkpoints import paths
from zerojax.checkpoints.saved_leaves import OF_THE_WIRE, SavedLeaf, check_same, describe_leaves, raw
from zerojax.checkpoints.writing import make_handler, nested, orbax, snapshot, stored_shapes
from zerojax.gradients.wire import init_wire_state
from zerojax.hosts.agreement import agree, digest, exchange
from zerojax.layout.checksums import checksums as checksums_of
from zerojax.layout.facts import layout_facts
from zerojax.layout.host_arrays import place_in_full
from zerojax.layout.layout import Layout
from zerojax.layout.notices import ZeroNotice
from zerojax.training.loss_scaling import DynamicScale
from zerojax.training.state import TrainState

Tree = Any


def save(
    path: str | os.PathLike[str],
    state: Tree,
    layout: Layout,
    tx: optax.GradientTransformation | None = None,
    *,
    step: int | None = None,
    overwrite: bool = False,
    checksums: bool = True,
) -> None:
    """Writes a checkpoint; on several hosts every one calls it, with a path that all of them see.

    It is complete or not there at all: it is written beside the path and renamed at the end. One that it replaces is
    deleted only after that, and a save that fails leaves nothing behind.

    Args:
        path: directory of the checkpoint (or of the checkpoints by step), which may be empty: "~/run", "file:///run",
            or an object store ("gs://bucket/run").
        state: a `TrainState`, parameters in stored form, or any pytree of such, of `ZeroState`s and of plain arrays.
        layout: the layout of the state.
        tx: the optimizer, needed when the state holds a `ZeroState`: it tells the leaves' shapes without padding.
        step: writes to the subdirectory of this number (from 0); `restore` takes the latest.
        overwrite: replace a checkpoint that is there; anything else is refused.
        checksums: record a checksum of each leaf, which `restore` compares: one pass over the state on the devices.

    Raises:
        ValueError: a leaf is not of this layout (its key path is named), a checkpoint is there already, what is there
            is not a checkpoint of this function, or the processes differ (in path, step, layout).
        ImportError: Orbax is not installed.

    >>> import tempfile, zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> layout = zerojax.partition({"w": jnp.ones((13, 4))}, mesh, zerojax.ZeroConfig(min_shard_size=0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, layout.shard({"w": jnp.ones((13, 4))}), layout, step=100)
    ...     params = restore(folder, layout)
    >>> params["w"].shape, float(params["w"].sum())  # stored form: 13 rows padded to 16
    ((16, 4), 52.0)
    """
    ocp, tensorstore = orbax()
    target = paths.checkpoint_path(path, step)
    taken = snapshot(state, layout, tx, with_checksums=checksums)
    situation = begin_saving(target, taken.about, layout, overwrite=overwrite)
    handler = make_handler(ocp, tensorstore, taken.padded)
    place = paths.place_for(target, situation)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(place, ocp.args.PyTreeSave(taken.tree), custom_metadata={"zerojax": taken.about})
    except BaseException:
        if jax.process_index() == 0:
            paths.remove_unfinished(target.parent, target.name)
        raise
    if situation == "ours":
        agree("save: replacing the old checkpoint", {}, lambda: paths.take_place(target) or "")


def begin_saving(
    target: Any,
    about: dict[str, Any],
    layout: Layout,
    *,
    overwrite: bool,
    prepare: Callable[[], None] | None = None,
) -> str:
    """Whether the place is free or holds a checkpoint to replace; the processes agree on what is to be written where.

    `prepare` is run by process 0 before that; what it raises is raised on all.

    Raises:
        ValueError: they do not, or do not share the folder; or something is there that must not be replaced.
    """

    def decide() -> str:
        if prepare is not None:
            prepare()
        situation = paths.check_place(target, overwrite)
        paths.prepare_place(target, situation)
        return situation

    facts = {"path": target, "what is saved": digest(sorted(about["leaves"].items())), **layout_facts(layout)}
    situation = agree("save", facts, decide)
    paths.check_shared(target.parent)
    return situation


def restore(
    path: str | os.PathLike[str],
    layout: Layout,
    tx: optax.GradientTransformation | None = None,
    *,
    like: Tree | None = None,
    step: int | None = None,
) -> Tree:
    """Reads a checkpoint into a layout, which need not be the one it was written under.

    Args:
        path: directory of the checkpoint, or of several by step: then the latest, or that of `step`.
        layout: the layout to restore into: another mesh, number of devices, stage or thresholds are fine.
        tx: the optimizer made by `zerojax.zero(..., layout)`; a `TrainState` comes back. None: the parameters alone,
            from a checkpoint of parameters or of a `TrainState`.
        like: what was saved if it was neither: the same tree in stored form, of arrays or `jax.ShapeDtypeStruct`s, such
            as `(layout.param_shapes(), tx.init(layout.param_shapes()))`.
        step: see `path`.

    Returns:
        The tree in stored form, every leaf sharded from the start.

    Raises:
        FileNotFoundError: no checkpoint is there.
        ValueError: it is of another model, optimizer or dtype: what differs is named by key path, shape and dtype; it
            is damaged (what is missing, shorter or of another checksum is named, and which steps are complete); the
            processes do not see the same.
        ImportError: Orbax is not installed.

    >>> import tempfile, zerojax
    >>> params, small = {"w": jnp.ones((13, 4))}, {"min_shard_size": 0}
    >>> eight = zerojax.partition(params, zerojax.make_mesh(2, 4), zerojax.ZeroConfig(stage=1, **small))
    >>> mesh = zerojax.make_mesh(1, 3, jax.devices()[:3])
    >>> three = zerojax.partition(params, mesh, zerojax.ZeroConfig(stage=3, **small))
    >>> tx = zerojax.zero(optax.adam(1e-3), eight)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, zerojax.TrainState.create(eight.shard(params), tx), eight, tx, overwrite=True)
    ...     state = restore(folder, three, zerojax.zero(optax.adam(1e-3), three))
    >>> state.params["w"].addressable_shards[0].data.shape  # 13 rows on 3 devices, padded to 15
    (5, 4)
    """
    orbax()
    folder = paths.checkpoint_path(path)
    step = None if step is None else paths.check_step(step)
    facts = {"path": folder, "step": step, **layout_facts(layout)}
    target = paths.checkpoint_path(agree("restore", facts, lambda: str(paths.find(folder, step))))
    return read(target, layout, tx, like)


def read(target: Any, layout: Layout, tx: optax.GradientTransformation | None, like: Tree | None) -> Tree:
    """Reads one checkpoint; all processes raise if one of them cannot.

    Raises:
        DamagedCheckpoint: it is not complete, or its values are not those that were saved.
        ValueError: as `restore`.
    """
    about, problem = {}, None
    try:
        about = paths.read_about(target)
    except ValueError as error:
        problem = error
    agree("restore", {f"what they see of {target}": problem or digest(about)})
    if problem is not None:
        raise problem
    prefix: tuple[str, ...] = ()
    if like is None and tx is not None:
        like = _train_state_like(about, layout, tx)
    elif like is None:
        like = layout.param_shapes()
        prefix = ("params",) if about["kind"] == TrainState.__name__ else ()
    leaves = describe_leaves(like, layout, tx)
    if prefix:  # a bare array has no name of its own there
        inside = () if jax.tree_util.treedef_is_leaf(jax.tree.structure(like)) else None
        leaves = [dataclasses.replace(x, names=(*prefix, *(x.names if inside is None else inside))) for x in leaves]
    check_same(leaves, about, target, prefix)
    values, problem = [], ""
    try:
        if jax.process_index() == 0:
            _check_lengths(target, leaves)
        values = _read_values(target, leaves, layout)
    except (MemoryError, paths.DamagedCheckpoint) as error:
        problem = str(error)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        problem = f"{target} is damaged: {type(error).__name__}: {str(error)[:300]}. {paths.remedy(target)}"
    if problem := exchange("restore: what was read", problem, lambda said: next(filter(None, said), "")):
        raise paths.DamagedCheckpoint(problem)
    _check_values(target, leaves, values, about)
    values = [_from_raw(x, leaf.value) for x, leaf in zip(values, leaves, strict=True)]
    restored = jax.tree.unflatten(jax.tree.structure(like), values)
    if isinstance(restored, TrainState) and restored.wire is None:
        restored = restored._replace(wire=init_wire_state(layout))
    return restored


def _check_lengths(target: Any, leaves: list[SavedLeaf]) -> None:
    """Refuses arrays that are not as long as they were when they were saved: the rest would be read as zeros."""
    _, tensorstore = orbax()
    found = stored_shapes(tensorstore, target, [leaf.name for leaf in leaves if not leaf.is_empty])
    for leaf in leaves:
        if not leaf.is_empty and found[leaf.name] != leaf.shape:
            raise paths.DamagedCheckpoint(
                f"{target} is damaged: the array {leaf.name} has shape {found[leaf.name]}, but {leaf.shape} was saved. "
                + paths.remedy(target)
            )


def _read_values(target: Any, leaves: list[SavedLeaf], layout: Layout) -> list[Any]:
    """The arrays in stored form, PRNG keys as integers; each device reads its own slices."""
    ocp, _ = orbax()
    restore_args = {
        leaf.names: ocp.ArrayRestoreArgs(
            # Longer than what is saved is filled with zeros while it is read, shard by shard: the padding.
            sharding=_sharding(leaf, layout), global_shape=jnp.shape(raw(leaf.value)), strict=not leaf.placement
        )
        for leaf in leaves
        if not leaf.is_empty
    }  # fmt: skip
    request = ocp.args.PyTreeRestore(
        item=nested(dict.fromkeys(restore_args, 0)), restore_args=nested(restore_args), partial_restore=True
    )
    # The handler itself: no process waits for another that cannot read.
    found = ocp.PyTreeCheckpointHandler().restore(target, args=request)
    return [_empty(leaf, layout) if leaf.is_empty else _get(found, leaf.names) for leaf in leaves]


def _check_values(target: Any, leaves: list[SavedLeaf], values: list[Any], about: dict[str, Any]) -> None:
    """Compares checksums; the sums are global values, so that all processes come to the same."""
    saved = about.get("checksums") or {}
    checked = [(leaf, x) for leaf, x in zip(leaves, values, strict=True) if leaf.name in saved]
    sums = checksums_of([x for _, x in checked])
    wrong = [leaf.path for (leaf, _), total in zip(checked, sums, strict=True) if total != saved[leaf.name]]
    if wrong:
        raise paths.DamagedCheckpoint(
            f"{target} is damaged: {len(wrong)} of {len(checked)} leaves do not have the checksum that they were saved "
            f"with, {wrong[0]} first. {paths.remedy(target)}"
        )


def _train_state_like(about: dict[str, Any], layout: Layout, tx: optax.GradientTransformation) -> TrainState:
    """Shapes of the `TrainState` to restore: with loss scaling and the wire's state where the checkpoint has them.

    What the wire remembers belongs to one layout: what a node's last reduction lost means nothing under other nodes or
    thresholds. It starts anew there, as it does where the checkpoint has none.
    """
    saved = {name: tuple(shape) for name, (_, shape) in about["leaves"].items()}
    scaled = any(name.startswith("loss_scale.") for name in saved)
    like = TrainState.create(layout.param_shapes(), tx, layout, DynamicScale() if scaled else None)
    wanted = sorted(tuple(x.shape) for x in jax.tree.leaves(like.wire))
    new, *old = OF_THE_WIRE
    found = sorted(shape for name, shape in saved.items() if name.startswith(new))
    # What an earlier version wrote has another name: it is never read.
    if any(name.startswith(tuple(old)) for name in saved) or (found and wanted != found):
        warnings.warn(
            "what the wire remembers in the checkpoint (error feedback, replicas of weights) is of another layout: it "
            "is left out, and starts anew where the configuration has it",
            ZeroNotice,
            stacklevel=4,
        )
    return like if wanted == found else like._replace(wire=None)


def _sharding(leaf: SavedLeaf, layout: Layout) -> NamedSharding:
    """Where a leaf is restored: as the target says, else replicated over the mesh of the layout."""
    given = getattr(leaf.value, "sharding", None)
    if isinstance(given, NamedSharding):
        # Not the target's own object: the mesh of the layout, with its axis types.
        return NamedSharding(layout.mesh, given.spec, memory_kind=given.memory_kind)
    if leaf.placement is None:
        return NamedSharding(layout.mesh, PartitionSpec())
    raise ValueError(f"restore: {leaf.path} of like has no NamedSharding; make like from layout.param_shapes()")


def _empty(leaf: SavedLeaf, layout: Layout) -> jax.Array:
    return place_in_full(np.zeros(leaf.shape, raw(leaf.value).dtype), _sharding(leaf, layout))


def _from_raw(value: jax.Array, like: Any) -> jax.Array:
    if not _compat.is_prng_key(like):
        if value.dtype == jnp.uint8 and jnp.issubdtype(like.dtype, jnp.floating):  # what zarr has no type for
            return jax.lax.bitcast_convert_type(value, like.dtype)
        return value if value.dtype == jnp.result_type(like) else value.astype(like.dtype)
    kind: list[Any] = []  # of keys that may be shapes only: asked under a trace
    jax.eval_shape(lambda keys: kind.append(jax.random.key_impl(keys)), like)
    return jax.random.wrap_key_data(value, impl=kind[0])


def _get(tree: Tree, names: tuple[str, ...]) -> Any:
    for name in names:
        tree = tree[name]
    return tree
