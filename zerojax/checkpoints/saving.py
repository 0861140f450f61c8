"""`save` and `restore`: checkpoints that know nothing of the layout they were written under.

A checkpoint holds *logical* values, written and read shard by shard through Orbax: the padding of a stored leaf is cut
off before the checkpoint is committed and grown again, as zeros, while each shard is read. So what 8 devices wrote at
stage 1 is read by 6 at stage 3, each reading its own slices, and no device or host holds a whole leaf that the layout
splits. Shapes, dtypes and key paths are written beside the values and checked before anything is read. Knows how a
state is placed (`zerojax.optimizer.stored`), not how it is trained.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax.checkpoints.saved_leaves import SavedLeaf, check_same, describe_leaves, raw
from zerojax.gradients.feedback import init_feedback
from zerojax.layout.layout import Layout
from zerojax.layout.notices import ZeroNotice
from zerojax.training.loss_scaling import DynamicScale
from zerojax.training.state import TrainState

Tree = Any
_FORMAT = 1


def save(
    path: str | os.PathLike[str],
    state: Tree,
    layout: Layout,
    tx: optax.GradientTransformation | None = None,
    *,
    step: int | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint; on several hosts every one calls it, with a path that all of them see.

    It is complete or not there at all: Orbax writes beside the path and renames at the end.

    Args:
        path: directory of the checkpoint (or of the checkpoints by step), or a URL such as "gs://...".
        state: a `TrainState`, parameters in stored form, or any pytree of such, of `ZeroState`s and of plain arrays.
        layout: the layout of the state.
        tx: the optimizer, needed when the state holds a `ZeroState`: it tells the leaves' shapes without padding.
        step: writes to the subdirectory of this number; `restore` takes the latest.
        overwrite: replace a checkpoint that is there.

    Raises:
        ValueError: a leaf is not of this layout (its key path is named), or a checkpoint is there already.
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
    ocp, tensorstore = _orbax()
    if isinstance(state, TrainState):
        layout.check(state.params, stored=True)
    leaves = describe_leaves(state, layout, tx)
    if not any(leaf.placement for leaf in leaves):
        raise ValueError(
            "save: nothing in this tree is of the layout; pass parameters, a TrainState or a tree with them"
        )
    target = _directory(path, step)
    if target.exists() and not overwrite:
        raise ValueError(f"save: {target} exists; pass overwrite=True to replace it, or another step")
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)
    padded = {leaf.name: leaf.shape for leaf in leaves if leaf.shape != jnp.shape(raw(leaf.value))}
    commit = handler.finalize

    def finalize(directory: Any) -> None:  # run by one process, after all have written and before the renaming
        commit(directory)
        _cut_padding(tensorstore, str(directory), padded)

    handler.finalize = finalize  # an instance's own: a subclass would put its name into every checkpoint
    about = {
        "format": _FORMAT,
        "kind": type(state).__name__,
        "mesh": dict(layout.mesh.shape),
        "stage": layout.stage,
        "leaves": {leaf.name: [leaf.dtype, list(leaf.shape)] for leaf in leaves},
    }
    with ocp.Checkpointer(handler) as checkpointer:
        tree = _nested({leaf.names: raw(leaf.value) for leaf in leaves if not leaf.is_empty})
        checkpointer.save(target, ocp.args.PyTreeSave(tree), force=overwrite, custom_metadata={"zerojax": about})


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
        ValueError: it is of another model, optimizer or dtype: what differs is named by key path, shape and dtype.
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
    ocp, _ = _orbax()
    prefix: tuple[str, ...] = ()
    target, about = _find(ocp, path, step)
    if like is None and tx is not None:
        like = _train_state_like(about, layout, tx)
    elif like is None:
        like = layout.param_shapes()
        prefix = ("params",) if about["kind"] == TrainState.__name__ else ()
    leaves = [dataclasses.replace(leaf, names=(*prefix, *leaf.names)) for leaf in describe_leaves(like, layout, tx)]
    check_same(leaves, about, target, prefix)
    restore_args = {
        leaf.names: ocp.ArrayRestoreArgs(
            # Longer than what is saved is filled with zeros while it is read, shard by shard: the padding.
            sharding=_sharding(leaf, layout), global_shape=jnp.shape(raw(leaf.value)), strict=not leaf.placement
        )
        for leaf in leaves
        if not leaf.is_empty
    }  # fmt: skip
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        request = ocp.args.PyTreeRestore(
            item=_nested(dict.fromkeys(restore_args, 0)), restore_args=_nested(restore_args), partial_restore=True
        )
        found = checkpointer.restore(target, request)
    values = [
        _rewrap_prng_key(_empty(leaf, layout) if leaf.is_empty else _get(found, leaf.names), leaf.value)
        for leaf in leaves
    ]
    restored = jax.tree.unflatten(jax.tree.structure(like), values)
    if isinstance(restored, TrainState) and layout.config.error_feedback and restored.feedback is None:
        restored = restored._replace(feedback=init_feedback(layout))
    return restored


def _train_state_like(about: dict[str, Any], layout: Layout, tx: optax.GradientTransformation) -> TrainState:
    """Shapes of the `TrainState` to restore: with loss scaling and error feedback where the checkpoint has them.

    Feedback is what a node's last reduction lost. Under other nodes or thresholds it belongs to nothing: it starts from
    zero again, as it does where the checkpoint has none.
    """
    saved = {name: tuple(shape) for name, (_, shape) in about["leaves"].items()}
    scaled = any(name.startswith("loss_scale.") for name in saved)
    like = TrainState.create(layout.param_shapes(), tx, layout, DynamicScale() if scaled else None)
    wanted = sorted(tuple(x.shape) for x in jax.tree.leaves(like.feedback))
    found = sorted(shape for name, shape in saved.items() if name.startswith("feedback."))
    if found and wanted != found:
        warnings.warn(
            "the error feedback in the checkpoint is of another layout: it is left out, and starts from zero where the "
            "configuration has it",
            ZeroNotice,
            stacklevel=3,
        )
    return like if wanted == found else like._replace(feedback=None)


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
    return jax.device_put(jnp.zeros(leaf.shape, raw(leaf.value).dtype), _sharding(leaf, layout))


def _rewrap_prng_key(value: jax.Array, like: Any) -> jax.Array:
    if not _compat.is_prng_key(like):
        return value
    kind: list[Any] = []  # of keys that may be shapes only: asked under a trace
    jax.eval_shape(lambda keys: kind.append(jax.random.key_impl(keys)), like)
    return jax.random.wrap_key_data(value, impl=kind[0])


def _nested(flat: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for names, value in flat.items():
        node = out
        for name in names[:-1]:
            node = node.setdefault(name, {})
        node[names[-1]] = value
    return out


def _get(tree: Tree, names: tuple[str, ...]) -> Any:
    for name in names:
        tree = tree[name]
    return tree


def _cut_padding(tensorstore: Any, directory: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """Declares the arrays of a written checkpoint to end where the padding begins."""
    base: Any = directory.rstrip("/") + "/"
    store = {"driver": "ocdbt", "base": base if "://" in base else {"driver": "file", "path": base}}
    opened = {
        name: tensorstore.open({"driver": "zarr", "kvstore": {**store, "path": f"{name}/"}}, open=True)
        for name in shapes
    }
    for array in [opened[name].result().resize(exclusive_max=shape, resize_metadata_only=True)
                  for name, shape in shapes.items()]:  # fmt: skip
        array.result()


def _directory(path: str | os.PathLike[str], step: int | None) -> Any:
    from etils import epath

    target = epath.Path(path)
    if "://" not in str(path):
        target = epath.Path(os.path.abspath(path))
    return target if step is None else target / str(step)


def _find(ocp: Any, path: str | os.PathLike[str], step: int | None) -> tuple[Any, dict[str, Any]]:
    """The checkpoint's directory and what `save` wrote of it."""
    target = _directory(path, step)
    if step is None and target.exists() and not (target / "_CHECKPOINT_METADATA").exists():
        steps = [int(d.name) for d in ocp.utils.checkpoint_steps_paths(target) if d.name.isdigit()]
        target = target / str(max(steps)) if steps else target
    if not (target / "_CHECKPOINT_METADATA").exists():
        raise FileNotFoundError(f"restore: no checkpoint at {target}")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        about = (checkpointer.metadata(target).custom_metadata or {}).get("zerojax")
    if about is None or about["format"] != _FORMAT:
        raise ValueError(f"{target} is an Orbax checkpoint that zerojax.save (format {_FORMAT}) did not write")
    return target, about


def _orbax() -> tuple[Any, Any]:
    try:
        import orbax.checkpoint
        import tensorstore
    except ImportError as err:
        raise ImportError("zerojax.save and zerojax.restore need Orbax: pip install orbax-checkpoint") from err
    return orbax.checkpoint, tensorstore
