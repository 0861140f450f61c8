"""`make_train_step`: gradients, optimizer and parameters composed into one compiled step with donated buffers.

The step is what a user would write from `value_and_grad` and `zero`; it adds metrics that are global values, and
donation, so that parameters and state are updated in place. Knows nothing of collectives or placements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.feedback import init_feedback
from zerojax.gradients import value_and_grad
from zerojax.layout import Layout
from zerojax.optimizer import ZeroState

Tree = Any


class TrainState(NamedTuple):
    """What a training loop carries from step to step.

    Attributes:
        step: number of steps taken, int32 scalar.
        params: parameters in stored form.
        opt_state: state of the sharded optimizer.
        feedback: error feedback of the quantised reduction, or None (`ZeroConfig.error_feedback`).
    """

    step: jax.Array
    params: Tree
    opt_state: ZeroState
    feedback: Tree = None

    @classmethod
    def create(cls, params: Tree, tx: optax.GradientTransformation, layout: Layout | None = None) -> TrainState:
        """The state before the first step, from parameters in stored form and a `zerojax.zero` optimizer.

        With `ZeroConfig(error_feedback=True)` the layout is needed too, to make the feedback.

        >>> import zerojax
        >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
        >>> layout = zerojax.partition({"w": jnp.ones((8, 2))}, mesh, zerojax.ZeroConfig(min_shard_size=0))
        >>> tx = zerojax.zero(optax.sgd(0.1), layout)
        >>> int(zerojax.TrainState.create(layout.shard({"w": jnp.ones((8, 2))}), tx).step)
        0
        """
        leaves = jax.tree.leaves(params)
        # On the mesh from the start: a step counter of one device would have the step compiled a second time.
        meshes = [x.sharding.mesh for x in leaves if isinstance(x.sharding, NamedSharding)]
        everywhere = NamedSharding(meshes[0], PartitionSpec()) if meshes else None
        if all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
        else:
            step = jax.device_put(jnp.zeros((), jnp.int32), everywhere)
        feedback = None
        if layout is not None and layout.config.error_feedback:
            feedback = init_feedback(layout, abstract=isinstance(step, jax.ShapeDtypeStruct))
        return cls(step, params, tx.init(params), feedback)  # type: ignore[arg-type]


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    layout: Layout,
    *,
    microbatches: int = 1,
    has_aux: bool = False,
    weighted: bool = False,
    donate: bool = True,
) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
    """One compiled training step.

    Args:
        loss_fn: as for `value_and_grad`.
        tx: an optimizer made by `zerojax.zero(..., layout)`.
        layout: the layout of the parameters.
        microbatches: as for `value_and_grad`: gradient accumulation, with float32 accumulators.
        has_aux: as for `value_and_grad`; the aux is returned under "aux".
        weighted: as for `value_and_grad`.
        donate: give the old state's buffers to the new one. The old state cannot be used afterwards.

    Returns:
        A function `step(state, batch, *rest) -> (state, metrics)`; metrics are "loss" and "grad_norm" (global norm of
        the mean gradient before any clipping), scalars that are the same on every device, and "aux".

    Raises:
        ValueError: as `value_and_grad`; a batch that does not divide into the microbatches.

    >>> import zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> layout = zerojax.partition({"w": jnp.ones((8,))}, mesh, zerojax.ZeroConfig(min_shard_size=0))
    >>> tx = zerojax.zero(optax.sgd(0.1), layout)
    >>> state = zerojax.TrainState.create(layout.shard({"w": jnp.ones((8,))}), tx)
    >>> state, metrics = make_train_step(lambda p, x: jnp.mean(x @ p["w"]), tx, layout)(state, jnp.ones((16, 8)))
    >>> int(state.step), float(metrics["loss"])
    (1, 8.0)
    """
    grad_fn = value_and_grad(loss_fn, layout, has_aux=has_aux, weighted=weighted, microbatches=microbatches)

    def step(state: TrainState, batch: Tree, *rest: Any) -> tuple[TrainState, dict[str, Any]]:
        feedback = None
        if layout.config.error_feedback:
            value, grads, feedback = grad_fn(state.params, batch, *rest, feedback=state.feedback)
        else:
            value, grads = grad_fn(state.params, batch, *rest)
        loss, aux = value if has_aux else (value, None)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)  # type: ignore[arg-type]
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(jax.tree.map(_wide, grads))}
        if has_aux:
            metrics["aux"] = aux
        return TrainState(state.step + 1, params, opt_state, feedback), metrics  # type: ignore[arg-type]

    return jax.jit(step, donate_argnums=(0,) if donate else ())


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
