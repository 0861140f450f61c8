"""Ways of sending weights and gradients that the two studies compare, and the original system's gradient scheme.

A variant is the set of options of `zerojax.ZeroConfig` that make it. The scheme of the original ZeRO++ implementation
cannot be written as one (its scale is 2**(bits - 1) levels for the largest magnitude, which the largest positive
element then exceeds; its blocks follow from a matrix's shape), so its arithmetic is emulated here on full gradients.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

import zerojax
from zerojax import QuantFormat

E4M3 = "float8_e4m3fn"
ORIGINAL = "original scheme: symmetric 2^b/2, shape-sized blocks, int4 both hops"

# Formats of the hop between nodes, after int8 inside the node.
BETWEEN_NODES: dict[str, QuantFormat] = {
    "int8, blocks of 128": QuantFormat(8, 128),
    "int4, blocks of 128": QuantFormat(4, 128),
    "int4, blocks of 128, rotated by 32": QuantFormat(4, 128, rotate=32),
    "int4, blocks of 32": QuantFormat(4, 32),
    "int4, blocks of 64, e4m3 scales": QuantFormat(4, 64, E4M3),
    "int4, blocks of 32, e4m3 scales": QuantFormat(4, 32, E4M3),
    "int4, blocks of 32, e4m3 scales, rotated by 32": QuantFormat(4, 32, E4M3, rotate=32),
    "int4, blocks of 16, e4m3 scales": QuantFormat(4, 16, E4M3),
    "e2m1, blocks of 32, e4m3 scales": QuantFormat(4, 32, E4M3, "e2m1"),
    "e2m1, blocks of 16, e4m3 scales": QuantFormat(4, 16, E4M3, "e2m1"),
}
DEFAULT_BETWEEN = "int4, blocks of 32, e4m3 scales"


def _gradients(between: str | QuantFormat, inside: str | QuantFormat = "int8", **more: Any) -> dict[str, Any]:
    return {"quantize_gradients": (inside, between), **more}


GRADIENT_VARIANTS: dict[str, dict[str, Any]] = {
    **{f"int8 inside; {name}": _gradients(fmt) for name, fmt in BETWEEN_NODES.items()},
    f"int8 inside; {DEFAULT_BETWEEN}, stochastic": _gradients("int4", rounding="stochastic"),
    f"int8 inside; {DEFAULT_BETWEEN}, error feedback": _gradients("int4", error_feedback=True),
    "int8 inside; int4, blocks of 128, error feedback": _gradients(QuantFormat(4, 128), error_feedback=True),
    f"{DEFAULT_BETWEEN}, inside; int8, blocks of 128, between": _gradients("int8", "int4"),
    f"{DEFAULT_BETWEEN}, both hops": _gradients("int4", "int4"),
}
WEIGHT_VARIANTS: dict[str, dict[str, Any]] = {
    "secondary partition": {"secondary": True},
    "weights int8, blocks of 256": {"quantize_weights": "int8"},
    "weights int4, blocks of 64, rotated by 32": {"quantize_weights": "int4"},
    "weights int4, blocks of 64": {"quantize_weights": QuantFormat(4, 64)},
}

# What is remembered from step to step has no error of a single step.
DELTA_VARIANTS: dict[str, dict[str, Any]] = {
    "weight deltas int4": {"weight_deltas": "int4"},
    "weight deltas int2": {"weight_deltas": "int2"},
    "weight deltas int4, gradients int8 and int4": {"weight_deltas": "int4", **_gradients("int4")},
    "weight deltas int2, gradients int8 and int4": {"weight_deltas": "int2", **_gradients("int4")},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "ZeRO++": {"quantize_weights": "int8", "secondary": True, **_gradients("int4")},
    **WEIGHT_VARIANTS,
    **DELTA_VARIANTS,
    **{f"gradients {name}": options for name, options in GRADIENT_VARIANTS.items()},
}


def original_value_and_grad(loss_fn: Callable[..., Any], layout: zerojax.Layout) -> Callable[..., tuple[Any, Any]]:
    """Value and gradient on full parameters (a stage 0 layout), reduced by the original scheme's arithmetic."""

    def local(params: Any, batch: Any) -> tuple[Any, Any]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return lax.pmean(loss, layout.config.axes), reduce_as_original(grads, layout)

    data = PartitionSpec(layout.config.axes)
    return jax.shard_map(
        local, mesh=layout.mesh, in_specs=(PartitionSpec(), data), out_specs=PartitionSpec(), check_vma=False
    )


def reduce_as_original(grads: Any, layout: zerojax.Layout) -> Any:
    """Two-hop mean of each leaf inside `shard_map`: stacks of layers one layer at a time, small leaves unquantised."""

    def reduce(path: Any, grad: jax.Array) -> jax.Array:
        def matrix(g: jax.Array) -> jax.Array:
            for axis in reversed(layout.config.axes):
                g = lax.pmean(_original_round_trip(g, layout.num_shards), axis)
            return g

        stacked = is_stacked(path)
        shape = grad.shape[1:] if stacked else grad.shape
        if len(shape) != 2 or shape[0] * shape[1] < layout.config.min_quantize_size:
            return lax.pmean(grad, layout.config.axes)
        return lax.map(matrix, grad) if stacked else matrix(grad)

    return jax.tree_util.tree_map_with_path(reduce, grads)


def is_stacked(path: Any) -> bool:
    """Whether a parameter of the example's model is a stack of layers."""
    return "blocks" in jax.tree_util.keystr(path)


def _original_round_trip(x: jax.Array, num_devices: int, bits: int = 4) -> jax.Array:
    """Quantised in as many contiguous blocks as the larger dim has entries, and back."""
    half = 2 ** (bits - 1)
    blocks = x.reshape(max(*x.shape, num_devices), -1)
    scale = jnp.maximum(jnp.abs(blocks).max(axis=1, keepdims=True), 1e-30) / half
    return (jnp.clip(jnp.round(blocks / scale), -half, half - 1) * scale).reshape(x.shape)
