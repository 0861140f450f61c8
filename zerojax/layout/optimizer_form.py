"""The form that an optimizer works on, while functions run that it calls: logical shapes, in the master dtype.

SAM asks for gradients again and a line search for the loss, at parameters that the optimizer made. Under
`in_optimizer`, gradients and forward functions take that form of the parameters and return gradients in it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.layout.layout import Layout
from zerojax.layout.placement import pad, unpad

Tree = Any
# The layouts of the optimizers that are calling a function of the user's.
_CALLING: contextvars.ContextVar[tuple[Layout, ...]] = contextvars.ContextVar("_CALLING", default=())


@contextlib.contextmanager
def in_optimizer(layout: Layout) -> Iterator[None]:
    """While an optimizer under this layout calls a function of the user's."""
    token = _CALLING.set((*_CALLING.get(), layout))
    try:
        yield
    finally:
        _CALLING.reset(token)


def entering(params: Tree, layout: Layout) -> Tree:
    """Parameters in stored form, checked; what an optimizer calls with is brought into it."""
    if not _is_in_optimizer(layout):
        layout.check(params, stored=True)
        return params
    layout.check(params, stored=None)
    form = pad if layout.stage >= 3 else unpad
    return jax.tree.unflatten(
        layout.treedef,
        [form(jnp.asarray(x, p.dtype), p) for x, p in zip(jax.tree.leaves(params), layout.leaves, strict=True)],
    )


def leaving(grads: Tree, layout: Layout) -> Tree:
    """Gradients as they are; for an optimizer, of logical shape."""
    if not _is_in_optimizer(layout):
        return grads
    pairs = zip(layout.leaves_of(grads), layout.leaves, strict=True)
    return layout.treedef.unflatten([None if g is None else unpad(g, p) for g, p in pairs])


def _is_in_optimizer(layout: Layout) -> bool:
    return any(
        other is layout or (other.treedef == layout.treedef and other.leaves == layout.leaves)
        for other in _CALLING.get()
    )
