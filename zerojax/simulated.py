"""Simulated devices: a CPU that passes for many, so that a sharded program runs, and is tested, on any machine.

XLA runs the simulated devices in one process, where a collective is a meeting of their threads under a key: run, group
of devices and channel. JAX gives every collective that a program writes out the same channel. XLA starts them in one
order, but does not count the collectives inside a loop as done before it starts the next one outside, so that a gather
inside the loop on one device can meet a gather outside it on another. Then values are swapped, or the process waits for
ever, or it ends ("Id can't be larger than the number of participating threads"). A channel for each collective keeps
their meetings apart. GPUs meet in NCCL's order and need none of this; their programs stay as they are.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh

# A simulated device that waits in a collective holds one of the threads of XLA's pool, which has one per device or core
# unless NPROC says otherwise; a few collectives in flight at once would use them all up.
THREADS_PER_DEVICE = 4

_lowering = threading.RLock()


def simulate_devices(count: int = 8) -> None:
    """Makes the CPU pass for several devices; call it before the first array is made.

    Accelerators, where there are any, stay JAX's default devices. A number already given to XLA
    (`XLA_FLAGS=--xla_force_host_platform_device_count=...`) or to JAX is kept, and so is NPROC.

    Args:
        count: number of devices.

    Raises:
        ValueError: `count` is not a positive integer.
        RuntimeError: JAX has started its devices already, with another number of them.

    >>> simulate_devices(8)
    >>> jax.device_count("cpu")
    8
    """
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"simulate_devices({count!r}): a positive integer is required")
    os.environ.setdefault("NPROC", str(THREADS_PER_DEVICE * count))
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError as error:
            if (found := jax.device_count("cpu")) != count:
                raise RuntimeError(
                    f"simulate_devices({count}): JAX has started with {found} CPU devices already; call it before the "
                    "first array is made or jax.devices() is asked"
                ) from error
    separate_collectives()


def separate_collectives_of(mesh: Mesh) -> None:
    """Calls `separate_collectives` if the mesh has several simulated devices, whoever set them up."""
    if isinstance(mesh, Mesh) and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":  # not an AbstractMesh
        separate_collectives()


@functools.cache
def separate_collectives() -> None:
    """From now on, every collective lowered for the CPU gets a channel of its own; once for the process."""
    from jax._src.interpreters import mlir
    from jax._src.lax import parallel

    def with_own_channel(rule: Any) -> Any:
        @functools.wraps(rule)
        def lower(ctx: Any, *args: Any, **params: Any) -> Any:
            with _lowering:  # the rules read the channel from the module, which other threads may be reading too
                shared = mlir.COLLECTIVE_CHANNEL_ID
                mlir.COLLECTIVE_CHANNEL_ID = ctx.module_context.new_channel()
                try:
                    return rule(ctx, *args, **params)
                finally:
                    mlir.COLLECTIVE_CHANNEL_ID = shared

        return lower

    for primitive in {id(p): p for p in vars(parallel).values() if isinstance(p, core.Primitive)}.values():
        entry = mlir._lowerings.get(primitive)
        if entry is not None:
            # Not cached: equal collectives would share one lowering, and its channel.
            rule = with_own_channel(entry.rule)
            mlir.register_lowering(primitive, rule, platform="cpu", inline=entry.inline, cacheable=False)
