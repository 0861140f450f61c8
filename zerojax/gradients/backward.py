"""One device's forward and backward pass on its part of the batch, and where its gradients are reduced.

Stages 0 and 1 differentiate the loss on full parameters and reduce once, afterwards. Stages 2 and 3 evaluate the loss
with parameters in stored form, so that each gradient is reduced where it arises; what is differentiated there is the
*gradient input* of each leaf: an input of the shard's shape whose value nobody reads (the shard itself at stage 3,
zeros at stage 2), which carries the reduced gradient out. Each can also do as the other does, for gradients that are
summed over microbatches. Runs inside `shard_map` over the data axes.

JAX 0.10 and 0.11 by default delay each layer's reduce-scatter into the next layer's backward pass: that hides it, and
holds the gradients of up to two layers. To turn it off, `jax.jit(step, compiler_options=...)` with
`{"xla_gpu_enable_pipelined_reduce_scatter": False}` on 0.10, `{"xla_gpu_pipeline_reduce_scatter":
"COLLECTIVE_PIPELINING_MODE_OFF"}` later. Few messages carry the small leaves: compiled for 2 x 8 H100, the loss and the
gradients of all replicated leaves are one all-reduce, the unquantised stacks one reduce-scatter per hop, the gathers of
a layer one all-gather per hop. A quantised gradient is one all-to-all per matrix, hop and layer, sent as it arises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax import _compat
from zerojax.collectives.packed import reduce_together
from zerojax.collectives.plain import unreduced
from zerojax.collectives.select import layout_collectives
from zerojax.gather.changes import is_scanned_directly
from zerojax.gather.evaluate import evaluate_plain
from zerojax.gather.groups import GroupedOrder
from zerojax.gather.order import Mark, Order, Token, zero_token
from zerojax.gather.regions import hoist_secondaries
from zerojax.gather.stored import Scope, Stored
from zerojax.gather.uses import cast_target, leaf_uses, stacks_vectors
from zerojax.gradients.replicas import (
    can_change_by_layer,
    changing_by_layer,
    held_by_replica,
    least_quantized,
    travels_by_deltas,
    up_to_date,
)
from zerojax.layout.layout import Layout
from zerojax.layout.mesh import is_of_gpus, prefetch_window
from zerojax.layout.placement import Placement

Tree = Any
Reduced = tuple[list[Any], list[Any]]
Pulled = tuple[list[Any], list[Any], "Token | None"]


class Backward(NamedTuple):
    """A loss made ready for differentiation on one device.

    Attributes:
        run: (batch, rest, feedback) -> (the loss function's output, a pullback from its cotangent to one partial
            gradient per leaf, None for leaves that are not trained, the new feedback per leaf, and the token that the
            loss must read for the backward pass to keep its order, or None).
        finish: (partial gradients, possibly summed over several runs, feedback) -> this device's reduced gradients and
            the new feedback.
        replicas: what every node holds of each leaf after this step, or None; complete once `run` has been called.
    """

    run: Callable[[Tree, Any, list[Any]], tuple[Any, Callable[[Any], Pulled]]]
    finish: Callable[[list[Any], list[Any]], Reduced]
    replicas: Sequence[Any]


def full_backward(
    loss_fn: Callable[..., Any], layout: Layout, leaves: list[jax.Array], batch: Tree, rest: Any, *, each: bool = False
) -> Backward:
    """Stages 0 and 1: full parameters.

    Args:
        loss_fn: the loss on full parameters.
        layout: the layout.
        leaves: the parameters.
        batch: an example of what `run` will be given, for its shapes.
        rest: the same.
        each: whether `run` reduces its gradients, so that they are shards; else they are full and `finish` does.
    """
    reduce_all = _reduction(layout, _reduced_in_full(layout, lambda: trace(loss_fn, layout, batch, rest)[0]))
    trained = [p.trainable for p in layout.leaves]

    def run(batch: Tree, rest: Any, feedback: list[Any]) -> tuple[Any, Callable[[Any], Pulled]]:
        def of_trained(values: list[jax.Array]) -> Any:
            new = iter(values)
            merged = [next(new) if t else x for x, t in zip(leaves, trained, strict=True)]
            # Rebuilt under this trace: Flax NNX refuses to update state whose variables were made outside of it.
            inputs, more = jax.tree.map(lambda x: x, (batch, rest))
            return arrays(loss_fn(layout.treedef.unflatten(merged), inputs, *more))

        out, vjp = jax.vjp(of_trained, [x for x, t in zip(leaves, trained, strict=True) if t])

        def pullback(cotangent: Any) -> Pulled:
            new = iter(vjp(cotangent)[0])
            grads = [next(new) if t else None for t in trained]
            grads, lost = reduce_all(grads, feedback) if each else (grads, feedback)
            return grads, lost, None

        return out, pullback

    finish = (lambda grads, feedback: (grads, feedback)) if each else reduce_all
    return Backward(run, finish, [None] * len(leaves))


def staged_backward(
    loss_fn: Callable[..., Any],
    layout: Layout,
    leaves: list[jax.Array],
    batch: Tree,
    rest: Any,
    replicas: Sequence[Any],
    *,
    repeated: bool,
    deferred: bool = False,
) -> Backward:
    """Stages 2 and 3: partial gradients of sharded leaves are reduced shards, those of replicated leaves are local.

    Args:
        loss_fn: the loss on full parameters.
        layout: the layout.
        leaves: the parameters in stored form.
        batch: an example of what `run` will be given, for its shapes.
        rest: the same.
        replicas: what every node holds of each leaf since the last step; None where it keeps nothing.
        repeated: whether `run` is called for several microbatches: secondary partitions are then made once, for all.
        deferred: whether partial gradients stay full and are reduced by `finish`, in the dtype of the compute.
    """
    jaxpr, out_tree = trace(loss_fn, layout, batch, rest)
    outer = layout_scope(layout)
    uses = leaf_uses(jaxpr, len(layout.leaves))
    replicas = list(replicas)
    held: list[Any] = [
        outer.enter(x, x if p.trainable else None, p) if is_stored(p, layout) else x
        for x, p in zip(leaves, layout.leaves, strict=True)
    ]
    pairs = zip(layout.leaves, uses, strict=True)
    by_replica = [i for i, (p, of_leaf) in enumerate(pairs) if travels_by_deltas(p, of_leaf, layout)]
    by_layer = {
        i for i in by_replica
        if not repeated and can_change_by_layer(layout.leaves[i], uses[i], layout)
        and is_scanned_directly(jaxpr, i, cast_target(uses[i], layout.leaves[i].dtype))
    }  # fmt: skip
    for i, replica in up_to_date(leaves, {i: replicas[i] for i in by_replica}, layout, by_layer).items():
        replicas[i] = replica
        if i in by_layer:
            held[i] = changing_by_layer(leaves[i], replica, layout.leaves[i], uses[i], layout, outer)
        else:
            held[i] = held_by_replica(leaves[i], replica, layout.leaves[i], uses[i], outer)
    if repeated:
        same = _replicated_inputs(layout, batch, rest)
        held = hoist_secondaries(jaxpr, [*held, *jax.tree.leaves((batch, rest))], same, outer)[: len(held)]

    def run(batch: Tree, rest: Any, feedback: list[Any]) -> tuple[Any, Callable[[Any], Pulled]]:
        def of_grad_inputs(grad_inputs: list[Any], feedback: list[Any], tokens: list[Token]) -> tuple[Any, Any]:
            order = _order(layout, tokens)
            scope = layout_scope(layout, reduces=not deferred, order=order)
            parts = zip(held, grad_inputs, feedback, strict=True)
            args = [_entered(*part, scope) for part in parts]
            program, inputs, same = program_of(loss_fn, layout, jaxpr, args, batch, rest)
            out = out_tree.unflatten(evaluate_plain(program, inputs, scope, same))
            return (arrays(out), [] if order is None else [order.behind()]), scope.changed

        grad_inputs = [_grad_input(x, p, layout, deferred) for x, p in zip(leaves, layout.leaves, strict=True)]
        entering = [None] * len(grad_inputs) if deferred else feedback
        tokens = [zero_token(), zero_token()]
        (out, behind), vjp, changed = jax.vjp(of_grad_inputs, grad_inputs, entering, tokens, has_aux=True)
        replicas[:] = [changed.get(p.path, x) for p, x in zip(layout.leaves, replicas, strict=True)]

        def pullback(cotangent: Any) -> Pulled:
            # What exists at the end of the forward pass is what the first gathers of the backward pass wait for.
            grads, lost, tokens = vjp((cotangent, behind))
            return grads, feedback if deferred else lost, sum(tokens, zero_token()) if behind else None

        return out, pullback

    if not deferred:
        replicated = [None if p.is_sharded else p for p in layout.leaves]
        return Backward(run, _reduction(layout, replicated), replicas)
    wire = [cast_target(of_leaf, p.dtype) for of_leaf, p in zip(uses, layout.leaves, strict=True)]
    reduce_all = _reduction(layout, _reduced_in_full(layout, lambda: jaxpr))

    def finish(grads: list[Any], feedback: list[Any]) -> Reduced:
        narrow = [None if g is None else g.astype(dtype) for g, dtype in zip(grads, wire, strict=True)]
        reduced, feedback = reduce_all(narrow, feedback)
        pairs = zip(reduced, grads, strict=True)
        return [None if g is None else g.astype(full.dtype) for g, full in pairs], feedback

    return Backward(run, finish, replicas)


def _reduction(layout: Layout, placements: Sequence[Placement | None]) -> Callable[[list[Any], list[Any]], Reduced]:
    """Reduces one full gradient per leaf under its placement; what has none is left as it is."""
    collectives = layout_collectives(layout)

    def reduce_all(grads: list[Any], feedback: list[Any]) -> Reduced:
        return reduce_together(grads, feedback, placements, collectives, layout.config.listed_pack_bytes)

    return reduce_all


def forward(fn: Callable[..., Any], layout: Layout, leaves: list[jax.Array], batch: Tree, rest: Any) -> Tree:
    """Runs a function on stored parameters without gradients."""
    jaxpr, out_tree = trace(fn, layout, batch, rest)
    order = _order(layout, [zero_token(), zero_token()])
    scope = layout_scope(layout, forward_only=True, order=order)
    held = [scope.enter(x, None, p) if is_stored(p, layout) else x for x, p in zip(leaves, layout.leaves, strict=True)]
    program, inputs, same = program_of(fn, layout, jaxpr, held, batch, rest)
    out = arrays(out_tree.unflatten(evaluate_plain(program, inputs, scope, same)))
    return out if order is None else reading(out, order.behind())


def reading(out: Tree, token: Token | None) -> Tree:
    """A function's output, with the first float of it made to read a token, which is zero."""
    leaves, structure = jax.tree.flatten(out)
    first = next((i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)), None)
    if token is not None and first is not None:
        leaves[first] = leaves[first] + token.astype(leaves[first].dtype)
    return structure.unflatten(leaves)


def _replicated_inputs(layout: Layout, batch: Tree, rest: Any) -> list[bool]:
    """For each input of the traced loss, whether it is the same on every device: all but the batch and folded keys."""
    of_rest = [not _compat.is_prng_key(x) for x in jax.tree.leaves(rest)]
    return [*(True for _ in layout.leaves), *(False for _ in jax.tree.leaves(batch)), *of_rest]


def arrays(out: Tree) -> Tree:
    """A function's output with arrays in place of Python numbers, such as a weight that is the number of examples."""
    return jax.tree.map(jnp.asarray, out)


def trace(fn: Callable[..., Any], layout: Layout, batch: Tree, rest: Any) -> tuple[Any, Any]:
    """The jaxpr of `fn` on logical parameters and this device's inputs, and the structure of its output."""
    jaxpr, shape = jax.make_jaxpr(lambda p, b, r: fn(p, b, *r), return_shape=True)(layout.logical_shapes(), batch, rest)
    return jaxpr, jax.tree.structure(shape)


def program_of(
    fn: Callable[..., Any], layout: Layout, jaxpr: Any, leaves: list[Any], batch: Tree, rest: Any
) -> tuple[Any, list[Any], list[bool]]:
    """What to evaluate: a jaxpr of `fn`, its inputs, and for each whether it is the same on every device.

    The rule of a `custom_vjp` may close over the batch. In `jaxpr`, the trace of `fn`, that batch is an input that is
    gone once it has been traced; traced anew with the batch at hand in its place, the rule finds values that are alive
    while it is run.
    """
    if not _compat.closes_over_values(jaxpr):
        return jaxpr, [*leaves, *jax.tree.leaves((batch, rest))], _replicated_inputs(layout, batch, rest)
    again = jax.make_jaxpr(lambda p: fn(p, batch, *rest))(layout.logical_shapes())
    opened, consts = _compat.with_consts_as_inputs(again)
    own = {id(x) for x in jax.tree.leaves(rest) if not _compat.is_prng_key(x)}
    same = [id(x) in own or not _compat.is_traced(x) for x in consts]
    return opened, [*consts, *leaves], [*same, *(True for _ in leaves)]


def layout_scope(
    layout: Layout,
    *,
    reduces: bool = True,
    forward_only: bool = False,
    order: Order | None = None,
) -> Scope:
    """A top-level scope for a layout; gradients leave it reduced or full."""
    collectives, config = layout_collectives(layout), layout.config
    # On GPUs the order of the gathers forms the messages, and XLA merges small collectives that are ready together; on
    # CPUs nobody else does it for the straight-line part of a program, which is as long as the model.
    left_alone = config.pack_bytes == "auto" and is_of_gpus(layout.mesh)
    return Scope(
        collectives if reduces else unreduced(collectives),
        min_loop_size=config.min_shard_size,
        forward_only=forward_only,
        order=order,
        window=prefetch_window(layout.mesh, config),
        pack_bytes=0 if left_alone else config.listed_pack_bytes,
        region_pack_bytes=0 if config.pack_bytes == "auto" else config.pack_bytes,
    )


def _order(layout: Layout, tokens: Sequence[Token]) -> Order | None:
    """The order of gathers from the start of the program, where the configuration asks for one."""
    window, (seed, first) = prefetch_window(layout.mesh, layout.config), tokens
    return None if window is None else GroupedOrder(window, seed, [Mark(0, first)])


def is_stored(placement: Placement, layout: Layout) -> bool:
    """Whether the leaf enters the evaluator in stored form."""
    return placement.is_sharded and layout.stage >= 2


def _grad_input(x: jax.Array, p: Placement, layout: Layout, deferred: bool) -> jax.Array | None:
    if not p.trainable:
        return None
    if deferred and is_stored(p, layout):
        return jnp.zeros(p.shape, p.dtype)
    return jnp.zeros(p.shard_shape, p.dtype) if layout.stage == 2 and p.is_sharded else x


def _entered(x: Any, grad_input: jax.Array | None, feedback: jax.Array | None, scope: Scope) -> Any:
    """A leaf as the evaluator takes it, under differentiation with respect to its grad_input and feedback."""
    if not isinstance(x, Stored):
        return x if grad_input is None else grad_input
    if x.is_secondary or x.changing is not None:
        narrow = None if grad_input is None else grad_input.astype(x.placement.dtype)
        stored = scope.enter(x.shard, narrow, x.placement, feedback=feedback, secondary_stack=x.secondary_stack)
        return dataclasses.replace(stored, changing=x.changing)
    # The shard itself is not differentiated here: what it is used for under `stop_gradient` must not seem to be.
    return scope.enter(x.shard, grad_input, x.placement, feedback=feedback)


def _reduced_in_full(layout: Layout, traced: Callable[[], Any]) -> list[Placement]:
    """Placements under which full gradients are reduced: stacks of norm scales or biases are no matrices.

    `traced` gives the loss's jaxpr, which only quantised reductions need.
    """
    if layout.stage == 0:
        return [_replicated(p) for p in layout.leaves]
    if layout.config.quantize_gradients is None:
        return layout.leaves

    uses, least = leaf_uses(traced(), len(layout.leaves)), least_quantized(layout)
    return [
        p.unquantized() if p.is_quantized and stacks_vectors(p.shape, of_leaf, least) else p
        for p, of_leaf in zip(layout.leaves, uses, strict=True)
    ]


def _replicated(placement: Placement) -> Placement:
    return dataclasses.replace(placement, dim=None, padding=0)
