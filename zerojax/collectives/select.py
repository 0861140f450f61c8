"""The collectives that a configuration asks for: plain ones, with weights or gradients quantised where it says so.

A movement that rounds, or that carries a float as bits, has a derivative of zero to JAX. Here each gets the one that is
meant: that of the unquantised movement (straight-through), so that a gradient can itself be differentiated, in either
mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.collectives.plain import Collectives, gather_linearly, identity_gather, plain_collectives, reduce_linearly
from zerojax.collectives.quantized import Pair, quantized_gradients, quantized_weights
from zerojax.layout.layout import Layout
from zerojax.layout.mesh import gathers_in_one_hop, keeps_secondary, other_axes
from zerojax.layout.placement import Placement

Move = Callable[[jax.Array, Placement], jax.Array]


def layout_collectives(layout: Layout) -> Collectives:
    """The movements that a layout's configuration asks for, on its mesh."""
    config = layout.config
    others = other_axes(layout.mesh, config.axes)
    out = plain_collectives(
        others, config.grad_dtype, secondary=has_secondary(layout), flat=gathers_in_one_hop(layout.mesh, config)
    )
    if config.quantize_weights is not None:
        out = quantized_weights(out, config.quantize_weights, others, config.kernels)  # type: ignore[arg-type]
    if config.quantize_gradients is not None:
        pair: Pair = config.quantize_gradients  # type: ignore[assignment]
        out = quantized_gradients(out, pair, config.axes, config.rounding, others, config.kernels)
    out = _with_derivatives(out, others, layout)
    return out if layout.stage >= 3 else identity_gather(out)


def _with_derivatives(moves: Collectives, others: tuple[str, ...], layout: Layout) -> Collectives:
    """The same movements with the derivatives of the unquantised ones; what is fed back has none.

    A movement of values as they are has its own derivative, and is left as it is: the wrapper takes a quarter of the
    time in which the gradient of a model with many small leaves is traced.
    """
    config = layout.config

    def gathers_values(x: jax.Array, p: Placement) -> bool:
        return x.dtype.itemsize > 2 and not (config.quantize_weights is not None and p.is_quantized)

    def reduces_values(x: jax.Array, p: Placement) -> bool:
        return not (config.quantize_gradients is not None and p.is_quantized)

    def straight_through(
        move: Move, linear: Callable[..., jax.Array], moves_values: Callable[[jax.Array, Placement], bool]
    ) -> Move:
        def with_derivative(x: jax.Array, placement: Placement) -> jax.Array:
            if moves_values(x, placement):
                return move(x, placement)

            @jax.custom_jvp
            def moved(x: jax.Array) -> jax.Array:
                return move(x, placement)

            @moved.defjvp
            def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
                return moved(*primals), linear(tangents[0], placement, others)

            return moved(x)

        return with_derivative

    def reduce_with_feedback(full: jax.Array, feedback: jax.Array, placement: Placement) -> tuple[jax.Array, jax.Array]:
        @jax.custom_jvp
        def moved(full: jax.Array, feedback: jax.Array) -> tuple[jax.Array, jax.Array]:
            return moves.reduce_with_feedback(full, feedback, placement)

        @moved.defjvp
        def _(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[Any, Any]:
            shard, lost = moved(*primals)
            return (shard, lost), (reduce_linearly(tangents[0], placement, others), jnp.zeros_like(lost))

        return moved(full, feedback)

    return moves._replace(
        gather=straight_through(moves.gather, gather_linearly, gathers_values),
        reduce=straight_through(moves.reduce, reduce_linearly, reduces_values),
        reduce_with_feedback=reduce_with_feedback,
    )


def has_secondary(layout: Layout) -> bool:
    """`keeps_secondary` of a layout."""
    return keeps_secondary(layout.mesh, layout.config)
