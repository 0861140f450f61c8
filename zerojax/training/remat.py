"""`checkpoint`: activation checkpointing, with checkpoints split over a mesh axis or kept in host memory.

A thin layer over `jax.checkpoint`: what a function computes is dropped and recomputed in the backward pass, except for
values named by `jax.ad_checkpoint.checkpoint_name`. It adds ZeRO-R's partitioned activation checkpointing (arXiv
1910.02054, section 6.1): under tensor parallelism the input of a layer is the same on every device of the model axis,
so each keeps 1/n of it (Pa), in device or host memory (Pa+cpu), and it is gathered again for the recomputation.
Composes with `value_and_grad` and `scan`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

from zerojax import _compat

Fn = TypeVar("Fn", bound=Callable[..., Any])
INPUT = "input"


def checkpoint(
    fn: Fn,
    *,
    save: Iterable[str] = (),
    offload: Iterable[str] = (),
    activations: int | Sequence[int] = 0,
    partition_over: str | None = None,
    prevent_cse: bool = True,
) -> Fn:
    """Recomputes `fn` in the backward pass instead of keeping what it computes.

    Args:
        fn: a function of arrays, a layer or the body of a scan; names the values worth keeping by
            `jax.ad_checkpoint.checkpoint_name(x, "name")`.
        save: names of the values that stay in device memory.
        offload: names of the values that wait in pinned host memory; "input" is the activations that enter `fn`.
        activations: positions of the arguments that are activations (not parameters): what "input" means, and what
            `partition_over` splits. 0, as for the carry of a scan.
        partition_over: mesh axis, managed by the compiler ("model"), over which the activations that enter `fn` are
            split while they wait, along their largest dim that divides. They must be equal along it, as the input of a
            tensor-parallel layer is. Costs two gathers of them over the axis, one in the forward pass, one before the
            recomputation.
        prevent_cse: as for `jax.checkpoint`: False is right and faster inside a scan.

    Returns:
        A function of the same values and gradients.

    Raises:
        ValueError: when called: a name that no value in `fn` has or that is both saved and offloaded; an axis that is
            not in the mesh in use or is not the compiler's; activations of which no dim divides by the axis.

    >>> layer = checkpoint(lambda x, w: jnp.tanh(x @ w), offload=["input"])
    >>> float(jax.grad(lambda w: layer(jnp.ones((2, 3)), w).sum())(jnp.zeros((3, 1)))[0, 0])
    2.0
    """
    saved, offloaded = _names("save", save), _names("offload", offload)
    if twice := saved & offloaded:
        raise ValueError(f"checkpoint: {sorted(twice)} cannot be both saved and offloaded")
    positions = (activations,) if isinstance(activations, int) else tuple(activations)
    named_input = partition_over is not None or INPUT in saved | offloaded
    if partition_over is not None and INPUT not in offloaded:
        saved |= {INPUT}

    @functools.wraps(fn)
    def body(*args: Any, **kwargs: Any) -> Any:
        if named_input:
            args = tuple(_kept(x, i, partition_over) if i in positions else x for i, x in enumerate(args))
        return fn(*args, **kwargs)

    policy = _policy(saved, offloaded)

    @functools.wraps(fn)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if named_input and (beyond := [i for i in positions if i >= len(args)]):
            raise ValueError(f"checkpoint(activations={positions}): no positional argument {beyond} among {len(args)}")
        if saved or offloaded:
            _check_names(saved | offloaded, jax.make_jaxpr(body)(*args, **kwargs))
        return jax.checkpoint(body, policy=policy, prevent_cse=prevent_cse)(*args, **kwargs)

    return checkpointed  # type: ignore[return-value]


def _names(field: str, names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise ValueError(f"checkpoint({field}={names!r}): a sequence of names is required: [{names!r}]")
    return frozenset(names)


def _policy(saved: frozenset[str], offloaded: frozenset[str]) -> Callable[..., Any] | None:
    if offloaded:
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=sorted(saved),
            names_which_can_be_offloaded=sorted(offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
    return jax.checkpoint_policies.save_only_these_names(*sorted(saved)) if saved else None


def _check_names(wanted: frozenset[str], jaxpr: Any) -> None:
    """A name that nothing has would keep nothing, in silence."""
    found = _names_in(jaxpr)
    if missing := wanted - found:
        raise ValueError(
            f"checkpoint: no value in the function is named {sorted(missing)} (it has {sorted(found)}); name one with "
            "jax.ad_checkpoint.checkpoint_name(x, name)"
        )


def _names_in(jaxpr: Any) -> set[str]:
    inner, _ = _compat.open_jaxpr(jaxpr)
    found: set[str] = set()
    for eqn in inner.eqns:
        if eqn.primitive.name == "name":
            found.add(eqn.params["name"])
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(_compat.open_jaxpr(part)[0], "eqns"):
                    found |= _names_in(part)
    return found


def _kept(tree: Any, position: int, axis: str | None) -> Any:
    """The activations of one argument under the name "input", split over the axis where there is one."""

    def keep(path: Any, x: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact) or not jnp.ndim(x):
            return x
        if axis is None:
            return checkpoint_name(x, INPUT)
        size = _axis_size(axis)
        where = f"argument {position}{jax.tree_util.keystr(path)} of {x.shape}"
        dims = [d for d, extent in enumerate(x.shape) if extent and extent % size == 0]
        if not dims:
            raise ValueError(f"checkpoint(partition_over={axis!r}): {where} has no dim that divides by its size {size}")
        return _split_and_joined(axis, size, max(dims, key=lambda d: x.shape[d]))(x)

    return jax.tree_util.tree_map_with_path(keep, tree)


def _axis_size(axis: str) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if axis not in kinds:
        raise ValueError(
            f"checkpoint(partition_over={axis!r}): the mesh in use has axes {tuple(kinds)}; call it inside "
            "zerojax.value_and_grad, or under jax.set_mesh(mesh), with a mesh that has the axis"
        )
    if kinds[axis] != AxisType.Auto:
        raise ValueError(
            f"checkpoint(partition_over={axis!r}): the axis is {kinds[axis].name} here; it must be one that the "
            "compiler manages (AxisType.Auto), not a data axis"
        )
    return mesh.shape[axis]


def _split_and_joined(axis: str, size: int, dim: int) -> Callable[[jax.Array], jax.Array]:
    """The identity through a value that is split over the axis; the split value is what is kept.

    Both halves are manual over the axis: as sharding constraints they make the compiler split the layer's own values
    too, and move them back and forth by all-to-all.
    """
    split_spec = PartitionSpec(*(None,) * dim, axis)
    manual = functools.partial(jax.shard_map, axis_names={axis}, check_vma=False)

    def cut(x: jax.Array) -> jax.Array:
        extent = x.shape[dim] // size
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * extent, extent, dim)

    def through(x: jax.Array) -> jax.Array:
        part = manual(cut, in_specs=PartitionSpec(), out_specs=split_spec)(x)
        part = checkpoint_name(part, INPUT)
        return manual(
            lambda part: lax.all_gather(part, axis, axis=dim, tiled=True),
            in_specs=split_spec,
            out_specs=PartitionSpec(),
        )(part)

    identity = jax.custom_vjp(through)
    identity.defvjp(lambda x: (through(x), None), lambda _, cotangent: (cotangent,))
    return identity
