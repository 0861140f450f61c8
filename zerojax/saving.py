"""`save` and `restore`: checkpoints that know nothing of the layout they were written under.

A checkpoint holds *logical* values, written and read shard by shard through Orbax: the padding of a stored leaf is cut
off before the checkpoint is committed and grown again, as zeros, while each shard is read. So what 8 devices wrote at
stage 1 is read by 6 at stage 3, each reading its own slices, and no device or host holds a whole leaf that the layout
splits. Shapes, dtypes and key paths are written beside the values and checked before anything is read. Knows how a
state is placed (`zerojax.state_sharding`), not how it is trained.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax.layout import Layout
from zerojax.optimizer import ZeroState, placements_of_state
from zerojax.placement import Placement
from zerojax.train_step import TrainState

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
    leaves = _described(state, layout, tx)
    if not any(leaf.placement for leaf in leaves):
        raise ValueError(
            "save: nothing in this tree is of the layout; pass parameters, a TrainState or a tree with them"
        )
    target = _directory(path, step)
    if target.exists() and not overwrite:
        raise ValueError(f"save: {target} exists; pass overwrite=True to replace it, or another step")
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)
    padded = {leaf.name: leaf.shape for leaf in leaves if leaf.shape != jnp.shape(_raw(leaf.value))}
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
        tree = _nested({leaf.names: _raw(leaf.value) for leaf in leaves})
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
        like = TrainState.create(layout.param_shapes(), tx)
    elif like is None:
        like = layout.param_shapes()
        prefix = ("params",) if about["kind"] == TrainState.__name__ else ()
    leaves = [dataclasses.replace(leaf, names=(*prefix, *leaf.names)) for leaf in _described(like, layout, tx)]
    _check_same(leaves, about, target, prefix)
    restore_args = {
        leaf.names: ocp.ArrayRestoreArgs(
            # Longer than what is saved is filled with zeros while it is read, shard by shard: the padding.
            sharding=_sharding(leaf, layout), global_shape=jnp.shape(_raw(leaf.value)), strict=not leaf.placement
        )
        for leaf in leaves
    }  # fmt: skip
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        request = ocp.args.PyTreeRestore(
            item=_nested(dict.fromkeys(restore_args, 0)), restore_args=_nested(restore_args), partial_restore=True
        )
        found = checkpointer.restore(target, request)
    values = [_again(_get(found, leaf.names), leaf.value) for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(like), values)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One leaf of a state: what the program holds, and its logical form in the checkpoint."""

    path: str
    names: tuple[str, ...]
    value: Any
    placement: Placement | None

    @property
    def name(self) -> str:
        """The name of the array in the checkpoint, as Orbax writes it."""
        return ".".join(self.names)

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape: without padding."""
        return tuple(self.placement.shape if self.placement else jnp.shape(_raw(self.value)))

    @property
    def dtype(self) -> str:
        if _compat.is_prng_key(self.value):
            return str(self.value.dtype)
        return jnp.dtype(getattr(self.value, "dtype", None) or jnp.result_type(self.value)).name


def _described(tree: Tree, layout: Layout, tx: optax.GradientTransformation | None) -> list[_Leaf]:
    """The leaves of a tree in tree order, with the placement of those that belong to the layout."""
    out: list[_Leaf] = []

    def visit(path: tuple[Any, ...], node: Any) -> None:
        where = jax.tree_util.keystr(path)
        placements = None
        if isinstance(node, ZeroState):
            if tx is None:
                raise ValueError(f"{where or 'the state'} is a ZeroState: pass the optimizer too, as tx")
            placements = placements_of_state(tx, layout)
            if node.layout_id != placements.layout_id or jax.tree.structure(node) != jax.tree.structure(placements):
                raise ValueError(
                    f"{where or 'the state'} belongs to another layout or optimizer than those given "
                    f"(mesh {dict(layout.mesh.shape)}, stage {layout.stage})"
                )
        elif _is_params(node, layout):
            layout.check(node, stored=None, what=where or "params")
            placements = layout.placements
        if placements is not None:
            pairs = jax.tree_util.tree_flatten_with_path(node)[0]
            for (inner, value), placement in zip(pairs, jax.tree.leaves(placements), strict=True):
                out.append(_leaf((*path, *inner), value, placement))
            return
        children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
        if len(children) == 1 and children[0][1] is node:
            out.append(_leaf(path, node, None))
            return
        for inner, child in children:
            visit((*path, *inner), child)

    visit((), tree)
    names = [leaf.name for leaf in out]
    twice = {leaf.path for leaf in out if names.count(leaf.name) > 1} if len(set(names)) != len(names) else set()
    if twice:
        raise ValueError(f"save: key paths {sorted(twice)} have the same name in a checkpoint; rename one")
    return out


def _is_params(node: Any, layout: Layout) -> bool:
    """Whether a node has the structure of the parameters; a bare array must have the shape of one too."""
    if jax.tree.structure(node) != layout.treedef:
        return False
    bare = jax.tree_util.treedef_is_leaf(layout.treedef)
    return not bare or jnp.shape(node) in (layout.leaves[0].shape, layout.leaves[0].padded_shape)


def _leaf(path: tuple[Any, ...], value: Any, placement: Placement | None) -> _Leaf:
    where = jax.tree_util.keystr(path) or "the state"
    if not isinstance(value, (int, float, complex)) and not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise ValueError(f"{where} is a {type(value).__name__}, not an array: keep it beside the checkpoint")
    names = tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
    return _Leaf(where, names or ("value",), value, placement)


def _check_same(leaves: list[_Leaf], about: dict[str, Any], target: Any, prefix: tuple[str, ...]) -> None:
    """Refuses a checkpoint that does not hold exactly these leaves."""
    saved: dict[str, Any] = about["leaves"]
    wanted = {leaf.name for leaf in leaves}
    start = ".".join((*prefix, ""))
    missing = [leaf.path for leaf in leaves if leaf.name not in saved]
    extra = [name for name in saved if name not in wanted and name.startswith(start if prefix else "")]
    if missing or extra:
        raise ValueError(
            f"{target} is a checkpoint of another model, optimizer or master_dtype ({about['kind']} of stage "
            f"{about['stage']}): it lacks {_some(missing)} and has {_some(extra)} beside what was asked for"
        )
    for leaf in leaves:
        dtype, shape = saved[leaf.name]
        if tuple(shape) != leaf.shape:
            raise ValueError(f"{leaf.path} has shape {leaf.shape}, but {target} holds {tuple(shape)}")
        if dtype != leaf.dtype:
            raise ValueError(
                f"{leaf.path} has dtype {leaf.dtype}, but {target} holds {dtype}: restore into a layout of {dtype} and "
                "cast afterwards"
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return (", ".join(names[:4]) or "nothing") + more


def _sharding(leaf: _Leaf, layout: Layout) -> NamedSharding:
    """Where a leaf is restored: as the target says, else replicated over the mesh of the layout."""
    given = getattr(leaf.value, "sharding", None)
    if isinstance(given, NamedSharding):
        # Not the target's own object: the mesh of the layout, with its axis types.
        return NamedSharding(layout.mesh, given.spec, memory_kind=given.memory_kind)
    if leaf.placement is None:
        return NamedSharding(layout.mesh, PartitionSpec())
    raise ValueError(f"restore: {leaf.path} of like has no NamedSharding; make like from layout.param_shapes()")


def _raw(value: Any) -> Any:
    """PRNG keys as the integers they are made of; all else as it is."""
    if not _compat.is_prng_key(value):
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, value)
    return jax.random.key_data(value)


def _again(value: jax.Array, like: Any) -> jax.Array:
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(like)) if _compat.is_prng_key(like) else value


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
        raise ImportError("zerojax.save and zerojax.restore need Orbax: pip install 'zerojax[checkpoint]'") from err
    return orbax.checkpoint, tensorstore
