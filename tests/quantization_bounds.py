"""How far quantised values may be off, derived from the formats; shared by the tests of quantised movement."""

from typing import Any

import jax
import numpy as np

import pallas_kernels
from zerojax import Placement, QuantFormat
from zerojax.layout.placement import pad, unpad


def half_step(largest: Any, fmt: QuantFormat) -> Any:
    """Most that rounding to nearest moves an element of a block whose largest magnitude is at most `largest`.

    Half a step of largest / qmax, the scale being rounded up: bfloat16 adds at most 2**-7 of it; float8_e4m3 at most
    2**-3, on top of its tile's scale; its smallest subnormal is 2**-9 of a tile's scale, which is largest / (448 qmax),
    and is less than that. Float32 arithmetic adds 2**-20 of the largest value, generously. e2m1 is widest between its
    levels 4 and 6. An orthonormal rotation of width w lets the largest value, and an error, grow by sqrt(w) each.
    """
    step = largest / (127 if fmt.bits == 8 else 6 if fmt.levels == "e2m1" else 7)
    step *= 2 if fmt.levels == "e2m1" else 1
    rounded_up = 1 + 2.0**-7 if fmt.scale_dtype == "bfloat16" else (1 + 2.0**-3) * (1 + 2.0**-7)
    return (fmt.rotate or 1) * step / 2 * rounded_up + largest * 2.0**-20


def reduction_bound(grads: np.ndarray, nodes: int, local: int, formats: tuple[QuantFormat, QuantFormat]) -> float:
    """Most that an element of the sum of all devices' gradients (nodes * local, ..) is off.

    Each contribution of each hop is off by half a step; what a node sends is at most the largest sum inside it plus the
    error made there. A mesh with one node, or one device a node, has one hop.
    """
    largest = np.abs(grads).reshape(nodes, local, -1).max(axis=2, initial=0.0)
    inside = half_step(largest, formats[0]).sum(axis=1) if local > 1 else np.zeros(nodes)
    if nodes == 1:
        return float(inside.sum())
    of_nodes = np.abs(grads.reshape(nodes, local, -1).sum(axis=1)).max(axis=1, initial=0.0)
    return float((inside + half_step(of_nodes + inside, formats[1])).sum())


def as_gathered(leaf: jax.Array, placement: Placement, fmt: QuantFormat) -> jax.Array:
    """The values that devices compute with after a quantised gather: each shard quantised by itself, and back."""
    if not placement.is_quantized:
        return leaf
    q = pallas_kernels.quantize_slices(
        pad(leaf, placement), fmt, dim=placement.dim or 0, num_slices=placement.num_shards
    )
    return unpad(pallas_kernels.dequantize(q, merge_dim=placement.dim), placement)
