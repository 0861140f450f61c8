"""What a model carries from step to step beside its parameters: batch statistics, moving averages, counters.

Every device starts a step from the same values and updates them from its own part of the batch; what the step keeps is
their mean, over devices and microbatches, so that running means are those of the whole batch. Integers are counters,
which all devices advance alike: the largest is kept. Runs inside `shard_map`; knows nothing of parameters or losses.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import _compat
from zerojax.layout import Layout

Tree = Any


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
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return lax.pmean(jnp.mean(wide, axis=0) if count > 1 else wide, axes).astype(x.dtype)

    return jax.tree.map(merge, state)
