"""Target GPUs for ahead-of-time compilation: their published facts, and meshes of them.

A `GpuTarget` holds sizes and rates of the chip: what a compiler must be told, and what a time model divides by; the
table of them is `pallas_kernels.gpus`, and a user's own come from a TOML file. XLA's CUDA plugin compiles for a GPU it
is only told about, so a program for a cluster can be built, read and measured on a laptop: `target_mesh` makes a
`jax.sharding.Mesh` whose devices exist for the compiler alone.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import math
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import jax
import numpy as np
from jax.experimental import topologies

from pallas_kernels import target_gpu
from pallas_kernels.gpus import TARGETS, GpuTarget


def load_target(name_or_path: str | Path) -> GpuTarget:
    """Finds a GPU by name, or reads one from a TOML file.

    The file holds the fields of `GpuTarget`; with `extends = "h100"` only those that differ.

    Args:
        name_or_path: a key of `TARGETS` in any case, or the path of a `.toml` file.

    Raises:
        ValueError: unknown name, unreadable file, or a file with an unknown, missing or mistyped field.

    >>> load_target("H100").memory_bytes
    84942979072
    """
    key = str(name_or_path).lower()
    if key in TARGETS:
        return TARGETS[key]
    path = Path(name_or_path)
    if path.suffix != ".toml":
        raise ValueError(
            f"unknown GPU {str(name_or_path)!r}: give one of {', '.join(TARGETS)}, or the path of a .toml file"
        )
    try:
        facts = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"GPU file {path} cannot be read: {error}") from error
    return _target_from_facts(facts, path)


def _target_from_facts(facts: dict[str, Any], path: Path) -> GpuTarget:
    fields = get_type_hints(GpuTarget)
    base = facts.pop("extends", None)
    if base is not None and str(base).lower() not in TARGETS:
        raise ValueError(f"GPU file {path} extends {base!r}: only {', '.join(TARGETS)} can be extended")
    known = dataclasses.asdict(TARGETS[str(base).lower()]) if base is not None else {}
    if unknown := sorted(facts.keys() - fields.keys()):
        raise ValueError(f"GPU file {path} has unknown fields {unknown}: the fields are {', '.join(fields)}, extends")
    optional = {field.name for field in dataclasses.fields(GpuTarget) if field.default is not dataclasses.MISSING}
    if missing := sorted(fields.keys() - facts.keys() - known.keys() - optional):
        raise ValueError(f'GPU file {path} lacks {", ".join(missing)}: add them, or extends = "h100" for the rest')
    for name, value in facts.items():
        wanted = fields[name]
        right = (
            isinstance(value, str) if wanted is str else isinstance(value, int | float) and not isinstance(value, bool)
        )
        may_be_none = getattr(GpuTarget, name, None) == 0  # by its default
        small = right and wanted is not str and not (value > 0 or (may_be_none and value == 0))
        if not right or small or (wanted is int and value != int(value)):
            kind = ("" if may_be_none else "positive ") + str(getattr(wanted, "__name__", wanted))
            raise ValueError(f"GPU file {path}: {name} = {value!r} must be a {kind}")
        known[name] = wanted(value)
    return GpuTarget(**known)


class PluginMissing(RuntimeError):
    """XLA's CUDA plugin is absent, or of another version than jaxlib; the message holds the command that adds it."""


def check_plugin() -> None:
    """Says whether this installation can compile ahead of time for a target GPU.

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
        raise PluginMissing(f"compiling for a target GPU needs XLA's CUDA plugin (no driver, no GPU): {command}")
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


def target_mesh(
    target: GpuTarget | str | Path,
    num_nodes: int,
    devices_per_node: int,
    axis_names: Sequence[str] = ("node", "local"),
    *,
    shape: Sequence[int] | None = None,
) -> jax.sharding.Mesh:
    """Makes a mesh of target GPUs, to lower and compile for ahead of time (nothing can be put on them).

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


def choose_platform() -> None:
    """Has JAX take the CPU on a machine without an NVIDIA GPU, where its CUDA plugin would look for one aloud."""
    if not target_gpu.has_nvidia_gpu() and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
