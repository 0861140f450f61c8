"""What goes into an optimizer's update and what comes out of it, held against the layout before anything is computed.

A transformation of optax may do more than map gradients to updates: measure, expect per-example gradients, or grow its
state in the first update. Those cannot be sharded by shape, and would fail far from the cause or compile every step
anew. Works on shapes, under a trace; knows nothing of how leaves are stored.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from zerojax.layout import Layout
from zerojax.state_sharding import trained_tree

Tree = Any


def like_params(grads: Tree, layout: Layout) -> Tree:
    """Gradients with a stand-in for each leaf that is not trained, whose gradient may be absent."""
    try:
        leaves = layout.leaves_of(grads)
    except ValueError:
        return grads  # the structure check names the difference
    full = [jax.ShapeDtypeStruct(p.shape, p.dtype) if not p.trainable else g
            for g, p in zip(leaves, layout.leaves, strict=True)]  # fmt: skip
    return layout.treedef.unflatten(full)


def check_same_optimizer(inner: Tree, of_state: Tree) -> None:
    """Refuses a state of another optimizer than the one that is wrapped."""
    if jax.tree.structure(inner) != jax.tree.structure(of_state):
        raise ValueError(
            "the optimizer state is of another optimizer than the one wrapped here (the structures of their states "
            "differ); create it with zero(tx, layout).init(params) of this optimizer"
        )


def check_updates(updates: Tree, layout: Layout) -> None:
    """Refuses what is not one update of the parameter's own shape for each parameter that is trained."""
    wanted = trained_tree(layout, layout.logical_shapes())
    why = (
        "zerojax.zero wraps transformations that map the mean gradient to an update of each parameter; one that "
        "measures (optax.measure_with_ema, for optax.snapshot) or takes per-example gradients "
        "(optax.contrib.differentially_private_aggregate) goes before or beside it"
    )
    if jax.tree.structure(updates) != jax.tree.structure(wanted):
        raise ValueError(
            f"the transformation returned updates of structure {jax.tree.structure(updates)}, not that of the "
            f"parameters, {jax.tree.structure(wanted)}: {why}"
        )
    for (path, want), got in zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(updates), strict=True):
        if jnp.shape(got) != want.shape:
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"the transformation returned an update of shape {jnp.shape(got)} for params{name} of shape "
                f"{want.shape}: {why}"
            )


def check_new_state(new: Tree, of_state: Tree) -> None:
    """Refuses a state whose leaves are others after an update than after `init`."""
    if jax.tree.structure(new) != jax.tree.structure(of_state):
        raise ValueError(
            "the state of the transformation has another structure after update than after init, so that it has no "
            f"fixed placement and every step would be compiled twice (optax.monitor does so: use optax.snapshot): "
            f"{jax.tree.structure(jax.tree.map(lambda p: 0, of_state))} became {jax.tree.structure(new)}"
        )
    for placement, got in zip(jax.tree.leaves(of_state), jax.tree.leaves(new), strict=True):
        if jnp.shape(got) != placement.shape:
            raise ValueError(
                f"the state of the transformation has shape {jnp.shape(got)} at {placement.path} after update, but "
                f"{placement.shape} after init: it has no fixed placement"
            )
