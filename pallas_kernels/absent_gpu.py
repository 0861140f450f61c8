"""Compiling for a GPU that is not there, and the facts of each that a time model needs.

XLA's CUDA plugin compiles without a device from a text target. The numbers are the vendors' datasheets and driver
reports. Issue width and warp schedulers are those of compute capability 8-10: 128 lane-instructions per clock and SM.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from pallas_kernels import _compat

_TEXT = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_per_core} threads_per_core_limit: 2048 core_count: {cores}
  fpus_per_core: {fpus} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock_ghz} device_memory_size: {memory}
  shared_memory_per_block_optin: {shared_per_block} cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU.

    Attributes:
        name: as the driver reports it.
        major: compute capability, major number.
        cores: streaming multiprocessors.
        bandwidth: device memory, bytes per second.
        clock_ghz: highest clock.
        sustained_ghz: clock assumed by the time model (the boost clock the vendor states for compute).
        l2: second-level cache, bytes.
        memory: device memory, bytes.
        fpus: float32 units of one multiprocessor.
        shared_per_core: shared memory of one multiprocessor, bytes.
        shared_per_block: the most one block may use, bytes.
    """

    name: str
    major: int
    cores: int
    bandwidth: int
    clock_ghz: float
    sustained_ghz: float
    l2: int
    memory: int
    fpus: int = 128
    shared_per_core: int = 233472
    shared_per_block: int = 232448

    @property
    def bytes_per_clock(self) -> float:
        """Device-memory bytes per clock and multiprocessor at the sustained clock."""
        return self.bandwidth / self.cores / (self.sustained_ghz * 1e9)


GPUS = {
    "a100": Gpu(name="NVIDIA A100-SXM4-80GB", major=8, cores=108, bandwidth=2039040000000, clock_ghz=1.41,
                sustained_ghz=1.41, l2=41943040, memory=85100068864, fpus=64, shared_per_core=167936,
                shared_per_block=166912),
    "h100": Gpu(name="NVIDIA H100 80GB HBM3", major=9, cores=132, bandwidth=3352320000000, clock_ghz=1.98,
                sustained_ghz=1.755, l2=52428800, memory=84942979072),
    "h200": Gpu(name="NVIDIA H200", major=9, cores=132, bandwidth=4800000000000, clock_ghz=1.98,
                sustained_ghz=1.755, l2=52428800, memory=151397597184),
    "b200": Gpu(name="NVIDIA B200", major=10, cores=148, bandwidth=7672320000000, clock_ghz=1.965,
                sustained_ghz=1.85, l2=132644864, memory=191514411008),
}  # fmt: skip


def plugin_missing() -> str | None:
    """Why nothing can be compiled for an absent GPU, or None."""
    if importlib.util.find_spec("jax_cuda13_plugin") or importlib.util.find_spec("jax_cuda12_plugin"):
        return None
    return "JAX's CUDA plugin is not installed: pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt (jax's version)"


def has_nvidia_gpu() -> bool:
    """Whether this machine's driver shows a GPU; JAX is not asked, so no backend is chosen."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*"))


def topology(gpu: str, shape: str = "1x1x1") -> Any:
    """Devices of the named kind that exist for the compiler alone; ``shape`` is slices x hosts x GPUs of a host."""
    target = _TEXT.format(**dataclasses.asdict(GPUS[gpu]))
    return topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape)


@contextlib.contextmanager
def compiling_for(gpu: str) -> Iterator[None]:
    """Kernels compile for this GPU's compute capability."""
    with _compat.assume_compute_capability(GPUS[gpu].major, 0):
        yield


def compile_for(function: Callable[..., Any], shapes: Sequence[jax.ShapeDtypeStruct], gpu: str) -> Any:
    """Compiles a function of arrays for one absent GPU; returns JAX's compiled object (``.as_text()`` and so on).

    Raises:
        RuntimeError: the CUDA plugin is not installed.
    """
    missing = plugin_missing()
    if missing:
        raise RuntimeError(missing)
    mesh = jax.sharding.Mesh(np.array(topology(gpu).devices), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tuple(shapes))
    with compiling_for(gpu):
        return jax.jit(function).lower(*placed).compile()
