"""The leaves of a state as a checkpoint knows them: a name, a logical shape, a dtype.

A state is any pytree. Its parameter trees and optimizer states belong to a layout, which says how much of a stored leaf
is padding; everything else is kept as it is. Two states can be exchanged if their leaves have the same names, logical
shapes and dtypes, whatever the layouts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from zerojax import _compat
from zerojax.layout.layout import Layout
from zerojax.layout.placement import Placement
from zerojax.optimizer.zero import ZeroState, placements_of_state
from zerojax.training.state import TrainState

Tree = Any

# Fields of a `TrainState` that the layout's placements do not describe.
OF_THE_WIRE = ("wire.", "feedback.")  # the second as it was called before: read as of another layout
_NOT_OF_LAYOUT = (jax.tree_util.GetAttrKey("wire"), jax.tree_util.GetAttrKey("model_state"))


@dataclasses.dataclass(frozen=True)
class SavedLeaf:
    """One leaf of a state: what the program holds, and its logical form in the checkpoint.

    Attributes:
        path: key path in the state, for messages.
        names: the keys along it, as text.
        value: an array or a `jax.ShapeDtypeStruct`, in stored form.
        placement: how the layout stores it; None for what is not of the layout.
    """

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
        """Logical shape: without padding; of PRNG keys that of the integers they are made of."""
        if _compat.is_prng_key(self.value):
            return tuple(raw(self.value).shape)
        return tuple(self.placement.shape if self.placement else jnp.shape(self.value))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write: Orbax refuses arrays without elements."""
        return 0 in self.shape

    @property
    def dtype(self) -> str:
        """Name of the dtype."""
        if _compat.is_prng_key(self.value):
            return str(self.value.dtype)
        return jnp.dtype(getattr(self.value, "dtype", None) or jnp.result_type(self.value)).name


def describe_leaves(tree: Tree, layout: Layout, tx: optax.GradientTransformation | None) -> list[SavedLeaf]:
    """The leaves of a tree in tree order, with the placement of those that belong to the layout."""
    out: list[SavedLeaf] = []

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
            if isinstance(node, TrainState) and inner[0] in _NOT_OF_LAYOUT:
                # Perhaps of the parameters' structure, but not of their shapes: its leaves are plain arrays here.
                pairs = jax.tree_util.tree_flatten_with_path(child)[0]
                out.extend(_leaf((*path, *inner, *rest), value, None) for rest, value in pairs)
            else:
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


def _leaf(path: tuple[Any, ...], value: Any, placement: Placement | None) -> SavedLeaf:
    where = jax.tree_util.keystr(path) or "the state"
    if not isinstance(value, (int, float, complex)) and not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise ValueError(f"{where} is a {type(value).__name__}, not an array: keep it beside the checkpoint")
    names = tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
    return SavedLeaf(where, names or ("value",), value, placement)


def check_same(leaves: list[SavedLeaf], about: dict[str, Any], target: Any, prefix: tuple[str, ...]) -> None:
    """Refuses a checkpoint that does not hold exactly these leaves."""
    saved: dict[str, Any] = about["leaves"]
    wanted = {leaf.name for leaf in leaves}
    start = ".".join((*prefix, ""))
    missing = [leaf.path for leaf in leaves if leaf.name not in saved]
    extra = [name for name in saved if name not in wanted and name.startswith(start if prefix else "")]
    if about["kind"] == TrainState.__name__:  # state of another layout: see _train_state_like
        extra = [name for name in extra if not name.startswith(OF_THE_WIRE)]
    if extra and not missing and all(name.startswith("model_state.") for name in extra):
        raise ValueError(
            f"{target} holds a model state: pass its shapes, like=zerojax.TrainState.create(layout.param_shapes(), tx, "
            "..., model_state=shapes)"
        )
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


def raw(value: Any) -> Any:
    """What is written: PRNG keys as the integers they are made of, and what zarr has no type for as bytes."""
    if not _compat.is_prng_key(value):
        dtype = str(getattr(value, "dtype", ""))
        if dtype not in ("uint2", "uint4", "float8_e4m3"):
            return value
        if isinstance(value, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(value.shape, jnp.uint8, sharding=value.sharding)
        return lax.bitcast_convert_type(value, jnp.uint8) if dtype == "float8_e4m3" else value.astype(jnp.uint8)
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, value)
    return jax.random.key_data(value)
