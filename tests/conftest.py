"""Eight simulated CPU devices for every test and doctest, set before JAX starts its devices.

An environment that already says what to run on is left alone, so that the suite can be pointed at GPUs. Programs as
small as the tests' run as fast unoptimised: most of the time would go into optimising them, and before JAX 0.11 two
thirds of what is left into the newer of XLA's two emitters of fused loops. What is compiled for target GPUs takes its
matrix products from a library, untuned: their kernels are most of a compile, and no test reads them.
"""

import importlib.metadata
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
            # An unknown flag ends the process.
            *[("xla_cpu_use_fusion_emitters", "false")] * importlib.metadata.version("jaxlib").startswith("0.10."),
        )
        # What is timed on a GPU is optimised.
        if flag not in os.environ.get("XLA_FLAGS", "") and os.environ["JAX_PLATFORMS"] == "cpu"
    ),
]).strip()  # fmt: skip

import numpy as np
import pytest

import zerojax

zerojax.simulate_devices(8)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU, or the CUDA plugin, where it is missing: see the markers in pyproject.toml."""
    if "cuda" not in os.environ["JAX_PLATFORMS"]:
        reason = "needs a GPU: JAX_PLATFORMS=cuda python -m pytest -m gpu"
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))
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
