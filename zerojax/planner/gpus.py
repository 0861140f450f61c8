"""Target GPUs for ahead-of-time compilation: their published facts, and meshes of them.

A `GpuTarget` holds sizes and rates of the chip as in the vendor's datasheet: what a compiler must be told, and what a
time model divides by; a user's own come from a TOML file. XLA's CUDA plugin compiles for a GPU it is only told about,
so a program for a cluster can be built, read and measured on a laptop: `absent_mesh` makes a `jax.sharding.Mesh` whose
devices exist for the compiler alone.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import jax
import numpy as np
from jax.experimental import topologies

_COMPILER_TEXT = """gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {core_count}
  fpus_per_core: {fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {memory_bandwidth}
  l2_cache_size: {l2_cache_bytes}
  clock_rate_ghz: {clock_rate_ghz}
  device_memory_size: {memory_bytes}
  shared_memory_per_block_optin: {shared_memory_per_block}
  cuda_compute_capability {{ major: {compute_capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """What a compiler and a time model must know of one GPU.

    Attributes:
      name: as the vendor writes it.
      memory_bytes: device memory the driver reports, in bytes.
      memory_bandwidth: bytes per second between the device memory and the chip.
      peak_bf16_flops: dense bfloat16 multiply-adds, in FLOP/s, two per multiply-add (datasheet).
      link_bandwidth: bytes per second of one GPU to its neighbours in the node, in one direction (datasheet).
      core_count: streaming multiprocessors.
      fpus_per_core: float32 units of one of them.
      clock_rate_ghz: highest clock.
      l2_cache_bytes: second-level cache.
      shared_memory_per_core: bytes per multiprocessor.
      shared_memory_per_block: the most one block may ask for, in bytes.
      compute_capability: CUDA's major number.
      product_efficiency: share of the peak that large matrix products reach inside a step; fitted to published runs
        (`zerojax.planner.replay`).
      memory_efficiency: share of `memory_bandwidth` that kernels reach: 0.9, as in vendors' and others' copy
        benchmarks (BabelStream on H100: 3.0 of 3.35 TB/s).
      node_latency: seconds a collective between nodes takes beyond its bytes: a handshake over the network and the
        steps of a ring or tree, as NCCL's own tuning tables count them for some tens of nodes.
      link_latency: the same inside a node.
      launch_seconds: least time between two kernels that are launched one after the other.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: int
    peak_bf16_flops: float
    link_bandwidth: float
    core_count: int
    fpus_per_core: int
    clock_rate_ghz: float
    l2_cache_bytes: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    compute_capability: int
    product_efficiency: float = 0.6
    memory_efficiency: float = 0.9
    node_latency: float = 30e-6
    link_latency: float = 15e-6
    launch_seconds: float = 3e-6

    @property
    def target_config(self) -> str:
        """The target as XLA's GPU target configuration, a text protocol buffer."""
        return _COMPILER_TEXT.format(**dataclasses.asdict(self))


_H100 = GpuTarget(
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=84_942_979_072,
    memory_bandwidth=3_352_320_000_000,
    peak_bf16_flops=989e12,
    link_bandwidth=450e9,
    core_count=132,
    fpus_per_core=128,
    clock_rate_ghz=1.98,
    l2_cache_bytes=52_428_800,
    shared_memory_per_core=233_472,
    shared_memory_per_block=232_448,
    compute_capability=9,
)

TARGETS: Mapping[str, GpuTarget] = {
    "a100": GpuTarget(
        name="NVIDIA A100-SXM4-80GB",
        memory_bytes=85_100_068_864,
        memory_bandwidth=2_039_040_000_000,
        peak_bf16_flops=312e12,
        link_bandwidth=300e9,
        core_count=108,
        fpus_per_core=64,
        clock_rate_ghz=1.41,
        l2_cache_bytes=41_943_040,
        shared_memory_per_core=167_936,
        shared_memory_per_block=166_912,
        compute_capability=8,
    ),
    "h100": _H100,
    "h200": dataclasses.replace(
        _H100, name="NVIDIA H200", memory_bytes=151_397_597_184, memory_bandwidth=4_800_000_000_000
    ),
    "b200": GpuTarget(
        name="NVIDIA B200",
        memory_bytes=191_514_411_008,
        memory_bandwidth=7_672_320_000_000,
        peak_bf16_flops=2250e12,
        link_bandwidth=900e9,
        core_count=148,
        fpus_per_core=128,
        clock_rate_ghz=1.965,
        l2_cache_bytes=132_644_864,
        shared_memory_per_core=233_472,
        shared_memory_per_block=232_448,
        compute_capability=10,
    ),
}


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
        if not right or (wanted is not str and not value > 0) or (wanted is int and value != int(value)):
            raise ValueError(
                f"GPU file {path}: {name} = {value!r} must be a positive {getattr(wanted, '__name__', wanted)}"
            )
        known[name] = wanted(value)
    return GpuTarget(**known)


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
