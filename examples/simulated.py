"""Simulated devices: a CPU that passes for many, so that a sharded program runs on any machine."""

import os

import jax


def simulate_devices(count: int) -> None:
    """Makes the CPU pass for so many devices, unless XLA was told of a number already; call before any array is made.

    A simulated device that waits in a collective holds one of XLA's threads, so there must be enough (XLA reads NPROC).
    XLA's usual scheduler may also run independent collectives in another order on each device, which mixes their values
    or stops them for good; the other one keeps one order.
    """
    os.environ.setdefault("NPROC", "32")
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_enable_concurrency_optimized_scheduler" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_enable_concurrency_optimized_scheduler=false".strip()
    if "xla_force_host_platform_device_count" not in flags:
        jax.config.update("jax_num_cpu_devices", count)
