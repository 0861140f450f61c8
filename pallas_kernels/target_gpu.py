"""Ahead-of-time compilation of kernels for a target GPU; none need be present.

XLA's CUDA plugin compiles without a device from a text target (`gpus`). jaxlib from 0.11 on registers its assembler
once a process, for the compute capability of the first kernel: after it kernels for an older GPU get machine code of
the first one's, and kernels for a newer one are refused. So a process compiles kernels for one generation, and
`compile_for` holds it to that.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from pallas_kernels import _compat
from pallas_kernels.gpus import TARGETS as GPUS

_assembles_for: list[int] = []
"""The compute capability for which this process's assembler was set up, once it is."""


def plugin_missing() -> str | None:
    """Why nothing can be compiled for a target GPU, or None."""
    if importlib.util.find_spec("jax_cuda13_plugin") or importlib.util.find_spec("jax_cuda12_plugin"):
        return None
    return "JAX's CUDA plugin is not installed: pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt (jax's version)"


def has_nvidia_gpu() -> bool:
    """Whether this machine's driver shows a GPU; JAX is not asked, so no backend is chosen."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*"))


def topology(gpu: str, shape: str = "1x1x1") -> Any:
    """Devices of the named kind that exist for the compiler alone; ``shape`` is slices x hosts x GPUs of a host."""
    return topologies.get_topology_desc(platform="cuda", target_config=GPUS[gpu].target_config, topology=shape)


@contextlib.contextmanager
def compiling_for(gpu: str) -> Iterator[None]:
    """Kernels compile for this GPU's compute capability."""
    with _compat.assume_compute_capability(GPUS[gpu].compute_capability, 0):
        yield


def compile_for(function: Callable[..., Any], shapes: Sequence[jax.ShapeDtypeStruct], gpu: str) -> Any:
    """Compiles a function of arrays for one target GPU; returns JAX's compiled object (``.as_text()`` and so on).

    Raises:
        RuntimeError: the CUDA plugin is not installed, or the process has compiled a kernel for another generation and
            the assembler of this jaxlib keeps to that one.
    """
    missing = plugin_missing()
    if missing:
        raise RuntimeError(missing)
    mesh = jax.sharding.Mesh(np.array(topology(gpu).devices), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tuple(shapes))
    with compiling_for(gpu):
        lowered = jax.jit(function).lower(*placed)
        if _compat.ONE_ASSEMBLER_A_PROCESS and "mosaic_gpu" in lowered.as_text():
            _keep_to_one_generation(gpu)
        return lowered.compile()


def _keep_to_one_generation(gpu: str) -> None:
    wanted = GPUS[gpu].compute_capability
    if not _assembles_for:
        _assembles_for.append(wanted)
    if _assembles_for != [wanted]:
        raise RuntimeError(
            f"this process has compiled kernels for compute capability {_assembles_for[0]}.x, and jaxlib's assembler "
            f"keeps to the first one: compile for {gpu} ({wanted}.x) in a process of its own"
        )
