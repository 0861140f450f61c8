"""The check behind a decision: kernel against reference on one device, bit for bit and by the clock.

Both are compiled for a small input and for one of real size. Inputs span what a gradient may hold: many magnitudes,
zeros, NaN, Inf, subnormals and the largest number. Which NaN an operation gives is the device's choice.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.choice import Decision, Probe
from pallas_kernels.variants import Variant

RUNS, ROUNDS = 10, 5


def check(variant: Variant, device: Probe) -> Decision:
    """Compares and times one variant; whatever fails is a decision against the kernel, never an exception."""
    ratio, rate = None, None
    for size in device.sizes:
        # Of a sum, all contributions together are of that size.
        elements = max(device.sizes[0], size >> (max(1, variant.count) - 1).bit_length())
        sized = dataclasses.replace(variant, elements=elements)
        try:
            if problems := sized.plan().problems:
                return Decision(False, f"no kernel for {elements} elements: {'; '.join(problems)}")
            arguments = inputs(sized)
            reference = jax.jit(sized.function(implementation="xla"))
            kernel = jax.jit(sized.function(**device.how))
            wanted, got = reference(*arguments), kernel(*arguments)
            if unequal := different(wanted, got):
                reason = f"it differs from the reference in {unequal} at {elements} elements"
                return Decision(False, reason, faulty=True)
            taken = seconds(kernel, arguments)
            ratio, rate = taken / seconds(reference, arguments), sized.ideal_bytes * elements / taken
        except Exception as error:  # a compiler or a driver may raise anything
            first = (str(error).strip() or repr(error)).splitlines()[0][:300]
            return Decision(False, f"it failed at {elements} elements: {type(error).__name__}: {first}", faulty=True)
    assert ratio is not None
    words = f"equal to the reference, {ratio:.2f} of the time of XLA's program"
    return Decision(ratio <= 1.0, words, ratio, bytes_per_second=rate)


def inputs(variant: Variant) -> tuple[Any, ...]:
    """Arrays for a variant on the first device of this process."""
    if variant.source is None:
        return (hard_values(variant.leaf, variant.dtype),)
    contributions = hard_values((variant.count, variant.elements), "float32")
    q = jax.jit(variant.contributed)(contributions)
    more = (hard_values((1, variant.elements), "float32", scale=0.01),) if variant.addend else ()
    return (*jax.tree.leaves(q), *more)


def hard_values(shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> jax.Array:
    """Values of many magnitudes with a run of zeros, NaN, Inf, subnormals and the largest numbers among them."""
    rng = np.random.default_rng(0)
    period = min(int(np.prod(shape)), 1 << 16)
    x = rng.standard_normal(period) * np.exp(3 * rng.standard_normal(period)) * scale
    info = jnp.finfo(dtype)
    x = np.clip(x, -float(info.max), float(info.max))
    for i, value in enumerate((np.nan, -np.inf, float(info.smallest_subnormal) * 3, float(info.max), float(info.min))):
        x[(i + 1) * period // 7] = value
    x[: period // 16] = 0
    whole = np.resize(x.astype(np.float32), shape)
    return jax.device_put(jnp.asarray(whole, dtype), jax.local_devices()[0])


def different(wanted: Any, got: Any) -> str | None:
    """How many bytes of which result differ, in words; None if all bits are equal, or both are NaN."""
    for i, (a, b) in enumerate(zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True)):
        a, b = np.asarray(a), np.asarray(b)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"result {i}: {b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}"
        bits = np.dtype(f"u{a.dtype.itemsize}")
        unequal = np.atleast_1d(a).view(bits) != np.atleast_1d(b).view(bits)
        if jnp.issubdtype(a.dtype, jnp.floating):
            unequal &= ~(np.isnan(np.atleast_1d(a)) & np.isnan(np.atleast_1d(b)))
        if unequal.any():
            return f"{int(unequal.sum())} of {a.size} elements of result {i}"
    return None


def seconds(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """Seconds of one call: by the device's own clock where JAX can read it, else the best of some rounds."""
    jax.block_until_ready(function(*arguments))
    if _has_device_clock():
        return _on_device(function, arguments)
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready([function(*arguments) for _ in range(RUNS)])
        rounds.append((time.perf_counter() - start) / RUNS)
    return min(rounds)


def _on_device(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """By the profiler of JAX's Mosaic kernels, which reads CUPTI."""
    from jax.experimental.mosaic.gpu import profiler

    _, milliseconds = profiler.measure(function, iterations=RUNS)(*arguments)
    if not milliseconds:
        raise RuntimeError("no kernel was launched that could be timed")
    return float(np.median(milliseconds)) / 1e3


@functools.cache
def _has_device_clock() -> bool:
    """Asked once a process: two times that are compared come from one clock."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return False
    try:
        return _on_device(jax.jit(lambda x: x + 1), (jax.device_put(jnp.zeros(1024), device),)) > 0
    except Exception:  # no CUPTI here, or another profiler has it: the host's clock then
        return False
