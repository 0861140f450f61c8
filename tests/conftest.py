"""Eight simulated CPU devices for every test and doctest, set before JAX starts its devices.

An environment that already says what to run on is left alone, so that the suite can be pointed at GPUs. Programs as
small as the tests' run as fast unoptimised: most of the time would go into optimising them. What is compiled for target
GPUs takes its matrix products from a library, untuned: their kernels are most of a compile, and no test reads them.
"""

import importlib.util
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join([
    os.environ.get("XLA_FLAGS", ""),
    *(
        f"--{flag}={value}"
        for flag, value in (
            ("xla_backend_optimization_level", 0), ("xla_llvm_disable_expensive_passes", "true"),
            ("xla_gpu_autotune_level", 0), ("xla_gpu_enable_triton_gemm", "false"),
        )
        if flag not in os.environ.get("XLA_FLAGS", "")
    ),
]).strip()  # fmt: skip

import numpy as np
import pytest

import zerojax

zerojax.simulate_devices(8)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs the CUDA plugin where it is missing: both tiers, see the markers in pyproject.toml."""
    if importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13"):
        return
    skip = pytest.mark.skip(reason="JAX's CUDA plugin is not installed: pip install --editable '.[test]'")
    for item in items:
        if {"needs_cuda_plugin", "aot"} & {mark.name for mark in item.iter_markers()}:
            item.add_marker(skip)


@pytest.fixture
def rng() -> np.random.Generator:
    """NumPy's generator with a fixed seed: the same draws in every run of a test."""
    return np.random.default_rng(0)
