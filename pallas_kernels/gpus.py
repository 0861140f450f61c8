"""The published facts of GPUs: what a compiler must be told of one, and what a time model divides by.

Sizes and rates of the chip as in the vendor's datasheet and as its driver reports them. This table is the only one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

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
        product_efficiency: share of the peak that large matrix products reach inside a training step; fitted to
            published runs on A100 and H100, whose table stands in `zerojax.planner.replay`; others as H100.
        memory_efficiency: share of `memory_bandwidth` that streaming kernels reach: 0.9, as in copy benchmarks
            (BabelStream on H100: 3.0 of 3.35 TB/s).
        node_latency: seconds a collective between nodes takes beyond its bytes: handshakes over the network, and the
            steps of a ring or a tree through some nodes.
        link_latency: the same inside a node.
        launch_seconds: the least a kernel takes, from launch to launch.
        host_bandwidth: bytes per second between the device and pinned host memory, one way: 0.85 of PCIe's rate, as
            large copies reach (16 lanes of generation 4: 31.5 GB/s, of 5: 63 GB/s).
        collective_cores: multiprocessors that a collective keeps from the kernels beside it: none, since how many NCCL
            takes depends on its version and the network; `zerojax.planner.replay` says what 16 would change.
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
    host_bandwidth: float = 53e9
    collective_cores: int = 0

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
        product_efficiency=0.76,
        host_bandwidth=27e9,
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
