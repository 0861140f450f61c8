"""The collectives that a configuration asks for: plain ones, with weights or gradients quantised where it says so."""

from __future__ import annotations

from zerojax.collectives.plain import Collectives, identity_gather, plain_collectives
from zerojax.collectives.quantized import quantized_gradients, quantized_weights
from zerojax.layout.layout import Layout
from zerojax.layout.mesh import other_axes


def layout_collectives(layout: Layout) -> Collectives:
    """The movements that a layout's configuration asks for, on its mesh."""
    config = layout.config
    others = other_axes(layout.mesh, config.axes)
    out = plain_collectives(others, config.grad_dtype, secondary=has_secondary(layout))
    if config.quantize_weights is not None:
        out = quantized_weights(out, config.quantize_weights, others)  # type: ignore[arg-type]
    if config.quantize_gradients is not None:
        out = quantized_gradients(out, config.quantize_gradients, config.axes, config.rounding, others)  # type: ignore[arg-type]
    return out if layout.stage >= 3 else identity_gather(out)


def has_secondary(layout: Layout) -> bool:
    """Whether a secondary partition differs from both the shard and the full leaf on this mesh."""
    return layout.config.secondary and all(layout.mesh.shape[axis] > 1 for axis in layout.config.axes)
