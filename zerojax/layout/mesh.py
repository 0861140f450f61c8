"""The device mesh: which devices share a node, and which axes carry data parallelism.

Two-level collectives (arXiv 2306.10209, sections 3.2 and 3.3) need to know which devices are joined by a fast network.
`make_mesh` reads this from the processes and keeps the devices of a node together along the "local" axis; any mesh of
the user's own works as well, its data axes named by `ZeroConfig.axes`.
"""

from __future__ import annotations

import collections
import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zerojax._compat import has_explicit_axes
from zerojax.config import ZeroConfig

# A layer of a model of tens of billions of parameters in two bytes: what such a model hides its gathers with.
_PREFETCH_BYTES = 2**30


def make_mesh(
    num_nodes: int | None = None,
    devices_per_node: int | None = None,
    devices: Sequence[Any] | None = None,
    *,
    axis_types: AxisType = AxisType.Auto,
    **extra_axes: int,
) -> Mesh:
    """A mesh with axes ("node", "local", *extra_axes), the devices of each node together.

    Args:
        num_nodes: number of nodes. None: as many as the processes show (all devices of one process, or of one
            fast-connected slice of processes, are a node).
        devices_per_node: devices in each node, extra axes included. None: all that are there, divided evenly.
        devices: the devices to use. None: `jax.devices()`.
        axis_types: `AxisType.Auto` (the compiler places values) or `AxisType.Explicit`, for all axes.
        **extra_axes: name and size of further axes inside a node (tensor parallelism, say); they divide the node's
            devices, so that "local" has size `devices_per_node / prod(extra_axes)`.

    Raises:
        ValueError: the devices do not divide into these nodes, a node would mix devices of several hosts unevenly, or
            the extra axes do not divide a node.

    >>> dict(make_mesh(num_nodes=2, devices_per_node=4, devices=jax.devices()[:8]).shape)
    {'node': 2, 'local': 4}
    """
    devices = list(jax.devices() if devices is None else devices)
    if not devices:
        raise ValueError("make_mesh: no devices given; pass devices=jax.devices() or leave it out")
    if len(set(devices)) != len(devices):
        raise ValueError(f"make_mesh: the {len(devices)} devices given are not all different")
    hosts = _group_by_host(devices)
    for name in extra_axes:
        if meant := difflib.get_close_matches(name, ["num_nodes", "devices_per_node", "axis_types"], 1, cutoff=0.8):
            raise TypeError(f"make_mesh({name}=...) would be another axis; did you mean {meant[0]}?")
    for name, value in (("num_nodes", num_nodes), ("devices_per_node", devices_per_node), *extra_axes.items()):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"make_mesh({name}={value!r}): a positive integer is required")
    if num_nodes is None:
        num_nodes = len(hosts) if devices_per_node is None else len(devices) // devices_per_node
    if devices_per_node is None:
        devices_per_node = len(devices) // max(num_nodes, 1)
    if num_nodes * devices_per_node != len(devices):
        raise ValueError(
            f"make_mesh: {num_nodes} nodes x {devices_per_node} devices need {num_nodes * devices_per_node} devices, "
            f"but there are {len(devices)} ({_describe(hosts)}); to use only some, pass devices=jax.devices()[:n]"
        )
    _check_hosts(hosts, num_nodes, devices_per_node)
    inner = math.prod(extra_axes.values())
    if devices_per_node % inner:
        raise ValueError(
            f"make_mesh: the extra axes {extra_axes} need a multiple of {inner} devices in each node, "
            f"but a node has {devices_per_node}"
        )
    names = ("node", "local", *extra_axes)
    if len(set(names)) != len(names):
        raise ValueError(f"make_mesh: extra axes {tuple(extra_axes)} must not be called 'node' or 'local'")
    shape = (num_nodes, devices_per_node // inner, *extra_axes.values())
    ordered = np.array([d for host in hosts.values() for d in host], dtype=object).reshape(shape)
    return Mesh(ordered, names, axis_types=(axis_types,) * len(names))


def check_data_axes(mesh: Mesh, axes: tuple[str, ...]) -> None:
    """Refuses a mesh that lacks one of the configured data axes, naming what it has."""
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing:
        raise ValueError(
            f"mesh axes {missing} are required by ZeroConfig(axes={axes}), but the mesh has {dict(mesh.shape)}; "
            f"name the mesh's own data axes, outermost first: ZeroConfig(axes=(...,))"
        )
    manual = [a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual]
    if manual:
        raise ValueError(f"mesh axes {manual} are Manual; use AxisType.Auto or AxisType.Explicit")
    explicit = [a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit]
    if explicit and not set(axes) <= set(explicit):
        raise ValueError(
            f"mesh axes {explicit} are Explicit, but not all data axes {axes} are: a batch could not be moved to its "
            "devices by type. Make all axes AxisType.Auto, or the data axes Explicit too"
        )


def data_size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """The number of data-parallel replicas: the product of the sizes of the data axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def nontrivial_axes(mesh: Mesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the axes that have more than one device; jit drops the others from the shardings it returns."""
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def other_axes(mesh: Mesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The mesh axes that are not data axes, left to the compiler."""
    return tuple(axis for axis in mesh.axis_names if axis not in axes)


def is_of_gpus(mesh: Mesh | jax.sharding.AbstractMesh) -> bool:
    """Whether collectives on the mesh are those of GPUs; so it is taken to be where no devices are named (planning)."""
    return not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform == "gpu"


def keeps_secondary(mesh: Mesh | jax.sharding.AbstractMesh, config: ZeroConfig) -> bool:
    """Whether a secondary partition differs from both the shard and the full leaf on this mesh.

    Weight deltas keep one of each leaf from step to step, and those of other leaves for as long as ever.
    """
    asked = config.secondary or config.weight_deltas is not None
    return asked and all(mesh.shape[axis] > 1 for axis in config.axes)


def gathers_in_one_hop(mesh: Mesh | jax.sharding.AbstractMesh, config: ZeroConfig) -> bool:
    """Whether an unquantised gather is one collective over both axes: on GPUs, whose library orders its rings by the
    topology, where no secondary partition wants what lies between the hops."""
    return is_of_gpus(mesh) and not keeps_secondary(mesh, config)


def prefetch_window(mesh: Mesh | jax.sharding.AbstractMesh, config: ZeroConfig) -> int | None:
    """Bytes of weights that may be gathered ahead of their use; None: the compiler decides."""
    if config.stage < 3:
        return None
    window = config.prefetch_bytes
    return (_PREFETCH_BYTES if is_of_gpus(mesh) else None) if isinstance(window, str) else window


def with_auto_axes(fn: Callable[..., Any], mesh: Mesh, out_shardings: Any) -> Callable[..., Any]:
    """Hands explicit axes of the mesh to the compiler for the extent of `fn`: uneven slices have no explicit type.

    Args:
        fn: what to run, under `jax.jit`.
        mesh: the mesh; one without explicit axes changes nothing.
        out_shardings: NamedShardings of what `fn` returns.
    """
    explicit = tuple(a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)
    if not explicit:
        return fn
    if jax.tree.leaves(out_shardings):
        return jax.sharding.auto_axes(fn, axes=explicit, out_sharding=out_shardings)
    # JAX finds the mesh in the shardings of what is returned, and does nothing where no array is.
    everywhere = NamedSharding(mesh, PartitionSpec())
    with_array: Callable[..., Any] = jax.sharding.auto_axes(
        lambda *args: (fn(*args), jnp.zeros(())), axes=explicit, out_sharding=(out_shardings, everywhere)
    )
    return lambda *args: with_array(*args)[0]


def with_auto_mesh(sharding: NamedSharding) -> NamedSharding:
    """The sharding as a constraint inside `with_auto_axes`, which may name only axes that the compiler manages."""
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh), "a layout's shardings name real devices"
    return NamedSharding(Mesh(mesh.devices, mesh.axis_names), sharding.spec) if has_explicit_axes(mesh) else sharding


def _group_by_host(devices: Sequence[Any]) -> dict[int, list[Any]]:
    """Devices by the fastest network they share: the slice where there are several, else the process."""
    slices = {getattr(d, "slice_index", None) for d in devices}
    key = "slice_index" if len(slices) > 1 and None not in slices else "process_index"
    if key == "process_index" and None not in slices:
        # One process per GPU on one machine: a single slice of several one-device processes is one node.
        per_process = collections.Counter(d.process_index for d in devices)
        if len(per_process) > 1 and set(per_process.values()) == {1} and devices[0].platform == "gpu":
            key = "slice_index"
    hosts: dict[int, list[Any]] = {}
    for device in devices:
        hosts.setdefault(getattr(device, key), []).append(device)
    return dict(sorted(hosts.items()))


def _check_hosts(hosts: dict[int, list[Any]], num_nodes: int, devices_per_node: int) -> None:
    """A node holds whole hosts, or a host holds whole nodes; anything else cuts the fast network in two."""
    if len(hosts) == 1:
        return
    sizes = {len(host) for host in hosts.values()}
    if len(sizes) != 1:
        raise ValueError(f"make_mesh: hosts have unequal numbers of devices ({_describe(hosts)}); pass devices= evenly")
    size = sizes.pop()
    if devices_per_node % size and size % devices_per_node:
        raise ValueError(
            f"make_mesh: {num_nodes} nodes x {devices_per_node} devices cut across hosts of {size} devices; "
            f"use devices_per_node={size}"
        )


def _describe(hosts: dict[int, list[Any]]) -> str:
    counts = collections.Counter(len(host) for host in hosts.values())
    return ", ".join(f"{count} host{'s' * (count > 1)} of {size}" for size, count in sorted(counts.items()))
