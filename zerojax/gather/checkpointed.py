"""Activation checkpointing that keeps the order of gathers.

`jax.checkpoint` lets the recomputation of a region wait for the cotangents of its outputs as a whole, weights included:
no weight could then be gathered while the region behind is still differentiated. Here the wait is made by hand: what
was kept waits for the cotangents, the shards only for the tokens that come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.gather.cotangents import fill, instantiated, take
from zerojax.gather.order import Order, Progress, Token, together
from zerojax.gather.stored import Scope

# Outputs; tokens of the marks left, of those done, of what has arrived, and of the reductions.
_Out = tuple[list[jax.Array], list[Token], list[Token], list[Token], list[Token]]


def ordered_checkpoint(
    body: Callable[[Sequence[Any], Scope], list[jax.Array]],
    flat: Sequence[Any],
    scope: Scope,
    *,
    policy: Callable[..., Any] | None,
) -> list[jax.Array]:
    """Runs a checkpointed region in the order of the program around it.

    Args:
        body: the region on the arrays of `flat`, evaluated in the scope that it is given.
        flat: its inputs; shards as tuples, anything else as single arrays.
        scope: of the program around, whose order is moved on to the end of the region.
        policy: what the user lets the backward pass keep.
    """
    order = scope.order
    assert order is not None
    marks = order.handed_on()
    order.end_joint()
    arrived, reduced = order.arrived or [order.seed], order.reduced_from_here() or [order.seed]
    leaves, structure = jax.tree.flatten((list(flat), [order.seed], [mark.token for mark in marks], arrived, reduced))
    # What follows outlives the trace: it holds no array of it, as the order and the scope do.
    nested, window, begun = scope.nested, order.window, order.progress
    order.starts = starts = order.region_starts()
    ended: list[Progress] = []  # how the region ended, noted while it is traced
    # Noted while it is traced: the inputs that are differentiated, the residuals that are values, and those that are
    # tokens.
    noted: list[tuple[list[bool], list[int], list[int]]] = []

    def region(leaves: list[Any]) -> _Out:
        arrays, (seed,), tokens, arrived, reduced = structure.unflatten(leaves)
        inner = nested()
        inner.order = Order(
            window, seed, begun.marks_of(tokens), begun.position, reduced=reduced, starts=starts,
            arrived=[lax.stop_gradient(x) for x in arrived],
        )  # fmt: skip
        out = body(arrays, inner)
        inner.order.end_joint()
        left = [mark.token for mark in inner.order.handed_on()]
        ended[:] = [inner.order.progress]
        return out, left, inner.order.done, inner.order.arrived_after(arrived), inner.order.reduced_from_here()

    def forward(primals: list[Any]) -> tuple[Any, Any]:
        leaves = [x.value for x in primals]
        real = [x.perturbed and jnp.issubdtype(jnp.result_type(x.value), jnp.inexact) for x in primals]

        def of_real(values: list[Any]) -> Any:
            new = iter(values)
            return region([next(new) if r else x for x, r in zip(leaves, real, strict=True)])

        checkpointed = jax.checkpoint(of_real, policy=policy, prevent_cse=False)
        out, pullback = jax.vjp(checkpointed, [x for x, r in zip(leaves, real, strict=True) if r])
        arrays, _, tokens, arrived, _ = structure.unflatten(leaves)
        shards = {id(x) for part in arrays if isinstance(part, tuple) for x in jax.tree.leaves(part)}
        among = {id(x) for x in (*tokens, *arrived)}
        kept = list(enumerate(map(id, jax.tree.leaves(pullback))))
        noted[:] = [(real, [i for i, x in kept if x not in shards | among], [i for i, x in kept if x in among])]
        return out, pullback

    def backward(pullback: Any, cotangents: _Out) -> tuple[list[Any]]:
        kept, rebuild = jax.tree.flatten(pullback)
        outputs, left, done, arrived, reduced = jax.tree.map(instantiated, cotangents)
        real, values, tokens = noted[0]
        inexact = [i for i, x in enumerate(outputs) if jnp.issubdtype(x.dtype, jnp.inexact)]
        held, waited = together([kept[i] for i in values], [outputs[i] for i in inexact])
        for i, x in zip(values, held, strict=True):
            kept[i] = x
        for i, x in zip(inexact, waited, strict=True):
            outputs[i] = x
        # The gathers of the recomputation wait for those of the region behind, and for what comes back to the marks of
        # this region: from the uses, and from later reductions, that have waited for them.
        waits = [position >= begun.position for position, _ in ended[0].marks]
        waits = waits if any(waits) else [False] * (len(left) - 1) + [True]
        held, waited = together([kept[i] for i in tokens], [*take(left, waits), *arrived])
        left, arrived = fill(left, waits, waited), waited[sum(waits) :]
        for i, x in zip(tokens, held, strict=True):
            kept[i] = sum(arrived, x)  # what nobody reads is not waited for
        (grads,) = rebuild.unflatten(kept)((outputs, left, done, arrived, reduced))
        new = iter(grads)
        return ([next(new) if r else None for r in real],)

    @jax.custom_vjp
    def run(leaves: list[Any]) -> _Out:
        return region(leaves)

    run.defvjp(forward, backward, symbolic_zeros=True)
    out, *tokens_out = run(leaves)
    order.leave(ended[0], *tokens_out)
    return out
