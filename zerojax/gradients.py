"""`value_and_grad` and `apply`: a loss or forward function on stored parameters, inside `shard_map` over the data axes.

Each device computes the loss of its part of the batch; the gradient is the mean over all devices, reduced where it
arises (stages 2 and 3: in the backward loop body; stages 0 and 1: after it) by explicit collectives. The factor 1/N (or
one over the global weight) is applied once, as the cotangent of the loss, so that no pass over the gradients is spent
on it. Source: arXiv 1910.02054, sections 5 and 7. Knows nothing of optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from zerojax import batches
from zerojax.accumulation import accumulate
from zerojax.accumulation import microbatches as microbatches_of
from zerojax.backward import forward, staged_backward, whole_backward
from zerojax.feedback import check_feedback, feedback_specs
from zerojax.layout import Layout
from zerojax.placement import Placement

Tree = Any


def value_and_grad(
    loss_fn: Callable[..., Any],
    layout: Layout,
    *,
    has_aux: bool = False,
    weighted: bool = False,
    microbatches: int = 1,
) -> Callable[..., Any]:
    """Replaces `jax.value_and_grad` for parameters in stored form.

    Args:
        loss_fn: `loss_fn(params, batch, *rest)`, written for whole parameters and one device's part of the batch;
            returns a scalar mean loss. With `weighted` it returns (sum, weight), and the result is the exact quotient
            of the global sums, also for unequal weights (token counts, say). With `has_aux` it returns (loss, aux).
        layout: the layout of the parameters.
        has_aux: see above. Arrays of `aux` whose leading dim is that of the batch come back sharded along it, all other
            float values averaged over the devices.
        weighted: see above.
        microbatches: number of pieces into which each device's part of the batch is cut, one after the other; loss and
            gradients are those of the whole batch. A secondary partition of the weights is made once for all of them.

    Returns:
        A function of (params in stored form, batch, *rest) that returns (loss, grads), or ((loss, aux), grads). `batch`
        is sharded on its leading dim over the data axes, 0-d leaves are replicated; `rest` is replicated, and PRNG keys
        in it (`jax.random.key`) are folded with the index of the device, so that dropout differs per device. The loss
        is the global mean, the same on every device. Gradients: whole at stage 0, else this device's shards (padded
        form), in the dtype of the parameter; None for leaves that are not trained. With
        `ZeroConfig(error_feedback=True)` the function takes `feedback=` (from `init_feedback`) and returns the new
        feedback as a third value. With `loss_scale=`, a scalar, the gradients (not the loss) come back multiplied by
        it.

    Raises:
        ValueError: before any compute: parameters not in the layout's stored form or on another mesh, a batch that the
            data axes do not divide, a loss that is not a float scalar.

    >>> import zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> layout = zerojax.partition({"w": jnp.ones((8,))}, mesh, zerojax.ZeroConfig(min_shard_size=0))
    >>> params = layout.shard({"w": jnp.ones((8,))})
    >>> loss, grads = zerojax.value_and_grad(lambda p, x: jnp.mean(x @ p["w"]), layout)(params, jnp.ones((16, 8)))
    >>> float(loss), grads["w"].addressable_shards[0].data.shape
    (8.0, (1,))
    """
    if not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"value_and_grad(microbatches={microbatches!r}): a positive number is required")

    def run(
        params: Tree, batch: Tree, *rest: Any, feedback: Tree = None, loss_scale: jax.Array | None = None
    ) -> tuple[Any, ...]:
        layout.check(params, stored=True)
        batch_specs = batches.batch_specs(batch, layout, microbatches)
        batches.check_rest(rest)
        shapes = _output_shapes(loss_fn, layout, batch, rest, microbatches)
        _check_loss(shapes, has_aux, weighted)
        aux_specs = batches.output_specs(shapes[1], batch, layout, microbatches) if has_aux else None
        carries = layout.config.error_feedback
        lost = check_feedback(feedback, layout) if carries else [None] * len(layout.leaves)
        lost_specs = feedback_specs(layout)

        def local(
            params: Tree, batch: Tree, rest: Any, lost: list[Any], scale: Any
        ) -> tuple[Any, Any, list[Any], list[Any]]:
            lost = [None if x is None else x[0] for x in lost]  # the dim over nodes has one entry here
            loss, aux, grads, lost = _local_gradients(
                loss_fn, layout, jax.tree.leaves(params), batch, batches.fold_keys(rest, layout), lost,
                scale, _LossKind(has_aux, weighted, microbatches, aux_specs),
            )  # fmt: skip
            return loss, aux, grads, [None if x is None else x[None] for x in lost]

        param_specs = jax.tree.map(lambda p: _spec(p, layout.stage >= 3), layout.placements)
        grad_specs = [_spec(p, layout.stage >= 1) if p.trainable else None for p in layout.leaves]
        in_specs = (param_specs, batch_specs, PartitionSpec(), lost_specs, PartitionSpec())
        out_specs = (PartitionSpec(), aux_specs, grad_specs, lost_specs)
        run_locally = _over_data_axes(layout, local, in_specs, out_specs)
        batch, (rest, loss_scale) = batches.on_mesh(batch, batch_specs, layout), _whole((rest, loss_scale), layout)
        loss, aux, grads, lost = run_locally(params, batch, rest, lost, loss_scale)
        value, grads = ((loss, aux) if has_aux else loss), layout.treedef.unflatten(grads)
        return (value, grads, layout.treedef.unflatten(lost)) if carries else (value, grads)

    return run


def apply(fn: Callable[..., Tree], layout: Layout) -> Callable[..., Tree]:
    """Runs a forward function on stored parameters, with the same gather on use: evaluation, sampling, metrics.

    Args:
        fn: `fn(params, batch, *rest)`, written for whole parameters and one device's part of the batch.
        layout: the layout of the parameters.

    Returns:
        A function of (params in stored form, batch, *rest), which are treated as in `value_and_grad`. Outputs whose
        leading dim is that of the batch come back sharded along it; float outputs without one are averaged over the
        devices.

    Raises:
        ValueError: as `value_and_grad`; also an integer output without the batch dim, which cannot be averaged.

    >>> import zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> layout = zerojax.partition({"w": jnp.ones((8,))}, mesh, zerojax.ZeroConfig(min_shard_size=0))
    >>> params = layout.shard({"w": jnp.ones((8,))})
    >>> zerojax.apply(lambda p, x: x @ p["w"], layout)(params, jnp.ones((16, 8))).shape
    (16,)
    """

    def run(params: Tree, batch: Tree, *rest: Any) -> Tree:
        layout.check(params, stored=True)
        batch_specs = batches.batch_specs(batch, layout)
        batches.check_rest(rest)
        out_specs = batches.output_specs(_output_shapes(fn, layout, batch, rest), batch, layout)

        def local(params: Tree, batch: Tree, rest: Any) -> Tree:
            out = forward(fn, layout, jax.tree.leaves(params), batch, batches.fold_keys(rest, layout))
            return batches.average_outputs(out, out_specs, layout)

        param_specs = jax.tree.map(lambda p: _spec(p, layout.stage >= 3), layout.placements)
        return _over_data_axes(layout, local, (param_specs, batch_specs, PartitionSpec()), out_specs)(
            params, batches.on_mesh(batch, batch_specs, layout), _whole(rest, layout)
        )

    return run


class _LossKind(NamedTuple):
    has_aux: bool
    weighted: bool
    microbatches: int
    aux_specs: Tree


def _local_gradients(
    loss_fn: Callable[..., Any],
    layout: Layout,
    leaves: list[jax.Array],
    batch: Tree,
    rest: Any,
    feedback: list[Any],
    scale: Any,
    kind: _LossKind,
) -> tuple[Any, Any, list[Any], list[Any]]:
    """Global loss, this device's part of the aux, its reduced gradients and the new feedback."""
    count = kind.microbatches
    example = jax.tree.map(lambda x: x[0], microbatches_of(batch, count)) if count > 1 else batch
    if layout.stage >= 2:
        backward = staged_backward(loss_fn, layout, leaves, example, rest, repeated=count > 1)
    else:
        backward = whole_backward(loss_fn, layout, leaves, example, rest)

    def step(batch: Tree, rest: Any, feedback: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        out, pullback = backward.run(batch, rest, feedback)
        main = out[0] if kind.has_aux else out
        # The factor of the mean is the cotangent of the loss: no pass over the gradients is spent on it.
        cotangent = jax.tree.map(_zero_cotangent, out)
        seed = _seed(main, kind.weighted, layout, count)
        if scale is not None:
            seed = jax.tree.map(lambda x: x if x.dtype == jax.dtypes.float0 else x * scale.astype(x.dtype), seed)
        return out, *pullback((seed, cotangent[1]) if kind.has_aux else seed)

    if count == 1:
        out, grads, feedback = step(batch, rest, feedback)
    else:
        out, grads, feedback = accumulate(step, batch, rest, feedback, count)
    main, aux = out if kind.has_aux else (out, None)
    loss, factor = _global_loss(main, kind.weighted, layout, count)
    if factor is not None:
        grads = [None if g is None else g.astype(jnp.promote_types(g.dtype, jnp.float32)) * factor for g in grads]
    grads = [None if g is None else g.astype(p.dtype) for g, p in zip(grads, layout.leaves, strict=True)]
    if kind.has_aux:
        if count > 1:
            aux = batches.merge_microbatches(aux, kind.aux_specs, layout)
        aux = batches.average_outputs(aux, kind.aux_specs, layout)
    return loss, aux, *backward.finish(grads, feedback)


def _seed(main: Any, weighted: bool, layout: Layout, count: int) -> Any:
    """The cotangent of one device's (microbatch's) output for which the summed gradients are the global one's."""
    if not weighted:
        return jnp.full_like(main, _share(main.dtype, layout, count))
    total, weight = main
    if count > 1 or _is_narrow(total.dtype):  # the weight of all microbatches is known only afterwards
        return jnp.full_like(total, _share(total.dtype, layout, count)), _zero_cotangent(weight)
    weights = lax.psum(weight.astype(jnp.float32), layout.config.axes)
    return (1.0 / weights).astype(total.dtype), _zero_cotangent(weight)


def _share(dtype: Any, layout: Layout, count: int) -> float:
    """One over the number of parts that are averaged; for a narrow loss the power of two below, exact in it."""
    parts = layout.num_shards * count
    return 2.0 ** -math.ceil(math.log2(parts)) if _is_narrow(dtype) else 1.0 / parts


def _is_narrow(dtype: Any) -> bool:
    return jnp.dtype(dtype).itemsize < 4


def _global_loss(main: Any, weighted: bool, layout: Layout, count: int) -> tuple[jax.Array, Any]:
    """The global loss, and the factor that the summed gradients still lack (None: none)."""
    axes = layout.config.axes
    share = _share((main[0] if weighted else main).dtype, layout, count)
    if not weighted:
        exact = layout.num_shards * count * share
        return lax.pmean(jnp.mean(main, dtype=main.dtype), axes), None if abs(exact - 1) < 1e-6 else 1 / exact
    total, weight = (lax.psum(jnp.sum(x.astype(jnp.float32)), axes) for x in main)
    return total / weight, None if count == 1 and not _is_narrow(main[0].dtype) else 1 / (share * weight)


def _zero_cotangent(x: jax.Array) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def _output_shapes(fn: Callable[..., Any], layout: Layout, batch: Tree, rest: Any, microbatches: int = 1) -> Tree:
    """Shapes of the function's outputs on one device, traced where the data axes can be named."""
    local_batch = batches.local_shapes(batch, layout, microbatches)
    found: list[Tree] = []

    def probe() -> None:
        found.append(jax.eval_shape(lambda p, b, r: fn(p, b, *r), layout.logical_shapes(), local_batch, rest))

    jax.eval_shape(_over_data_axes(layout, probe, (), None))
    return found[0]


def _over_data_axes(layout: Layout, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return jax.shard_map(
        fn, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(layout.config.axes),
        check_vma=False,
    )  # fmt: skip


def _whole(rest: Any, layout: Layout) -> Any:
    return batches.on_mesh(rest, jax.tree.map(lambda _: PartitionSpec(), rest), layout)


def _check_loss(shapes: Tree, has_aux: bool, weighted: bool) -> None:
    if has_aux and not (isinstance(shapes, tuple) and len(shapes) == 2):
        raise ValueError(f"value_and_grad(has_aux=True): loss_fn must return (loss, aux), but returned {shapes}")
    main = shapes[0] if has_aux else shapes
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


def _spec(placement: Placement, sharded: bool) -> PartitionSpec:
    return placement.data_spec if sharded else PartitionSpec()
