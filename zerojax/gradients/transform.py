"""`value_and_grad` and `apply`: a loss or forward function on stored parameters, inside `shard_map` over the data axes.

Each device computes the loss of its part of the batch; the gradient is the mean over all devices, reduced where it
arises (stages 2 and 3: in the backward loop body; stages 0 and 1: after it) by explicit collectives. Source: arXiv
1910.02054, sections 5 and 7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax.collectives.select import has_secondary
from zerojax.gradients import inputs as batches
from zerojax.gradients.backward import forward
from zerojax.gradients.derivatives import with_derivative
from zerojax.gradients.eager import CompiledOnce
from zerojax.gradients.library_errors import explained
from zerojax.gradients.local import (
    Accumulation,
    Gradients,
    LossKind,
    accumulation_for,
    local_gradients,
    split_outputs,
)
from zerojax.gradients.outputs import check_loss, check_model_state
from zerojax.gradients.stored_arguments import (
    argument_specs,
    gathering_arguments,
    logical_arguments,
    marked_arguments,
    without_gradient,
)
from zerojax.gradients.wire import WireState, remembers, wire_leaves, wire_specs, wire_trees
from zerojax.layout.layout import Layout
from zerojax.layout.optimizer_form import entering, leaving
from zerojax.layout.placement import Placement

Tree = Any

_APPLY_IS_FORWARD = (
    "zerojax.apply is forward only and cannot be differentiated with respect to the parameters: use "
    "zerojax.value_and_grad(loss_fn, layout) in place of jax.grad"
)
_NO_SECOND_DERIVATIVE = (
    "zerojax.value_and_grad cannot itself be differentiated with respect to the parameters where weights keep a "
    "secondary partition (ZeroConfig(secondary=True) or weight_deltas): for gradient penalties, meta-learning or "
    "Hessians use a layout with secondary=False and without weight_deltas"
)


def value_and_grad(
    loss_fn: Callable[..., Any],
    layout: Layout,
    *,
    has_aux: bool = False,
    weighted: bool = False,
    microbatches: int = 1,
    accumulation: Accumulation | None = None,
    per_example: Tree = None,
) -> Callable[..., Any]:
    """Replaces `jax.value_and_grad` for parameters in stored form.

    Args:
        loss_fn: `loss_fn(params, batch, *rest)`, written for full parameters and one device's part of the batch;
            returns a scalar mean loss. With `weighted` it returns (sum, weight), and the result is the exact quotient
            of the global sums, also for unequal weights (token counts, say). With `has_aux` it returns (loss, aux).
        layout: the layout of the parameters.
        has_aux: see above. Arrays of `aux` with one entry (or several) for each example come back sharded along their
            leading dim, all other float values averaged over the devices.
        weighted: see above.
        microbatches: number of pieces into which each device's part of the batch is cut, one after the other; loss and
            gradients are those of the global batch. A secondary partition of the weights is made once for all of them.
        accumulation: how their gradients are summed, in float32. "sharded" (default of stages 2 and 3): each
            microbatch's is reduced, the accumulators are shards. "deferred" (default of stages 0 and 1): full
            gradients are summed on each device and reduced once per step, in the dtype on the wire that they have
            without microbatches. With one microbatch there is nothing to sum, and both are the same.
        per_example: which arrays of `aux` hold one entry for each example: a bool, or bools in its structure. None:
            found by tracing the loss with twice the examples, never by a length that happens to be the batch's.

    Returns:
        A function of (params in stored form, batch, *rest) that returns (loss, grads), or ((loss, aux), grads). `batch`
        is sharded on its leading dim over the data axes, 0-d leaves are replicated; `rest` is replicated, PRNG keys in
        it (`jax.random.key`) are folded with the index of the device, so that dropout differs per device, and further
        parameters in stored form (a teacher, a target network) are marked by `Layout.stored`. The loss
        is the global mean, the same on every device. Gradients: full at stage 0, else this device's shards (padded
        form), in the dtype of the parameter; None for leaves that are not trained. Where the configuration
        remembers something from step to step (`ZeroConfig.weight_deltas`, `error_feedback`), the function takes `wire=`
        (from `init_wire_state`) and returns the new state as a third value. With `loss_scale=`, a scalar, the gradients
        (not the loss) come back multiplied by it.

    Raises:
        ValueError: before any compute: parameters not in the layout's stored form or on another mesh, a batch that the
            data axes do not divide, a loss that is not a float scalar, "sharded" accumulation at stage 0.

    >>> import jax.numpy as jnp
    >>> import zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> layout = zerojax.partition({"w": jnp.ones((8,))}, mesh, zerojax.ZeroConfig(min_shard_size=0))
    >>> params = layout.shard({"w": jnp.ones((8,))})
    >>> loss, grads = zerojax.value_and_grad(lambda p, x: jnp.mean(x @ p["w"]), layout)(params, jnp.ones((16, 8)))
    >>> float(loss), grads["w"].addressable_shards[0].data.shape
    (8.0, (1,))
    """
    compute = gradient_function(
        loss_fn, layout, has_aux=has_aux, weighted=weighted, microbatches=microbatches, accumulation=accumulation,
        per_example=per_example,
    )  # fmt: skip

    def run(
        params: Tree, batch: Tree, *rest: Any, wire: WireState | None = None, loss_scale: jax.Array | None = None
    ) -> tuple[Any, ...]:
        out = compute(params, batch, *rest, wire=wire, loss_scale=loss_scale)
        value = (out.loss, out.aux) if has_aux else out.loss
        return (value, out.grads, out.wire) if remembers(layout) else (value, out.grads)

    return run


def gradient_function(
    loss_fn: Callable[..., Any],
    layout: Layout,
    *,
    has_aux: bool = False,
    weighted: bool = False,
    mutable: bool = False,
    microbatches: int = 1,
    accumulation: Accumulation | None = None,
    per_example: Tree = None,
) -> Callable[..., Gradients]:
    """What `value_and_grad` wraps: the same with everything it computes, under names.

    Args:
        loss_fn: as for `value_and_grad`. With `mutable` it is `loss_fn(params, batch, model_state, *rest)` and returns
            (loss, new model state), or (loss, (new model state, aux)) with `has_aux`.
        layout: the layout of the parameters.
        has_aux: as for `value_and_grad`.
        weighted: as for `value_and_grad`.
        mutable: whether the model has a state beside its parameters; see `zerojax.gradients.outputs`.
        microbatches: as for `value_and_grad`.
        accumulation: as for `value_and_grad`.
        per_example: as for `value_and_grad`.

    Returns:
        A function of (params, batch, *rest, wire=, loss_scale=, model_state=).
    """
    if not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"value_and_grad(microbatches={microbatches!r}): a positive number is required")
    policy, compiled_once = accumulation_for(layout.stage, accumulation), CompiledOnce()

    @explained("value_and_grad")
    def run(
        params: Tree,
        batch: Tree,
        *rest: Any,
        wire: WireState | None = None,
        loss_scale: jax.Array | None = None,
        model_state: Tree = None,
    ) -> Gradients:
        params = entering(params, layout)
        batches.check_rest(rest)
        rest = without_gradient(marked_arguments(batch, rest, model_state, layout))
        if layout.stage >= 3 and has_secondary(layout):
            params = batches.not_differentiated(params, _NO_SECOND_DERIVATIVE)
        batch_specs = batches.batch_specs(batch, layout, microbatches)
        rest = (model_state, *rest) if mutable else rest
        shapes, is_pure = _output_shapes(loss_fn, layout, batch, rest, microbatches)
        check_loss(shapes, has_aux or mutable, weighted)
        state_shapes, aux_shapes = split_outputs(shapes, has_aux, mutable)
        if mutable:
            check_model_state(model_state, state_shapes)

        def doubled() -> Tree:
            twice, _ = _output_shapes(loss_fn, layout, batch, rest, microbatches, 2)
            return split_outputs(twice, has_aux, mutable)[1]

        aux_specs = batches.output_specs(aux_shapes, doubled, layout, per_example, "aux output")
        remembered, remembered_specs = wire_leaves(wire, layout), wire_specs(layout)
        kind = LossKind(has_aux, weighted, mutable, microbatches, policy, aux_specs)

        def locally(layout: Layout) -> Callable[..., Any]:
            def local(params: Tree, batch: Tree, rest: Any, wire: WireState, scale: Any) -> Gradients:
                return local_gradients(
                    gathering_arguments(loss_fn), layout, jax.tree.leaves(params), batch,
                    batches.fold_keys(rest, layout), wire, scale, kind,
                )  # fmt: skip

            return _over_data_axes(layout, local, in_specs, out_specs)

        everywhere = PartitionSpec()
        param_specs = jax.tree.map(lambda p: _spec(p, layout.stage >= 3), layout.placements)
        grad_specs = [_spec(p, layout.stage >= 1) if p.trainable else None for p in layout.leaves]
        rest_specs = argument_specs(rest)
        in_specs = (param_specs, batch_specs, rest_specs, remembered_specs, everywhere)
        out_specs = Gradients(everywhere, everywhere, grad_specs, aux_specs, remembered_specs, everywhere)  # type: ignore[arg-type]
        run_locally = with_derivative(locally, layout, is_pure=is_pure)
        batch = batches.compared(batch, layout, "value_and_grad")
        batch, rest = batches.on_mesh(batch, batch_specs, layout), batches.on_mesh(rest, rest_specs, layout)
        out = compiled_once(run_locally, params, batch, rest, remembered, _on_all_devices(loss_scale, layout))
        return out._replace(
            grads=leaving(layout.treedef.unflatten(out.grads), layout),
            wire=wire_trees(out.wire, layout),
        )

    return run


def apply(fn: Callable[..., Tree], layout: Layout, *, per_example: Tree = None) -> Callable[..., Tree]:
    """Runs a forward function on stored parameters, with the same gather on use: evaluation, sampling, metrics.

    Args:
        fn: `fn(params, batch, *rest)`, written for full parameters and one device's part of the batch.
        layout: the layout of the parameters.
        per_example: which outputs hold one entry for each example, as for `value_and_grad`; usually found out.

    Returns:
        A function of (params in stored form, batch, *rest), which are treated as in `value_and_grad`. Outputs with one
        entry (or several) for each example come back sharded along their leading dim; all others, floats, are averaged
        over the devices.

    Raises:
        ValueError: as `value_and_grad`; also an integer output without the batch dim, which cannot be averaged, and a
            derivative with respect to the parameters, which is `value_and_grad`'s (that of the batch is fine).

    >>> import jax.numpy as jnp
    >>> import zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> layout = zerojax.partition({"w": jnp.ones((8,))}, mesh, zerojax.ZeroConfig(min_shard_size=0))
    >>> params = layout.shard({"w": jnp.ones((8,))})
    >>> zerojax.apply(lambda p, x: x @ p["w"], layout)(params, jnp.ones((16, 8))).shape
    (16,)
    """

    compiled_once = CompiledOnce()

    @explained("apply")
    def run(params: Tree, batch: Tree, *rest: Any) -> Tree:
        params = entering(params, layout)
        batches.check_rest(rest)
        rest = without_gradient(marked_arguments(batch, rest, None, layout))
        batch_specs, rest_specs = batches.batch_specs(batch, layout), argument_specs(rest)
        shapes, is_pure = _output_shapes(fn, layout, batch, rest)
        out_specs = batches.output_specs(
            shapes, lambda: _output_shapes(fn, layout, batch, rest, times=2)[0], layout, per_example
        )

        param_specs = jax.tree.map(lambda p: _spec(p, layout.stage >= 3), layout.placements)

        def locally(layout: Layout) -> Callable[..., Any]:
            def local(params: Tree, batch: Tree, rest: Any) -> Tree:
                on_device = gathering_arguments(fn, forward_only=True)
                out = forward(on_device, layout, jax.tree.leaves(params), batch, batches.fold_keys(rest, layout))
                return batches.average_outputs(out, out_specs, layout)

            return _over_data_axes(layout, local, (param_specs, batch_specs, rest_specs), out_specs)

        return compiled_once(
            with_derivative(locally, layout, is_pure=is_pure),
            batches.not_differentiated(params, _APPLY_IS_FORWARD),
            batches.on_mesh(batches.compared(batch, layout, "apply"), batch_specs, layout),
            batches.on_mesh(rest, rest_specs, layout),
        )

    return run


def _output_shapes(
    fn: Callable[..., Any], layout: Layout, batch: Tree, rest: Any, microbatches: int = 1, times: int = 1
) -> tuple[Tree, bool]:
    """Shapes of the function's outputs on one device, traced where the data axes can be named, and whether the function
    has no effect and closes over nothing that is traced.

    `times` as many examples as in the batch. Further arguments are seen as inside `shard_map`: their sharding over the
    data axes means nothing there.
    """
    local_batch = batches.local_shapes(batch, layout, microbatches, times)
    leaves, structure = jax.tree.flatten(logical_arguments(rest))
    is_shape = [isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
    found: list[tuple[Tree, bool]] = []

    def probe(*given: Any) -> None:
        new = iter(given)
        shown = structure.unflatten([x if s else next(new) for x, s in zip(leaves, is_shape, strict=True)])
        program, shapes = jax.make_jaxpr(lambda p, b, r: fn(p, b, *r), return_shape=True)(
            layout.logical_shapes(), local_batch, shown
        )
        traced = any(map(_compat.is_traced, program.consts))
        found.append((shapes, not traced and not _compat.holds_effect(program.jaxpr)))

    def on_devices(*given: Any) -> None:
        _over_data_axes(layout, probe, PartitionSpec(), None)(*_on_all_devices(given, layout))

    jax.eval_shape(on_devices, *(x for x, s in zip(leaves, is_shape, strict=True) if not s))
    return found[0]


def _over_data_axes(layout: Layout, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`fn` inside `shard_map`. Arrays without elements are made inside: the compiler of JAX 0.11 ends the process when
    one of the arguments turns out to be a constant."""

    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, args, is_leaf=_is_spec), is_leaf=_is_spec)
        empty = [jnp.size(x) == 0 and not _compat.is_prng_key(x) for x in leaves]

        def with_empty(*values: Any) -> Any:
            rest = iter(values)
            return fn(*structure.unflatten([
                jnp.zeros(NamedSharding(layout.mesh, spec).shard_shape(x.shape), x.dtype) if is_empty else next(rest)
                for x, spec, is_empty in zip(leaves, specs, empty, strict=True)
            ]))  # fmt: skip

        def held(values: list[Any]) -> tuple[Any, ...]:
            return tuple(x for x, is_empty in zip(values, empty, strict=True) if not is_empty)

        on_devices = jax.shard_map(
            with_empty, mesh=layout.mesh, in_specs=held(specs), out_specs=out_specs,
            axis_names=set(layout.config.axes), check_vma=False,
        )  # fmt: skip
        # Under jit in eager calls too: shard_map alone does not run custom derivatives with symbolic zeros.
        return jax.jit(on_devices)(*held(leaves))

    return run


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _on_all_devices(rest: Any, layout: Layout) -> Any:
    return batches.on_mesh(rest, jax.tree.map(lambda _: PartitionSpec(), rest), layout)


def _spec(placement: Placement, sharded: bool) -> PartitionSpec:
    return placement.data_spec if sharded else PartitionSpec()
