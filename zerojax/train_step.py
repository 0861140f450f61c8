"""`make_train_step`: gradients, optimizer and parameters composed into one compiled step with donated buffers.

The step is what a user would write from `value_and_grad` and `zero`; it adds accumulation over microbatches (a scan
whose carry holds the reduced gradients in float32), metrics that are global values, and donation, so that parameters and
state are updated in place. Knows nothing of collectives or placements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax import _compat
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
    """

    step: jax.Array
    params: Tree
    opt_state: ZeroState

    @classmethod
    def create(cls, params: Tree, tx: optax.GradientTransformation) -> TrainState:
        """The state before the first step, from parameters in stored form and a `zerojax.zero` optimizer.

        >>> import zerojax
        >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
        >>> layout = zerojax.partition({"w": jnp.ones((8, 2))}, mesh, zerojax.ZeroConfig(min_shard_size=0))
        >>> tx = zerojax.zero(optax.sgd(0.1), layout)
        >>> int(zerojax.TrainState.create(layout.shard({"w": jnp.ones((8, 2))}), tx).step)
        0
        """
        if all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
            return cls(jax.ShapeDtypeStruct((), jnp.int32), params, tx.init(params))  # type: ignore[arg-type]
        return cls(jnp.zeros((), jnp.int32), params, tx.init(params))  # type: ignore[arg-type]


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    layout: Layout,
    *,
    accumulate: int = 1,
    has_aux: bool = False,
    weighted: bool = False,
    donate: bool = True,
) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
    """One compiled training step.

    Args:
        loss_fn: as for `value_and_grad`.
        tx: an optimizer made by `zerojax.zero(..., layout)`.
        layout: the layout of the parameters.
        accumulate: number of microbatches into which each device's part of the batch is cut; their gradients are
            reduced one by one and averaged in float32, so that only one microbatch's activations live at a time.
        has_aux: as for `value_and_grad`; the last microbatch's aux is returned under "aux".
        weighted: as for `value_and_grad`; not together with accumulation.
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
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"make_train_step(accumulate={accumulate!r}): a positive number of microbatches is required")
    if weighted and accumulate > 1:
        raise ValueError("make_train_step: weighted losses cannot be accumulated over microbatches yet; use accumulate=1")
    grad_fn = value_and_grad(loss_fn, layout, has_aux=has_aux, weighted=weighted)

    def step(state: TrainState, batch: Tree, *rest: Any) -> tuple[TrainState, dict[str, Any]]:
        if accumulate == 1:
            value, grads = grad_fn(state.params, batch, *rest)
        else:
            value, grads = _accumulated(grad_fn, layout, accumulate, state.params, batch, rest)
        loss, aux = value if has_aux else (value, None)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": optax.global_norm(jax.tree.map(_wide, grads))}
        if has_aux:
            metrics["aux"] = aux
        return TrainState(state.step + 1, params, opt_state), metrics  # type: ignore[arg-type]

    return jax.jit(step, donate_argnums=(0,) if donate else ())


def _accumulated(
    grad_fn: Callable[..., Any], layout: Layout, count: int, params: Tree, batch: Tree, rest: Any
) -> tuple[Any, Tree]:
    """Mean value and gradient over `count` microbatches; each reduced before the next one starts."""
    micro = jax.tree_util.tree_map_with_path(lambda path, x: _microbatches(path, x, count, layout.num_shards), batch)

    def body(carry: tuple[Any, Any], index_and_part: tuple[Any, Tree]) -> tuple[tuple[Any, Any], Any]:
        index, part = index_and_part
        total, sums = carry
        value, grads = grad_fn(params, part, *_fold(rest, index))
        loss = value[0] if isinstance(value, tuple) else value
        sums = jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, grads)
        return (total + loss, sums), value

    shapes = jax.eval_shape(lambda p, b: grad_fn(p, b, *rest), params, jax.tree.map(lambda x: x[0], micro))
    loss_shape = shapes[0][0] if isinstance(shapes[0], tuple) else shapes[0]
    zeros = jax.tree.map(lambda g: jnp.zeros(g.shape, jnp.promote_types(g.dtype, jnp.float32)), shapes[1])
    zeros = _constrained(zeros, layout)
    (total, sums), values = jax.lax.scan(
        body, (jnp.zeros((), loss_shape.dtype), zeros), (jnp.arange(count), micro)
    )
    grads = jax.tree.map(lambda s, g: (s / count).astype(g.dtype), sums, shapes[1])
    loss = total / count
    if isinstance(values, tuple):
        return (loss, jax.tree.map(lambda x: x[-1], values[1])), grads
    return loss, grads


def _constrained(grads: Tree, layout: Layout) -> Tree:
    leaves = jax.tree.leaves(grads, is_leaf=lambda x: x is None)
    held = [
        None if g is None else jax.lax.with_sharding_constraint(
            g, layout.shard_sharding(p) if layout.stage else layout.full_sharding(p))
        for g, p in zip(leaves, layout.leaves, strict=True)
    ]  # fmt: skip
    return layout.treedef.unflatten(held)


def _microbatches(path: Any, x: Any, count: int, devices: int) -> jax.Array:
    """Cuts each device's part of the batch into `count` pieces: no example changes its device."""
    if not jnp.shape(x):
        return jnp.broadcast_to(x, (count,))
    if x.shape[0] % (count * devices):
        raise ValueError(
            f"batch{jax.tree_util.keystr(path)} has shape {x.shape}: its leading dim must be a multiple of "
            f"{devices} devices x {count} microbatches = {count * devices}"
        )
    per_device = x.reshape(devices, count, x.shape[0] // (count * devices), *x.shape[1:])
    return jnp.swapaxes(per_device, 0, 1).reshape(count, x.shape[0] // count, *x.shape[1:])


def _fold(rest: Any, index: jax.Array) -> Any:
    """Different dropout in each microbatch."""
    return jax.tree.map(lambda x: jax.random.fold_in(x, index) if _compat.is_prng_key(x) else x, rest)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
