"""What a loss function returns, and the factor that makes the summed gradients those of the global mean.

The factor 1/N (or one over the global weight) is applied once, as the cotangent of the loss, so that no pass over the
gradients is spent on it; where that is not exact (a narrow loss, a weight known only after all microbatches) the rest
follows as a factor of the sums. Runs inside `shard_map`; knows nothing of parameters.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.layout import Layout

Tree = Any


class GlobalLoss(NamedTuple):
    """The loss of the whole batch.

    Attributes:
        value: scalar, the same on every device.
        weight: the global sum of the weights, float32 or the wider dtype of the loss; None for a loss without.
        factor: what the summed gradients still lack; None: nothing.
    """

    value: jax.Array
    weight: jax.Array | None
    factor: Any


def seed(main: Any, weighted: bool, layout: Layout, count: int, scale: jax.Array | None) -> Any:
    """The cotangent of one device's (microbatch's) output for which the summed gradients are the global one's.

    Args:
        main: the loss, or (sum, weight).
        weighted: which of them.
        layout: the layout, for the number of devices.
        count: number of microbatches.
        scale: the loss scale, or None. The product is made in float32: 2**16 is no float16, but 2**16 / N is.
    """

    def filled(x: jax.Array, value: Any) -> jax.Array:
        wide = jnp.asarray(value, jnp.promote_types(x.dtype, jnp.float32))
        return (wide if scale is None else wide * scale).astype(x.dtype)

    if not weighted:
        return filled(main, share(main.dtype, layout, count))
    total, weight = main
    if count > 1 or _is_narrow(total.dtype):  # the weight of all microbatches is known only afterwards
        return filled(total, share(total.dtype, layout, count)), zero_cotangent(weight)
    wide = jnp.promote_types(total.dtype, jnp.float32)
    return filled(total, 1.0 / lax.psum(weight.astype(wide), layout.config.axes)), zero_cotangent(weight)


def share(dtype: Any, layout: Layout, count: int) -> float:
    """One over the number of parts that are averaged; for a narrow loss the power of two below, exact in it."""
    parts = layout.num_shards * count
    return 2.0 ** -math.ceil(math.log2(parts)) if _is_narrow(dtype) else 1.0 / parts


def _is_narrow(dtype: Any) -> bool:
    return jnp.dtype(dtype).itemsize < 4


def global_loss(main: Any, weighted: bool, layout: Layout, count: int) -> GlobalLoss:
    """The global loss from one device's, of one or (stacked) of all microbatches."""
    axes = layout.config.axes
    part = share((main[0] if weighted else main).dtype, layout, count)
    if not weighted:
        exact = layout.num_shards * count * part
        value = lax.pmean(jnp.mean(main, dtype=main.dtype), axes)
        return GlobalLoss(value, None, None if abs(exact - 1) < 1e-6 else 1 / exact)
    wide = jnp.promote_types(main[0].dtype, jnp.float32)
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
