"""Simulated devices: a CPU that passes for many, so that a sharded program runs, and is tested, on any machine.

XLA runs the simulated devices in one process, where a collective is a meeting of their threads under a key: run, group
of devices and channel. JAX gives every collective that a program writes out the same channel. XLA starts them in one
order, but does not count the collectives inside a loop as done before it starts the next one outside, so that a gather
inside the loop on one device can meet a gather outside it on another. Then values are swapped, or the process waits for
ever, or it ends ("Id can't be larger than the number of participating threads"). A channel for each collective keeps
their meetings apart; only one in a jitted function that is called several times keeps its channel for all the calls.
GPUs meet in NCCL's order and need none of this: programs for them, and for several platforms, stay as they are.
"""

from __future__ import annotations

import functools
import glob
import importlib.metadata
import importlib.util
import operator
import os
import pkgutil
import re
import sys
from typing import Any, SupportsIndex

import jax
from jax.sharding import Mesh

# A simulated device that waits in a collective holds one of the threads of XLA's pool, which has one per device or core
# unless NPROC says otherwise; a few collectives in flight at once would use them all up.
THREADS_PER_DEVICE = 4


def simulate_devices(count: SupportsIndex = 8) -> None:
    """Makes the CPU pass for several devices; call it before the first array, key or list of devices.

    Where there are GPUs they stay JAX's default devices, and what `make_mesh()` takes; where there are none, JAX is
    told to look for the CPU alone, unless `JAX_PLATFORMS` says otherwise. A number that the environment gives
    (`XLA_FLAGS=--xla_force_host_platform_device_count=...` or `JAX_NUM_CPU_DEVICES`) is kept, and so is NPROC.

    Args:
        count: number of devices.

    Raises:
        ValueError: `count` is not a positive integer.
        RuntimeError: JAX has started its devices already, with another number of them.

    >>> simulate_devices(8)
    >>> jax.device_count("cpu")
    8
    """
    try:
        number = 0 if isinstance(count, bool) else operator.index(count)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"simulate_devices({count!r}): a positive integer is required")
    flags = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    given = flags[-1] if flags else os.environ.get("JAX_NUM_CPU_DEVICES")
    number = int(given) if given else number
    if _has_started():
        if (found := jax.device_count("cpu")) != number:
            raise RuntimeError(
                f"simulate_devices({count}): JAX has started with {found} CPU devices already; call it before the "
                "first array or PRNG key is made or jax.devices() is asked"
            )
    else:
        os.environ.setdefault("NPROC", str(THREADS_PER_DEVICE * number))
        if not given:
            jax.config.update("jax_num_cpu_devices", number)
        if not jax.config.jax_platforms and not _may_have_accelerators():  # type: ignore[attr-defined]
            jax.config.update("jax_platforms", "cpu")  # a CUDA plugin without a GPU fails at length
    separate_collectives()


def _may_have_accelerators() -> bool:
    """Whether JAX could find anything but the CPU: device files of GPUs and TPUs, or a plugin of another kind."""
    if not sys.platform.startswith("linux") or importlib.util.find_spec("libtpu"):
        return True
    plugins = importlib.util.find_spec("jax_plugins")
    found = {m.name for m in pkgutil.iter_modules(plugins.submodule_search_locations)} if plugins else set()
    found |= {point.name for point in importlib.metadata.entry_points(group="jax_plugins")}
    if not all("cuda" in name for name in found):
        return True
    return any(glob.glob(f"/dev/{name}") for name in ("nvidia[0-9]*", "nvidiactl", "kfd", "dxg", "nvhost-*", "nvgpu*"))


def _has_started() -> bool:
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def separate_collectives_of(mesh: Mesh) -> None:
    """Calls `separate_collectives` if the mesh has several simulated devices, whoever set them up."""
    if isinstance(mesh, Mesh) and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":  # not an AbstractMesh
        separate_collectives()


@functools.cache
def separate_collectives() -> None:
    """From now on, every collective lowered for the CPU alone gets a channel of its own; once for the process."""
    from jax._src.interpreters import mlir

    lower: Any = mlir.lower_jaxpr_to_module

    @functools.wraps(lower)
    def with_own_channels(*args: Any, **options: Any) -> Any:
        result = lower(*args, **options)
        if tuple(options.get("platforms", ())) == ("cpu",):
            _number(result.module)
        return result

    mlir.lower_jaxpr_to_module = with_own_channels


def _number(module: Any) -> None:
    """Gives each collective of a lowered module a channel of its own, after those that are in use."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo as hlo

    collectives, highest = [], 0

    def visit(op: Any) -> Any:
        nonlocal highest
        if "channel_handle" in op.attributes:
            handle = hlo.ChannelHandle(op.attributes["channel_handle"])
            highest = max(highest, handle.handle)
            if op.name not in ("stablehlo.send", "stablehlo.recv"):
                collectives.append((op, handle.channel_type))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    with module.context:
        for number, (op, kind) in enumerate(collectives, highest + 1):
            op.attributes["channel_handle"] = hlo.ChannelHandle.get(number, kind)
