"""What goes into and comes out of a step beside the parameters: batches, keys, per-example outputs, averages.

A batch is split on its leading dim over the data axes, node by node, so that a host's examples stay on its devices.
Everything else is replicated, except that PRNG keys are folded with the index of the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax.gradients.outputs import widened
from zerojax.hosts.compiling import agreeing
from zerojax.layout.facts import layout_facts
from zerojax.layout.host_arrays import check_of_the_job, is_of_several_processes
from zerojax.layout.layout import Layout

Tree = Any


def batch_specs(batch: Tree, layout: Layout, microbatches: int = 1) -> Tree:
    """PartitionSpecs of a batch: the leading dim over the data axes; 0-d leaves replicated.

    Raises:
        ValueError: a leaf is not an array, or its leading dim does not divide by the number of devices (its key path,
            shape, the axes and their sizes are named).
    """
    axes, count = layout.config.axes, layout.num_shards * microbatches
    pieces = f" x {microbatches} microbatches" if microbatches > 1 else ""
    sizes = " x ".join(f"{axis}={layout.mesh.shape[axis]}" for axis in axes)

    def spec(path: Any, x: Any) -> PartitionSpec:
        name = f"batch{jax.tree_util.keystr(path)}"
        if not isinstance(x, jax.ShapeDtypeStruct) and not _is_array(x):
            raise ValueError(f"{name} is a {type(x).__name__}, not an array; bind it with functools.partial instead")
        shape = jnp.shape(x)
        if not shape and _compat.is_prng_key(x):
            raise ValueError(
                f"{name} is a single PRNG key, which would draw the same on every device; pass it as an argument after "
                "the batch (it is folded per device there), or one key for each example"
            )
        if not shape:
            return PartitionSpec()
        check_of_the_job(name, x, layout.mesh)
        if shape[0] % count or shape[0] == 0:
            raise ValueError(
                f"{name} has shape {shape}: its leading dim {shape[0]} must be a positive multiple of the "
                f"{layout.num_shards} devices of the data axes {sizes}{pieces}; pad or drop examples to "
                f"{max(1, shape[0] // count) * count}"
            )
        return PartitionSpec(axes)

    return jax.tree_util.tree_map_with_path(spec, batch)


def compared(batch: Tree, layout: Layout, what: str) -> Tree:
    """The batch; in a job of several processes these compare its shapes, and the layout, when they compile it."""
    leaves, structure = jax.tree.flatten(batch)
    carriers = [i for i, x in enumerate(leaves) if jnp.ndim(x) and jnp.size(x) and not _compat.is_prng_key(x)]
    if not carriers or not is_of_several_processes(layout.mesh):
        return batch
    shapes = {f"batch{jax.tree_util.keystr(path)}": f"{jnp.shape(x)} {_dtype(x)}"
              for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]}  # fmt: skip
    leaves[carriers[0]] = agreeing(leaves[carriers[0]], what, shapes | layout_facts(layout))
    return structure.unflatten(leaves)


def on_mesh(batch: Tree, specs: Tree, layout: Layout) -> Tree:
    """On a mesh with explicit axes, moves arrays to where `shard_map` takes them: their types must say so already.

    Args:
        batch: arrays of global shape.
        specs: PartitionSpecs over the data axes, of the structure of `batch`. Other axes stay as they are.
        layout: the layout, whose mesh decides whether anything has to be done.
    """
    if not _compat.has_explicit_axes(layout.mesh):
        return batch

    def other_axes_only(entry: Any) -> Any:
        names = entry if isinstance(entry, tuple) else (entry,)
        return None if any(name in layout.config.axes for name in names) else entry

    def move(x: Any, spec: PartitionSpec) -> jax.Array:
        own = [other_axes_only(entry) for entry in tuple(jax.typeof(x).sharding.spec)[len(spec) :]]
        return jax.sharding.reshard(x, NamedSharding(layout.mesh, PartitionSpec(*spec, *own)))

    return jax.tree.map(move, batch, specs)


def local_shapes(batch: Tree, layout: Layout, microbatches: int = 1, times: int = 1) -> Tree:
    """Shapes of one device's part of a batch, or of one microbatch of it; of so many times as many examples."""
    count = layout.num_shards * microbatches

    def local(x: Any) -> jax.ShapeDtypeStruct:
        shape = jnp.shape(x)
        return jax.ShapeDtypeStruct((times * shape[0] // count, *shape[1:]) if shape else (), _dtype(x))

    return jax.tree.map(local, batch)


def check_rest(rest: Any) -> None:
    """Refuses further arguments that are not arrays and points out untyped PRNG keys, which cannot be folded."""
    for path, x in jax.tree_util.tree_flatten_with_path(rest)[0]:
        if not _is_array(x):
            raise ValueError(
                f"argument {jax.tree_util.keystr(path)} after the batch is a {type(x).__name__}, not an array; bind "
                "static arguments with functools.partial(loss_fn, ...)"
            )
        if jnp.shape(x) == (2,) and _dtype(x) == jnp.uint32:
            warnings.warn(
                f"argument {jax.tree_util.keystr(path)} after the batch looks like an untyped PRNG key; it will be the "
                "same on every device. Make keys with jax.random.key to have them folded per device",
                stacklevel=3,
            )


def fold_keys(rest: Any, layout: Layout) -> Any:
    """Folds every typed PRNG key with the index of the device along the data axes."""

    def fold(x: Any) -> Any:
        if not _compat.is_prng_key(x):
            return x
        index = lax.axis_index(layout.config.axes)
        folded = jax.vmap(lambda key: jax.random.fold_in(key, index))(x.reshape(-1))
        return folded.reshape(x.shape)

    return jax.tree.map(fold, rest)


def output_specs(
    shapes: Tree, doubled: Callable[[], Tree], layout: Layout, per_example: Tree = None, what: str = "output"
) -> Tree:
    """PartitionSpecs of a function's outputs: those with an entry for each example are sharded along their leading dim.

    Which they are is seen by tracing the function with twice the examples: their leading dim doubles. A length that
    happens to be the batch's says nothing.

    Args:
        shapes: shapes of the outputs on one device.
        doubled: gives the shapes for twice the examples; called where an output is no scalar.
        layout: the layout.
        per_example: what the user says instead: a bool, or bools in the structure of (a prefix of) the outputs.
        what: name of the outputs in messages.

    Raises:
        ValueError: a dim other than the leading one depends on the number of examples, or the leading one in another
            way than in proportion; an integer output that would be averaged; a function that cannot be traced with
            twice the examples.
    """
    leaves, structure = jax.tree.flatten(shapes)
    if per_example is not None:
        says = jax.tree.leaves(jax.tree.broadcast(per_example, shapes))
        others = [jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype) if y and x.shape else x
                  for x, y in zip(leaves, says, strict=True)]  # fmt: skip
    elif all(x.shape == () for x in leaves):
        others = leaves
    else:
        try:
            other = doubled()
        except Exception as error:
            raise ValueError(
                f"which of the {what}s hold one entry for each example is seen by tracing the function with twice the "
                f"examples of each device, and that failed: {type(error).__name__}: {str(error)[:200]}. Write it for "
                "any number of examples (x.shape[0] instead of a number), or say which they are: per_example=True, "
                f"False, or bools in the structure of the {what}s"
            ) from error
        if jax.tree.structure(other) != structure:
            raise ValueError(f"the structure of the {what}s depends on the number of examples: {structure} and "
                             f"{jax.tree.structure(other)}")  # fmt: skip
        others = jax.tree.leaves(other)

    def spec(path: Any, x: Any, other: Any) -> PartitionSpec:
        name = f"{what}{jax.tree_util.keystr(path)}"
        if x.shape != other.shape:
            if len(x.shape) == len(other.shape) and other.shape[0] == 2 * x.shape[0]:
                return PartitionSpec(layout.config.axes)
            raise ValueError(
                f"{name} has shape {x.shape} on each device, and {other.shape} for twice the examples: only the "
                "leading dim can hold the examples, a whole number of entries for each; move it to the front "
                "(jnp.moveaxis), or reduce over it"
            )
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise ValueError(
                f"{name} has shape {x.shape} and dtype {x.dtype}: as its leading dim is not the batch's (it does not "
                "grow with the number of examples) it would be averaged over the devices, which needs a float; cast it"
            )
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, shapes, structure.unflatten(others))


def merge_microbatches(out: Tree, specs: Tree, layout: Layout) -> Tree:
    """Outputs of several microbatches (leading dim) as one: examples joined, all else averaged, in float32 or wider."""

    def merge(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        per_example = spec == PartitionSpec(layout.config.axes)
        return x.reshape(-1, *x.shape[2:]) if per_example else jnp.mean(widened(x), axis=0).astype(x.dtype)

    return jax.tree.map(merge, out, specs)


def average_outputs(out: Tree, specs: Tree, layout: Layout) -> Tree:
    """Averages over the devices, in float32 or wider, what does not stay sharded (inside `shard_map`)."""
    axes = layout.config.axes

    def average(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return x if spec == PartitionSpec(axes) else lax.pmean(widened(x), axes).astype(x.dtype)

    return jax.tree.map(average, out, specs)


def not_differentiated(tree: Tree, message: str) -> Tree:
    """The tree as it is; a derivative with respect to it, of either mode, which would silently be wrong, is refused."""

    @jax.custom_jvp
    def same(tree: Tree) -> Tree:
        return tree

    @same.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise ValueError(message)

    return same(tree)


def _is_array(x: Any) -> bool:
    return (hasattr(x, "shape") and hasattr(x, "dtype")) or isinstance(x, (int, float, complex))


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
