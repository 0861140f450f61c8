"""Parameters in stored form that are no parameters of the loss: a teacher, a target network, the other half of a GAN.

They come after the batch, marked by `Layout.stored`, which says under which layout they are stored. The loss sees full
arrays of logical shape, without padding; each is gathered where it is used and again in the backward pass, as the
parameters are. Nothing is differentiated with respect to them. A tree of the structure and the padded shapes of all
parameters can be nothing else and is taken for marked; what can only be a part of them is refused, because its padding
would enter the loss.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zerojax import _compat
from zerojax.gather.evaluate import evaluate_plain
from zerojax.gradients.backward import layout_scope
from zerojax.gradients.inputs import not_differentiated
from zerojax.layout.layout import Layout, StoredParams
from zerojax.layout.notices import ZeroNotice
from zerojax.layout.placement import Placement

Tree = Any

_STORED_IS_CONSTANT = (
    "nothing is differentiated with respect to arguments that layout.stored marks: pass what is to be differentiated "
    "as the parameters (first argument) of value_and_grad, or put jax.lax.stop_gradient around it"
)


def marked_arguments(batch: Tree, rest: tuple[Any, ...], model_state: Tree, layout: Layout) -> tuple[Any, ...]:
    """The arguments after the batch, with what is in stored form marked as such.

    Raises:
        ValueError: a mark in the wrong place or of another mesh, or a part of the parameters without a mark; the
            argument is named by its key path.
    """
    for what, tree in (("the batch", batch), ("model_state", model_state)):
        if any(map(_is_marked, jax.tree.leaves(tree, is_leaf=_is_marked))):
            raise ValueError(f"{what} holds parameters marked by layout.stored: pass them as arguments after the batch")

    def mark(path: Any, x: Any) -> Any:
        name = f"argument {jax.tree_util.keystr(path)} after the batch"
        if _is_marked(x):
            _check_marked(name, x, layout)
        elif _looks_stored(x, layout):
            if any(p.padding for p in layout.leaves):
                warnings.warn(
                    f"{name} has the structure of the parameters and their padded shapes and is taken for parameters "
                    "in stored form: the loss sees them without padding. Pass layout.stored(tree) to say so",
                    ZeroNotice,
                    stacklevel=2,
                )
            return StoredParams(x, layout)
        return x

    rest = jax.tree_util.tree_map_with_path(mark, rest, is_leaf=lambda x: _is_marked(x) or _looks_stored(x, layout))
    for i, x in enumerate(rest):
        _refuse_parts(f"argument [{i}]", " after the batch", x, layout)
    _refuse_parts("model_state", "", model_state, layout)
    return rest


def argument_specs(rest: Any) -> Any:
    """PartitionSpecs over the data axes: marked parameters stay on their shards, all else is replicated."""

    def specs(x: Any) -> Any:
        if not _is_marked(x):
            return PartitionSpec()
        of_leaves = [p.data_spec if _is_split(v, p, x.layout) else PartitionSpec() for v, p in _pairs(x)]
        return StoredParams(x.layout.treedef.unflatten(of_leaves), x.layout)

    return jax.tree.map(specs, rest, is_leaf=_is_marked)


def logical_arguments(rest: Any) -> Any:
    """The arguments as the loss sees them, marked parameters as shapes."""

    def logical(x: Any) -> Any:
        if not _is_marked(x):
            return x
        return x.layout.treedef.unflatten([jax.ShapeDtypeStruct(p.shape, jnp.result_type(v)) for v, p in _pairs(x)])

    return jax.tree.map(logical, rest, is_leaf=_is_marked)


def without_gradient(rest: Any) -> Any:
    """The arguments as they are; a derivative with respect to marked ones, which would silently be zero, is refused."""

    def guarded(x: Any) -> Any:
        return StoredParams(not_differentiated(x.tree, _STORED_IS_CONSTANT), x.layout) if _is_marked(x) else x

    return jax.tree.map(guarded, rest, is_leaf=_is_marked)


def gathering_arguments(fn: Callable[..., Any], *, forward_only: bool = False) -> Callable[..., Any]:
    """`fn(params, batch, *rest)` that takes this device's shards of marked arguments and gathers them on use.

    One layout after the other: each has collectives of its own.
    """

    def run(params: Tree, batch: Tree, *rest: Any) -> Any:
        marked = [x for x in jax.tree.leaves(rest, is_leaf=_is_marked) if _is_marked(x)]
        if not marked:
            return fn(params, batch, *rest)
        layout = marked[0].layout
        # Below stage 3 what is split is no parameter but, say, an average that the optimizer keeps.
        split = dataclasses.replace(layout, config=dataclasses.replace(layout.config, stage=3))
        scope = layout_scope(split, forward_only=forward_only)

        def entered(x: Any) -> Any:
            if not (_is_marked(x) and x.layout is layout):
                return x
            return layout.treedef.unflatten([
                scope.enter(v, None, p.with_dtype(v.dtype)) if p.is_sharded and v.shape != p.shape else v
                for v, p in _pairs(x)
            ])  # fmt: skip

        def shown(x: Any) -> Any:
            return logical_arguments(x) if _is_marked(x) and x.layout is layout else x

        held = jax.tree.map(entered, rest, is_leaf=_is_marked)
        jaxpr, out = jax.make_jaxpr(lambda p, b, r: run(p, b, *r), return_shape=True)(
            params, batch, jax.tree.map(shown, rest, is_leaf=_is_marked)
        )
        values = evaluate_plain(jaxpr, jax.tree.leaves((params, batch, held)), scope)
        return jax.tree.unflatten(jax.tree.structure(out), values)

    return run


def _is_marked(x: Any) -> bool:
    return isinstance(x, StoredParams)


def _pairs(x: StoredParams) -> list[tuple[Any, Placement]]:
    return list(zip(jax.tree.leaves(x.tree), x.layout.leaves, strict=True))


def _is_split(value: Any, p: Placement, layout: Layout) -> bool:
    return p.is_sharded and (layout.stage >= 3 or jnp.shape(value) != p.shape)


def _check_marked(name: str, x: StoredParams, layout: Layout) -> None:
    other = x.layout
    if other.mesh != layout.mesh or other.config.axes != layout.config.axes:
        raise ValueError(
            f"{name} is stored on mesh {dict(other.mesh.shape)} over {other.config.axes}, but the loss runs on mesh "
            f"{dict(layout.mesh.shape)} over {layout.config.axes}: both layouts must have the same mesh and data axes"
        )
    other.check(x.tree, stored=True if other.stage >= 3 else None, what=name)


def _looks_stored(x: Any, layout: Layout) -> bool:
    """Whether a tree is of all parameters in padded shapes, and not seen to be replicated."""
    if layout.stage < 1 or jax.tree_util.treedef_is_leaf(layout.treedef) or jax.tree.structure(x) != layout.treedef:
        return False
    pairs = list(zip(jax.tree.leaves(x), layout.leaves, strict=True))
    padded = all(jnp.shape(v) == p.padded_shape for v, p in pairs)
    if any(p.padding for p in layout.leaves):
        return padded
    return padded and layout.stage >= 3 and any(p.is_sharded for p in layout.leaves) and not _is_logical(x)


def _refuse_parts(name: str, where: str, argument: Tree, layout: Layout) -> None:
    """Looks for the structure and the padded shapes of a part of the parameters in an argument."""
    if layout.stage < 1 or not any(p.padding for p in layout.leaves):
        return
    parts: dict[Any, list[list[Placement]]] = {}
    for _, node in _nodes(layout.placements):
        parts.setdefault(jax.tree.structure(node), []).append(jax.tree.leaves(node))
    nodes = list(_nodes(argument))
    if jax.tree_util.treedef_is_leaf(layout.treedef):  # a bare array: taken for the parameter only where it is alone
        nodes, parts = [((), argument)], {layout.treedef: [layout.leaves]}
    for path, node in nodes:
        shapes = [jnp.shape(x) for x in jax.tree.leaves(node)]
        for part in parts.get(jax.tree.structure(node), ()):
            if any(p.padding for p in part) and shapes == [p.padded_shape for p in part]:
                raise ValueError(
                    f"{name}{jax.tree_util.keystr(path)}{where} has the structure and the padded shapes of parameters "
                    f"in stored form (params{part[0].path}, ...): the loss would see the padding. Pass "
                    "layout.stored(params) of the full tree after the batch, or give this part a layout of its own "
                    "(zerojax.partition) and pass that layout's stored(part)"
                )


def _nodes(tree: Tree, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tree]]:
    """The containers in a tree, from the outside in, with their key paths; what is marked is left out."""
    children = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    if _is_marked(tree) or not children or children[0][1] is tree:
        return
    yield path, tree
    for key, child in children:
        yield from _nodes(child, (*path, *key))


def _is_logical(tree: Tree) -> bool:
    """Whether it can be seen that every device holds all of the arrays."""
    return all(
        not isinstance(x, jax.Array) or (not _compat.is_traced(x) and x.sharding.is_fully_replicated)
        for x in jax.tree.leaves(tree)
    )
