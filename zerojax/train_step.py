"""`make_train_step`: gradients, optimizer and parameters composed into one compiled step with donated buffers.

The step is what a user would write from `value_and_grad` and `zero`; it adds metrics that are global values, and
donation, so that parameters and state are updated in place. Knows nothing of collectives or placements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.feedback import init_feedback
from zerojax.gradients import value_and_grad
from zerojax.layout import Layout
from zerojax.loss_scaling import DynamicScale, LossScale, init_loss_scale, keep_unless, next_loss_scale
from zerojax.optimizer import ZeroState

Tree = Any


class TrainState(NamedTuple):
    """What a training loop carries from step to step.

    Attributes:
        step: number of steps taken, int32 scalar.
        params: parameters in stored form.
        opt_state: state of the sharded optimizer.
        feedback: error feedback of the quantised reduction, or None (`ZeroConfig.error_feedback`).
        loss_scale: state of dynamic loss scaling, or None.
        skipped: number of steps that changed nothing because they were not finite, int32 scalar.
    """

    step: jax.Array
    params: Tree
    opt_state: ZeroState
    feedback: Tree = None
    loss_scale: LossScale | None = None
    skipped: jax.Array | None = None

    @classmethod
    def create(
        cls,
        params: Tree,
        tx: optax.GradientTransformation,
        layout: Layout | None = None,
        loss_scale: DynamicScale | None = None,
    ) -> TrainState:
        """The state before the first step.

        Args:
            params: parameters in stored form, or their `jax.ShapeDtypeStruct`s.
            tx: an optimizer made by `zerojax.zero`.
            layout: needed with `ZeroConfig(error_feedback=True)`, to make the feedback.
            loss_scale: the rule given to `make_train_step`, if any.

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
        abstract = all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)

        def place(x: jax.Array) -> Any:
            if abstract:
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
            return jax.device_put(x, everywhere)

        step, skipped = place(jnp.zeros((), jnp.int32)), place(jnp.zeros((), jnp.int32))
        scale = None if loss_scale is None else jax.tree.map(place, init_loss_scale(loss_scale))
        feedback = None
        if layout is not None and layout.config.error_feedback:
            feedback = init_feedback(layout, abstract=abstract)
        return cls(step, params, tx.init(params), feedback, scale, skipped)  # type: ignore[arg-type]


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    layout: Layout,
    *,
    microbatches: int = 1,
    has_aux: bool = False,
    weighted: bool = False,
    clip_norm: float | None = None,
    loss_scale: DynamicScale | None = None,
    on_nonfinite: Literal["ignore", "skip"] = "ignore",
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
        clip_norm: largest global norm of the gradient given to the optimizer; a larger one is scaled down to it.
        loss_scale: dynamic loss scaling for float16, with `TrainState.create(..., loss_scale=)` of the same rule; a
            step that overflows is skipped.
        on_nonfinite: "skip" leaves parameters, optimizer state and feedback as they were, bit for bit, when the loss or
            the gradient is not finite anywhere; "ignore" applies the step.
        donate: give the old state's buffers to the new one. The old state cannot be used afterwards.

    Returns:
        A function `step(state, batch, *rest) -> (state, metrics)`; metrics are scalars, the same on every device:
        "loss", "grad_norm" (of the mean gradient, before clipping), "clipped_norm" with `clip_norm`, "loss_finite",
        "grads_finite" and "skipped" (steps so far), "loss_scale" (of this step) with loss scaling; and "aux".

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
    if on_nonfinite not in ("ignore", "skip"):
        raise ValueError(f"make_train_step(on_nonfinite={on_nonfinite!r}): use 'ignore' or 'skip'")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"make_train_step(clip_norm={clip_norm!r}): a positive norm is required")
    grad_fn = value_and_grad(loss_fn, layout, has_aux=has_aux, weighted=weighted, microbatches=microbatches)
    skips = on_nonfinite == "skip" or loss_scale is not None

    def step(state: TrainState, batch: Tree, *rest: Any) -> tuple[TrainState, dict[str, Any]]:
        _check_state(state, loss_scale)
        extra: dict[str, Any] = {} if state.loss_scale is None else {"loss_scale": state.loss_scale.scale}
        if layout.config.error_feedback:
            value, grads, feedback = grad_fn(state.params, batch, *rest, feedback=state.feedback, **extra)
        else:
            (value, grads), feedback = grad_fn(state.params, batch, *rest, **extra), None
        loss, aux = value if has_aux else (value, None)
        if extra:
            grads = jax.tree.map(lambda g: _wide(g) / extra["loss_scale"], grads)
        norm = optax.tree.norm(jax.tree.map(_wide, grads))
        metrics: dict[str, Any] = {"loss": loss, "grad_norm": norm}
        if clip_norm is not None:
            factor = jnp.minimum(1.0, clip_norm / norm)
            grads = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
            metrics["clipped_norm"] = norm * factor
        metrics |= {"loss_finite": jnp.isfinite(loss), "grads_finite": jnp.isfinite(norm)}
        finite = metrics["loss_finite"] & metrics["grads_finite"]
        updates, opt_state = tx.update(grads, state.opt_state, state.params)  # type: ignore[arg-type]
        new = optax.apply_updates(state.params, updates), opt_state, feedback
        if skips:
            new = keep_unless(finite, new, (state.params, state.opt_state, state.feedback))
        skipped = state.skipped
        if skipped is not None:
            skipped = metrics["skipped"] = skipped + (skips & ~finite)
        scale = state.loss_scale
        if scale is not None and loss_scale is not None:
            metrics["loss_scale"] = scale.scale
            scale = next_loss_scale(scale, finite, loss_scale)
        if has_aux:
            metrics["aux"] = aux
        return TrainState(state.step + 1, *new, scale, skipped), metrics  # type: ignore[arg-type]

    return jax.jit(step, donate_argnums=(0,) if donate else ())


def _check_state(state: TrainState, rule: DynamicScale | None) -> None:
    if (state.loss_scale is None) != (rule is None):
        raise ValueError(
            "make_train_step(loss_scale=...) and TrainState.create(..., loss_scale=...) must be given the same rule, "
            "or neither any"
        )


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
