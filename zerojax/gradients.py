"""`value_and_grad` and `apply`: a loss or forward function on stored parameters, inside `shard_map` over the data axes.

Each device computes the loss of its part of the batch; the gradient is the mean over all devices, reduced where it
arises (stages 2 and 3: in the backward loop body; stages 0 and 1: after it) by explicit collectives. The factor 1/N (or
one over the global weight) is applied once, as the cotangent of the loss, so that no pass over the gradients is spent
on it. Source: arXiv 1910.02054, sections 5 and 7. Knows nothing of optimizers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from zerojax import batches
from zerojax.collectives import Collectives, identity_gather, plain_collectives
from zerojax.gather_on_use import evaluate_plain
from zerojax.layout import Layout
from zerojax.mesh import other_axes
from zerojax.placement import Placement
from zerojax.stored import Scope

Tree = Any


def value_and_grad(
    loss_fn: Callable[..., Any], layout: Layout, *, has_aux: bool = False, weighted: bool = False
) -> Callable[..., tuple[Any, Tree]]:
    """Replaces `jax.value_and_grad` for parameters in stored form.

    Args:
        loss_fn: `loss_fn(params, batch, *rest)`, written for whole parameters and one device's part of the batch;
            returns a scalar mean loss. With `weighted` it returns (sum, weight), and the result is the exact quotient
            of the global sums, also for unequal weights (token counts, say). With `has_aux` it returns (loss, aux).
        layout: the layout of the parameters.
        has_aux: see above. Arrays of `aux` whose leading dim is that of the batch come back sharded along it, all other
            float values averaged over the devices.
        weighted: see above.

    Returns:
        A function of (params in stored form, batch, *rest) that returns (loss, grads), or ((loss, aux), grads). `batch`
        is sharded on its leading dim over the data axes, 0-d leaves are replicated; `rest` is replicated, and PRNG keys
        in it (`jax.random.key`) are folded with the index of the device, so that dropout differs per device. The loss
        is the global mean, the same on every device. Gradients: whole at stage 0, else this device's shards (padded
        form), in the dtype of the parameter; None for leaves that are not trained.

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

    def run(params: Tree, batch: Tree, *rest: Any) -> tuple[Any, Tree]:
        layout.check(params, stored=True)
        batch_specs = batches.batch_specs(batch, layout)
        batches.check_rest(rest)
        shapes = _output_shapes(loss_fn, layout, batch, rest)
        _check_loss(shapes, has_aux, weighted)
        aux_specs = batches.output_specs(shapes[1], batch, layout) if has_aux else None

        def local(params: Tree, batch: Tree, rest: Any) -> tuple[Any, Any, list[Any]]:
            rest = batches.fold_keys(rest, layout)
            pullback_of = _staged_loss if layout.stage >= 2 else _plain_loss
            out, pullback = pullback_of(loss_fn, layout, jax.tree.leaves(params), batch, rest)
            main, aux = out if has_aux else (out, None)
            loss, seed = _global_mean(main, weighted, layout)
            cotangent = jax.tree.map(_zero_cotangent, out)
            cotangent = (seed, cotangent[1]) if has_aux else seed
            if aux is not None:
                aux = batches.average_outputs(aux, aux_specs, layout)
            return loss, aux, pullback(cotangent)

        param_specs = jax.tree.map(lambda p: _spec(p, layout.stage >= 3), layout.placements)
        grad_specs = [_spec(p, layout.stage >= 1) if p.trainable else None for p in layout.leaves]
        loss, aux, grads = _over_data_axes(layout, local, (param_specs, batch_specs, PartitionSpec()),
                                           (PartitionSpec(), aux_specs, grad_specs))(params, batch, rest)  # fmt: skip
        return ((loss, aux) if has_aux else loss), layout.treedef.unflatten(grads)

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
            rest = batches.fold_keys(rest, layout)
            jaxpr, out_tree = _trace(fn, layout, batch, rest)
            scope = _scope(layout)
            held = [scope.enter(x, None, p) if _is_stored(p, layout) else x
                    for x, p in zip(jax.tree.leaves(params), layout.leaves, strict=True)]  # fmt: skip
            out = out_tree.unflatten(evaluate_plain(jaxpr, [*held, *jax.tree.leaves((batch, rest))], scope))
            return batches.average_outputs(out, out_specs, layout)

        param_specs = jax.tree.map(lambda p: _spec(p, layout.stage >= 3), layout.placements)
        return _over_data_axes(layout, local, (param_specs, batch_specs, PartitionSpec()), out_specs)(
            params, batch, rest
        )

    return run


def _plain_loss(
    loss_fn: Callable[..., Any], layout: Layout, leaves: list[jax.Array], batch: Tree, rest: Any
) -> tuple[Any, Callable[[Any], list[Any]]]:
    """Stages 0 and 1: whole parameters, the gradient reduced once when the backward pass is over."""
    collectives = _collectives(layout)
    trained = [p.trainable for p in layout.leaves]

    def of_trained(values: list[jax.Array]) -> Any:
        new = iter(values)
        merged = [next(new) if t else x for x, t in zip(leaves, trained, strict=True)]
        return loss_fn(layout.treedef.unflatten(merged), batch, *rest)

    out, vjp = jax.vjp(of_trained, [x for x, t in zip(leaves, trained, strict=True) if t])

    def pullback(cotangent: Any) -> list[Any]:
        grads = iter(vjp(cotangent)[0])
        out: list[Any] = []
        for p in layout.leaves:
            whole = _as_replicated(p) if layout.stage == 0 else p
            out.append(collectives.reduce(next(grads), whole) if p.trainable else None)
        return out

    return out, pullback


def _staged_loss(
    loss_fn: Callable[..., Any], layout: Layout, leaves: list[jax.Array], batch: Tree, rest: Any
) -> tuple[Any, Callable[[Any], list[Any]]]:
    """Stages 2 and 3: the loss evaluated with parameters in stored form, reduced where the gradient arises.

    What is differentiated is the *slot* of each leaf: at stage 3 the shard itself, at stage 2 shard-shaped zeros that
    carry the reduced gradient out, for replicated leaves the value.
    """
    collectives = _collectives(layout)
    jaxpr, out_tree = _trace(loss_fn, layout, batch, rest)
    slots = [
        None if not p.trainable
        else jnp.zeros(p.shard_shape, p.dtype) if layout.stage == 2 and p.is_sharded
        else x
        for x, p in zip(leaves, layout.leaves, strict=True)
    ]  # fmt: skip

    def of_slots(slots: list[Any]) -> Any:
        scope = _scope(layout)
        held: list[Any] = []
        for x, slot, p in zip(leaves, slots, layout.leaves, strict=True):
            if not _is_stored(p, layout):
                held.append(x if slot is None else slot)
            else:
                held.append(scope.enter(slot if layout.stage >= 3 and slot is not None else x, slot, p))
        return out_tree.unflatten(evaluate_plain(jaxpr, [*held, *jax.tree.leaves((batch, rest))], scope))

    out, vjp = jax.vjp(of_slots, slots)

    def pullback(cotangent: Any) -> list[Any]:
        (grads,) = vjp(cotangent)
        return [
            g if g is None or p.is_sharded else collectives.reduce(g, p)
            for g, p in zip(grads, layout.leaves, strict=True)
        ]

    return out, pullback


def _global_mean(main: Any, weighted: bool, layout: Layout) -> tuple[jax.Array, Any]:
    """The global loss and the cotangent of this device's output for which the summed gradients are its gradient."""
    axes = layout.config.axes
    if not weighted:
        seed = jnp.full_like(main, 1.0 / layout.num_shards)
        return lax.pmean(main, axes), seed
    total, weight = main
    weights = lax.psum(weight.astype(jnp.float32), axes)
    loss = lax.psum(total.astype(jnp.float32), axes) / weights
    return loss, ((1.0 / weights).astype(total.dtype), _zero_cotangent(weight))


def _zero_cotangent(x: jax.Array) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def _trace(fn: Callable[..., Any], layout: Layout, batch: Tree, rest: Any) -> tuple[Any, Any]:
    """The jaxpr of `fn` on logical parameters and this device's inputs, and the structure of its output."""
    jaxpr, shape = jax.make_jaxpr(lambda p, b, r: fn(p, b, *r), return_shape=True)(layout.logical_shapes(), batch, rest)
    return jaxpr, jax.tree.structure(shape)


def _output_shapes(fn: Callable[..., Any], layout: Layout, batch: Tree, rest: Any) -> Tree:
    """Shapes of the function's outputs on one device, traced where the data axes can be named."""
    local_batch = batches.local_shapes(batch, layout)
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


def _collectives(layout: Layout) -> Collectives:
    plain = plain_collectives(other_axes(layout.mesh, layout.config.axes), layout.config.grad_dtype)
    return plain if layout.stage >= 3 else identity_gather(plain)


def _scope(layout: Layout) -> Scope:
    return Scope(_collectives(layout), min_loop_size=layout.config.min_shard_size)


def _is_stored(placement: Placement, layout: Layout) -> bool:
    return placement.is_sharded and layout.stage >= 2


def _spec(placement: Placement, sharded: bool) -> PartitionSpec:
    return placement.data_spec if sharded else PartitionSpec()


def _as_replicated(placement: Placement) -> Placement:
    return dataclasses.replace(placement, dim=None, padding=0)
