"""GPUs that are not here: meshes of them to compile for.

XLA's CUDA plugin compiles for a GPU it is only told about, so a program for a cluster can be built, read and measured
on a laptop. A `GpuTarget` (`zerojax.gpu_facts`) holds what the compiler must be told; `absent_mesh` turns it into a
`jax.sharding.Mesh` whose devices exist for the compiler alone. This module knows nothing of parameters, shards or
programs.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from zerojax.gpu_facts import GpuTarget, load_target


class PluginMissing(RuntimeError):
    """XLA's CUDA plugin is absent, or of another version than jaxlib; the message holds the command that adds it."""


def check_plugin() -> None:
    """Says whether this installation can compile for absent GPUs.

    Raises:
      PluginMissing: no CUDA plugin beside jaxlib, or one of another version; one line, with the command that adds it.
    """
    jaxlib = importlib.metadata.version("jaxlib")
    command = f"pip install --no-deps jax-cuda13-plugin=={jaxlib} jax-cuda13-pjrt=={jaxlib}"
    found = {}
    for cuda in ("13", "12"):
        for part in ("plugin", "pjrt"):
            try:
                found[cuda, part] = importlib.metadata.version(f"jax-cuda{cuda}-{part}")
            except importlib.metadata.PackageNotFoundError:
                continue
    for cuda in ("13", "12"):
        if found.get((cuda, "plugin")) == found.get((cuda, "pjrt")) == jaxlib:
            return
    if not found:
        raise PluginMissing(f"compiling for absent GPUs needs XLA's CUDA plugin (no driver, no GPU): {command}")
    have = ", ".join(f"jax-cuda{cuda}-{part} {version}" for (cuda, part), version in found.items())
    raise PluginMissing(f"the CUDA plugin must be of jaxlib's version {jaxlib}, found {have}: {command}")


@functools.lru_cache(maxsize=16)
def _absent_devices(target_config: str, num_nodes: int, devices_per_node: int) -> tuple[Any, ...]:
    describe = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        target_config=target_config,
        topology=f"1x{num_nodes}x{devices_per_node}",
    )
    try:
        try:
            topology = describe()
        except NotImplementedError:
            _register_compiler()
            topology = describe()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise PluginMissing(
            f"the CUDA plugin cannot describe {num_nodes} x {devices_per_node} GPUs ({reason}): "
            "start Python with JAX_PLATFORMS=cpu"
        ) from error
    return tuple(sorted(topology.devices, key=lambda device: (device.process_index, device.id)))


def _register_compiler() -> None:
    """Registers a plugin that JAX has refused for want of CUDA's libraries, which compiling does not need.

    JAX refuses it unless JAX_PLATFORMS leaves CUDA out. Choosing its backends first keeps them what they were.
    """
    jax.devices()
    for cuda in ("13", "12"):
        if importlib.util.find_spec(f"jax_plugins.xla_cuda{cuda}") is None:
            continue
        skip = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
        before = os.environ.pop(skip, "")
        os.environ[skip] = "1"
        try:
            importlib.import_module(f"jax_plugins.xla_cuda{cuda}").initialize()
        finally:
            os.environ[skip] = before  # Empty is what JAX takes as unset.
        return


def absent_mesh(
    target: GpuTarget | str | Path,
    num_nodes: int,
    devices_per_node: int,
    axis_names: Sequence[str] = ("node", "local"),
    *,
    shape: Sequence[int] | None = None,
) -> jax.sharding.Mesh:
    """Makes a mesh of GPUs that are not here, to lower and compile for (nothing can be put on them).

    Devices are laid out node by node, so that a node's devices are neighbours on the last axes.

    Args:
      target: a `GpuTarget`, or what `load_target` accepts.
      num_nodes: machines.
      devices_per_node: GPUs in each.
      axis_names: mesh axes, outermost first.
      shape: size of each axis, when the axes are not just nodes and devices in a node: `(6, 2, 4)` for
        `("node", "local", "model")` on 6 nodes of 8.

    Returns:
      Mesh of shape `(num_nodes, devices_per_node)`, or of `shape`.

    Raises:
      PluginMissing: see `check_plugin`.
      ValueError: sizes that do not multiply to the number of devices, or an axis "node" that cuts a machine in two.
    """
    sizes = (num_nodes, devices_per_node) if shape is None else tuple(shape)
    if min(num_nodes, devices_per_node, *sizes) < 1:
        raise ValueError(f"every size must be at least 1, got {num_nodes} nodes of {devices_per_node}, axes {sizes}")
    if len(sizes) != len(axis_names) or math.prod(sizes) != num_nodes * devices_per_node:
        raise ValueError(
            f"axes {tuple(axis_names)} of sizes {sizes} must number the {num_nodes} x {devices_per_node} = "
            f"{num_nodes * devices_per_node} devices: give one size per axis, with that product"
        )
    if "node" in axis_names:
        outer = math.prod(sizes[: tuple(axis_names).index("node") + 1])
        if outer != num_nodes:
            raise ValueError(
                f'axis "node" and those before it must number the {num_nodes} nodes, got {outer}: '
                f"{dict(zip(axis_names, sizes, strict=True))}"
            )
    check_plugin()
    target = target if isinstance(target, GpuTarget) else load_target(target)
    devices = _absent_devices(target.target_config, num_nodes, devices_per_node)
    return jax.sharding.Mesh(np.array(devices, dtype=object).reshape(sizes), tuple(axis_names))
