"""Eight simulated CPU devices for every test and doctest, set before JAX is imported.

An environment that already says what to run on is left alone, so that the suite can be pointed at GPUs. Simulated
devices wait for each other inside XLA's thread pool, which has one thread per device or core: with several independent
collectives in flight it can run out of threads and stop for good, so the pool is made larger (XLA reads NPROC). And it
may run such collectives in another order on each device, which mixes their values or stops them for good: XLA's other
scheduler keeps one order (JAX 0.12 may still swap all-gathers that the partitioner made). Programs this small run as
fast unoptimised: most of the time would go into optimising them.
"""

import importlib.util
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "32")
os.environ["XLA_FLAGS"] = " ".join([
    os.environ.get("XLA_FLAGS", ""),
    *(
        f"--{flag}={value}"
        for flag, value in (
            ("xla_force_host_platform_device_count", 8),
            ("xla_cpu_enable_concurrency_optimized_scheduler", "false"),
            ("xla_backend_optimization_level", 0),
            ("xla_llvm_disable_expensive_passes", "true"),
        )
        if flag not in os.environ.get("XLA_FLAGS", "")
    ),
]).strip()  # fmt: skip

import numpy as np
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13"):
        return
    skip = pytest.mark.skip(reason="JAX's CUDA plugin is not installed: pip install 'zerojax[plan]'")
    for item in items:
        if "needs_cuda_plugin" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def rng() -> np.random.Generator:
    """NumPy's generator with a fixed seed: the same draws in every run of a test."""
    return np.random.default_rng(0)
