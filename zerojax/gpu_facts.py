"""The published facts of GPUs: what a compiler must be told of them, and what a time model divides by.

A `GpuTarget` holds sizes and rates of the chip as in the vendor's datasheet; a user's own come from a TOML file. Knows
nothing of meshes or of the plugin that compiles for them: see `zerojax.gpu_targets`.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

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
    if missing := sorted(fields.keys() - facts.keys() - known.keys()):
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
