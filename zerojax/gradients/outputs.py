"""What a loss function returns: the loss and the factor of its mean, and the state that the model carries on.

The factor 1/N (or one over the global weight) is applied once, as the cotangent of the loss, so that no pass over the
gradients is spent on it; where that is not exact (a narrow loss, a weight known only after all microbatches) the rest
follows as a factor of the sums.

Model state (batch statistics, moving averages, counters) starts a step equal on every device and is updated from each
device's part of the batch; the step keeps the mean over devices and microbatches, so that running means are those of
the global batch. Integers are counters, which all devices advance alike: the largest is kept. Runs inside
`shard_map`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax import _compat
from zerojax.layout.layout import Layout

Tree = Any


class GlobalLoss(NamedTuple):
    """The loss of the global batch.

    Attributes:
        value: scalar, the same on every device.
        weight: the global sum of the weights, float32 or the wider dtype of the loss; None for a loss without.
        factor: what the summed gradients still lack; None: nothing.
    """

    value: jax.Array
    weight: jax.Array | None
    factor: Any


def widened(x: jax.Array) -> jax.Array:
    """A float in float32, or in its own wider dtype: what is summed over devices or microbatches must not overflow."""
    return x.astype(wide_dtype(x.dtype))


def wide_dtype(dtype: Any) -> np.dtype:
    """The dtype of such sums, also under JAX's strict promotion of dtypes."""
    return np.promote_types(dtype, np.float32)


def loss_cotangent(main: Any, weighted: bool, layout: Layout, count: int, scale: jax.Array | None) -> Any:
    """The cotangent of one device's (microbatch's) output for which the summed gradients are the global one's.

    Args:
        main: the loss, or (sum, weight).
        weighted: which of them.
        layout: the layout, for the number of devices.
        count: number of microbatches.
        scale: the loss scale, or None. The product is made in float32: 2**16 is no float16, but 2**16 / N is.
    """

    def filled(x: jax.Array, value: Any) -> jax.Array:
        wide = jnp.asarray(value, wide_dtype(x.dtype))
        return (wide if scale is None else wide * scale).astype(x.dtype)

    if not weighted:
        return filled(main, inverse_count(main.dtype, layout, count))
    total, weight = main
    if count > 1 or _is_narrow(total.dtype):  # the weight of all microbatches is known only afterwards
        return filled(total, inverse_count(total.dtype, layout, count)), zero_cotangent(weight)
    wide = wide_dtype(total.dtype)
    return filled(total, 1.0 / lax.psum(weight.astype(wide), layout.config.axes)), zero_cotangent(weight)


def inverse_count(dtype: Any, layout: Layout, count: int) -> float:
    """One over the number of parts that are averaged; for a narrow loss the power of two below, exact in it."""
    parts = layout.num_shards * count
    return 2.0 ** -math.ceil(math.log2(parts)) if _is_narrow(dtype) else 1.0 / parts


def _is_narrow(dtype: Any) -> bool:
    return jnp.dtype(dtype).itemsize < 4


def global_loss(main: Any, weighted: bool, layout: Layout, count: int) -> GlobalLoss:
    """The global loss from one device's, of one or (stacked) of all microbatches."""
    axes = layout.config.axes
    part = inverse_count((main[0] if weighted else main).dtype, layout, count)
    if not weighted:
        exact = layout.num_shards * count * part
        value = lax.pmean(jnp.mean(widened(main)), axes).astype(main.dtype)
        return GlobalLoss(value, None, None if abs(exact - 1) < 1e-6 else 1 / exact)
    wide = wide_dtype(main[0].dtype)
    total, weight = (lax.psum(jnp.sum(x.astype(wide)), axes) for x in main)
    factor = None if count == 1 and not _is_narrow(main[0].dtype) else 1 / (part * weight)
    return GlobalLoss(total / weight, weight, factor)


def zero_cotangent(x: jax.Array) -> Any:
    """The cotangent of an output that no gradient flows from."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def check_loss(shapes: Tree, has_aux: bool, weighted: bool) -> None:
    """Refuses a loss function that does not return what `has_aux` and `weighted` say."""
    if has_aux and not (isinstance(shapes, tuple) and len(shapes) == 2):
        raise ValueError(f"value_and_grad(has_aux=True): loss_fn must return (loss, aux), but returned {shapes}")
    main: Any = shapes[0] if has_aux else shapes
    if weighted and not (isinstance(main, tuple) and len(main) == 2):
        raise ValueError(f"value_and_grad(weighted=True): loss_fn must return (sum, weight), but returned {main}")
    for name, x in (("sum", main[0]), ("weight", main[1])) if weighted else (("loss", main),):
        if not isinstance(x, jax.ShapeDtypeStruct) or x.shape != ():
            got = x.shape if isinstance(x, jax.ShapeDtypeStruct) else jax.tree.structure(x)
            raise ValueError(
                f"the {name} that loss_fn returns must be a scalar, but it is {got}; take the mean over this device's "
                "examples, or pass has_aux=True if it returns (loss, aux)"
            )
        if name != "weight" and not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"the {name} that loss_fn returns must be a float, but it has dtype {x.dtype}")



def check_model_state(before: Tree, after: Tree) -> None:
    """Refuses an updated state that is not of the form of the one given.

    Args:
        before: the state as arrays or shapes.
        after: shapes of what the loss function returned as the new state.

    Raises:
        ValueError: another structure, a leaf of another shape or dtype, or PRNG keys (the key path is named).

    >>> shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    >>> check_model_state({"mean": shape}, {"mean": shape})
    """
    for path, x in jax.tree_util.tree_flatten_with_path(before)[0]:
        if _compat.is_prng_key(x):
            raise ValueError(
                f"model_state{jax.tree_util.keystr(path)} holds PRNG keys: pass a new key to every step as an argument "
                "after the batch, where it is folded with the index of the device"
            )
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise ValueError(
            "the new model state that loss_fn returns must have the structure of the one it was given: required "
            f"{jax.tree.structure(before)}, got {jax.tree.structure(after)}"
        )

    def compare(path: Any, old: Any, new: Any) -> None:
        wanted, got = (jnp.shape(old), jnp.result_type(old)), (jnp.shape(new), jnp.result_type(new))
        if wanted != got:
            raise ValueError(
                f"the new model state{jax.tree_util.keystr(path)} that loss_fn returns has shape {got[0]} and dtype "
                f"{got[1]}, but the one it was given has {wanted[0]} and {wanted[1]}: cast or reshape it in loss_fn"
            )

    jax.tree_util.tree_map_with_path(compare, before, after)


def merged_state(state: Tree, layout: Layout, count: int) -> Tree:
    """One state from those of all devices, and of `count` microbatches stacked along dim 0 (none with 1)."""
    axes = layout.config.axes

    def merge(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            whole = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
            whole = jnp.max(whole, axis=0) if count > 1 else whole
            return lax.pmax(whole, axes).astype(x.dtype)
        wide = widened(x)
        return lax.pmean(jnp.mean(wide, axis=0) if count > 1 else wide, axes).astype(x.dtype)

    return jax.tree.map(merge, state)
