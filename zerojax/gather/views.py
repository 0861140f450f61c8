"""Views of a parameter: shape-only operations and casts, applied after the gather, or moved onto the shards.

A transposed weight is gathered and then transposed, which the compiler merges into its use. A stack of layers that a
loop takes apart must be rearranged before that: its layers are reversed, grouped, or brought to the front on shards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from zerojax import _compat
from zerojax.layout.placement import Placement

Op = Callable[[jax.Array], jax.Array]


def seen(view: Sequence[Op], x: jax.Array) -> jax.Array:
    """An array under a view.

    >>> seen([lambda x: x.T, lambda x: x.reshape(6)], np.ones((2, 3))).shape
    (6,)
    """
    for op in view:
        x = op(x)
    return x


@dataclasses.dataclass(frozen=True)
class Cast:
    """A cast in a view: unlike an operation on shapes, it applies to one layer of a stack as it does to the stack."""

    dtype: np.dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """Casts a full array, of the stack or of one layer."""
        return lax.convert_element_type(x, self.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """An equation of one operand that rearranges, repeats or copies it."""

    eqn: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies it to a full array."""
        return _compat.bind_equation(self.eqn, [x])[0]


def on_shards(view: View, placement: Placement) -> tuple[Op, Placement] | None:
    """A view as an operation on the shards, and the placement of its result; None where it needs the full array.

    Args:
        view: the view.
        placement: of a sharded parameter.
    """
    moved = moved_dims(view.eqn)
    before, dim = placement.shape, placement.dim
    assert dim is not None
    if moved is None or any(entry is not None for entry in placement.spec):
        return None
    name, params, after = view.eqn.primitive.name, view.eqn.params, tuple(view.eqn.outvars[0].aval.shape)
    new = moved.get(dim)
    if new is None or after[new] != before[dim] or (name == "rev" and dim in params["dimensions"]):
        return None

    def op(x: jax.Array) -> jax.Array:
        shape = (*after[:new], x.shape[dim], *after[new + 1 :])
        if name == "transpose":
            return lax.transpose(x, params["permutation"])
        return lax.rev(x, params["dimensions"]) if name == "rev" else x.reshape(shape)

    return op, dataclasses.replace(placement, shape=after, dim=new, spec=(None,) * len(after))


def moved_dims(eqn: Any) -> dict[int, int] | None:
    """Where a view moves each dim of its operand that keeps its extent and its order; None: it is no such view.

    >>> import jax
    >>> moved_dims(jax.make_jaxpr(lambda x: x.reshape(2, 2, 3, 5))(np.ones((4, 15))).eqns[0])
    {}
    >>> moved_dims(jax.make_jaxpr(lambda x: x.reshape(2, 2, 15))(np.ones((4, 15))).eqns[0])
    {1: 2}
    """
    name, params = eqn.primitive.name, eqn.params
    before, after = tuple(eqn.invars[0].aval.shape), tuple(eqn.outvars[0].aval.shape)
    if name == "transpose":
        return {dim: new for new, dim in enumerate(params["permutation"])}
    if name in ("rev", "copy", "copy_p"):
        return {dim: dim for dim in range(len(before))}
    if name in ("reshape", "expand_dims", "squeeze", "broadcast_in_dim") and math.prod(before) == math.prod(after):
        return _same_place(before, after)  # the order in memory stays
    return None


def _same_place(before: Sequence[int], after: Sequence[int]) -> dict[int, int]:
    """The dims of as many elements in front and behind, and of the same extent."""
    found = {}
    for dim, extent in enumerate(before):
        places = [
            new for new, other in enumerate(after)
            if other == extent and extent > 1 and math.prod(after[:new]) == math.prod(before[:dim])
        ]  # fmt: skip
        if places:
            found[dim] = places[0]
    return found
