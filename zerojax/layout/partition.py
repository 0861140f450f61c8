"""From shapes to a Layout: one Placement per parameter leaf, decided once and read by everything else.

`partition` needs only shapes, so a model that fits on no device can be laid out, initialised in sharded form and
planned for. It reads what the user says of a leaf (trainable or not, its own split over other mesh axes) and refuses
what cannot be placed.

Leaves that are not trained (`trainable=lambda path, leaf: "lora" in path`) are sharded and gathered like the others.
They may be integers: an int8 base under LoRA is gathered in one byte per element, in the backward pass too. Scale after
the product (`(x @ q.astype(x.dtype)) * scale`), or put the dequantising product into `jax.checkpoint`; else the
dequantised weight waits for the backward pass (a `GatherWarning` says so). To freeze or thaw, call `partition` again:
the stored parameters stay as they are, the optimizer state starts anew. Different learning rates are
`optax.multi_transform`.

Other mesh axes (`make_mesh(model=2)`) are left to the compiler, with the leaves' own PartitionSpecs in `specs`: tensor
parallel, expert parallel (`P("expert")` on the experts' dim) and sequence parallel (`with_sharding_constraint` on
activations). No weight is gathered over these axes, and gradients, their scale and norm are those of one device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax.config import ZeroConfig
from zerojax.layout.layout import Layout
from zerojax.layout.mesh import check_data_axes, data_size, nontrivial_axes, other_axes
from zerojax.layout.notices import ZeroNotice, notices
from zerojax.layout.placement import place
from zerojax.layout.simulated import separate_collectives_of

Tree = Any


def partition(
    params: Tree,
    mesh: Mesh,
    config: ZeroConfig | None = None,
    *,
    specs: Tree | None = None,
    trainable: Tree | Callable[[str, Any], bool] | None = None,
) -> Layout:
    """Decides the placement of every parameter leaf.

    Args:
        params: pytree of arrays or `jax.ShapeDtypeStruct`s (global logical shapes).
        mesh: mesh that has the axes named in `config.axes`; further axes are left to the compiler.
        config: the configuration; `ZeroConfig()` when None.
        specs: PartitionSpecs over the *other* mesh axes, a pytree prefix of `params`. None: taken from the leaves' own
            NamedShardings where they have one.
        trainable: a pytree prefix of bools, or a function of (key path, leaf); leaves that are not trainable get no
            gradient and no optimizer state but are sharded like the others. None: every leaf is trained.

    Raises:
        ValueError: the mesh lacks a configured axis, or has Explicit axes beside Auto data axes; a spec names a
            data axis or an explicit one, or does not divide its dim; a leaf that is not an inexact array is to be
            trained. The message names the key path.

    >>> import zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> layout = zerojax.partition({"w": jnp.zeros((384, 64))}, mesh, ZeroConfig(stage=3))
    >>> layout.placements["w"].shard_shape
    (48, 64)
    """
    config = ZeroConfig() if config is None else config
    if not isinstance(config, ZeroConfig):
        raise TypeError(f"partition(params, mesh, config): config must be a ZeroConfig, got {type(config).__name__}")
    check_data_axes(mesh, config.axes)
    separate_collectives_of(mesh)
    paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    if specs is not None:
        spec_list = _broadcast(specs, params, "specs", lambda s: s is None or isinstance(s, PartitionSpec))
    else:
        spec_list = [_own_spec(leaf) for _, leaf in paths_and_leaves]
    if trainable is None or callable(trainable):
        chosen = trainable or (lambda path, leaf: True)
        train_list = [bool(chosen(jax.tree_util.keystr(path), leaf)) for path, leaf in paths_and_leaves]
    else:
        train_list = _broadcast(trainable, params, "trainable", None)

    placements = []
    for (key_path, leaf), spec, train in zip(paths_and_leaves, spec_list, train_list, strict=True):
        path = jax.tree_util.keystr(key_path)
        _check_leaf(path, leaf, bool(train))
        placements.append(
            place(
                path,
                tuple(leaf.shape),
                jax.dtypes.canonicalize_dtype(leaf.dtype),  # as JAX holds it: NumPy's float64 is its float32
                axes=nontrivial_axes(mesh, config.axes),
                num_shards=data_size(mesh, config.axes),
                min_shard_size=config.min_shard_size,
                spec=_check_spec(path, leaf.shape, spec, mesh, config.axes, own=specs is None),
                trainable=bool(train),
                quantize_above=config.min_quantize_size,
            )
        )
    for text in notices(mesh, config, placements):
        warnings.warn(text, ZeroNotice, stacklevel=2)
    return Layout(mesh, config, jax.tree.unflatten(treedef, placements))


def _check_leaf(path: str, leaf: Any, train: bool) -> None:
    name = f"params{path}"
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise ValueError(
            f"{name} is a {type(leaf).__name__}, not an array; keep only arrays in params "
            "(nnx.split(model, nnx.Param, ...), equinox.partition(model, equinox.is_inexact_array))"
        )
    if _compat.is_prng_key(leaf):
        raise ValueError(f"{name} holds PRNG keys; pass keys to the loss as a further argument, not in params")
    if train and not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise ValueError(
            f"{name} has dtype {leaf.dtype} and shape {tuple(leaf.shape)}: only float leaves can be trained; mark it "
            "with partition(..., trainable=lambda path, leaf: ...) or keep it out of params"
        )


def _own_spec(leaf: Any) -> PartitionSpec | None:
    sharding = getattr(leaf, "sharding", None) if not _compat.is_traced(leaf) else None
    return sharding.spec if isinstance(sharding, NamedSharding) else None


def _check_spec(
    path: str, shape: tuple[int, ...], spec: PartitionSpec | None, mesh: Mesh, axes: tuple[str, ...], *, own: bool
) -> PartitionSpec:
    """The leaf's PartitionSpec over the other axes, checked; `own` specs of arrays lose their data axes."""
    others = other_axes(mesh, axes)
    entries: list[str | tuple[str, ...] | None] = []
    for dim, entry in enumerate(spec or ()):
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        if own:
            names = tuple(n for n in names if n in others)
        for name in names:
            if name not in others:
                raise ValueError(
                    f"params{path} {tuple(shape)}: spec {spec} names axis {name!r}; only the mesh's other axes "
                    f"{others} may be named, the data axes {axes} are placed by the stage"
                )
        size = data_size(mesh, names)
        if dim >= len(shape) or shape[dim] % size:
            at = f"dim {dim} of {shape[dim]}" if dim < len(shape) else f"no dim {dim}"
            raise ValueError(f"params{path} {tuple(shape)}: spec {spec} needs {at} to divide by {names} of size {size}")
        names = nontrivial_axes(mesh, names)
        if explicit := [n for n in names if mesh.axis_types[mesh.axis_names.index(n)] == AxisType.Explicit]:
            raise ValueError(
                f"params{path} {tuple(shape)}: spec {spec} splits it over {explicit}, which are explicit axes of the "
                "mesh: gather on use is traced without their types. Make these axes AxisType.Auto; data axes may be "
                "explicit"
            )
        entries.append(None if not names else names[0] if len(names) == 1 else names)
    return PartitionSpec(*entries)


def _broadcast(prefix: Tree, params: Tree, what: str, is_leaf: Callable[[Any], bool] | None) -> list[Any]:
    try:
        return jax.tree.leaves(jax.tree.broadcast(prefix, params, is_leaf=is_leaf), is_leaf=is_leaf)
    except ValueError as err:
        raise ValueError(f"partition({what}=...) must be a pytree prefix of params: {err}") from err
