"""Derivatives of what is computed in an order of gathers: those of the same computation without one.

The order is kept by rules that are not meant to be differentiated themselves, and in forward mode cannot be. So
`value_and_grad` and `apply` as a whole get the derivative, in either mode, of the program whose gathers wait for
nothing. Where nobody differentiates them, nothing is traced twice.

That rule is a `jax.custom_jvp`, which may hold no reference (`jax.new_ref`) and close over nothing that is
differentiated. A function that does is seen to be differentiated only where its arguments are, not through a `jax.jit`
in between; `prefetch_bytes=None` always can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from zerojax import _compat
from zerojax.layout.layout import Layout
from zerojax.layout.mesh import prefetch_window


def with_derivative(
    build: Callable[[Layout], Callable[..., Any]], layout: Layout, *, is_pure: bool
) -> Callable[..., Any]:
    """The function for a layout, with the derivative of the same function without an order of gathers.

    Args:
        build: makes the function, of any pytrees of arrays, for a layout.
        layout: the layout.
        is_pure: whether it has no effect and closes over nothing that is traced.
    """
    if prefetch_window(layout.mesh, layout.config) is None:
        return build(layout)
    unordered = dataclasses.replace(layout, config=dataclasses.replace(layout.config, prefetch_bytes=None))

    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        if any(map(_compat.is_differentiated, leaves)):
            return build(unordered)(*args)
        if not is_pure:
            return build(layout)(*args)

        @jax.custom_jvp
        def computed(*leaves: Any) -> Any:
            return build(layout)(*structure.unflatten(leaves))

        def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
            moves = [not isinstance(t, SymbolicZero) for t in tangents]

            def of_moving(*moving: Any) -> Any:
                new = iter(moving)
                filled = [next(new) if m else x for x, m in zip(primals, moves, strict=True)]
                return build(unordered)(*structure.unflatten(filled))

            def moving(values: tuple[Any, ...]) -> tuple[Any, ...]:
                return tuple(x for x, m in zip(values, moves, strict=True) if m)

            return jax.jvp(of_moving, moving(primals), moving(tangents))

        computed.defjvp(rule, symbolic_zeros=True)
        return computed(*leaves)

    return run
