"""Stacks of which only changes travel, one layer at a time: that of the next layer while the one at hand is computed.

A loop over layers carries what it has received for the layer of its iteration, and in each iteration asks for the next
one, which nothing in it waits for. The first layer's change travels before the loop, the last one's twice (1 / layers
of the traffic): a branch around it could not run beside the compute. Knows nothing of formats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax import _compat
from zerojax.gather.primitives import PRIMITIVES, Kind
from zerojax.layout.placement import Placement

FEWEST_LAYERS = 32
"""Of a stack that changes layer by layer: of fewer, the change that travels twice is more than it hides."""


@dataclasses.dataclass(frozen=True, eq=False)
class Changing:
    """A stack whose replica is still that of the last step.

    Attributes:
        shard: this device's shard of the stack, in the dtype in which it is stored.
        replica: what its node holds.
        placement: of the stack.
        dtype: in which the loss uses it.
        updated: (shard, replica, placement) of a layer -> its replica after this step's change.
    """

    shard: jax.Array
    replica: jax.Array
    placement: Placement
    dtype: np.dtype
    updated: Callable[[jax.Array, jax.Array, Placement], jax.Array]

    def layer(self, index: jax.Array | int) -> jax.Array:
        """The replica of one layer, brought up to date."""
        shard, replica = (lax.dynamic_index_in_dim(x, index, keepdims=False) for x in (self.shard, self.replica))
        return self.updated(shard, replica, self.placement.without_leading_dim())


class LayerChanges:
    """The changing stacks among what a loop scans over.

    Attributes:
        first: what the loop carries into its first iteration.
        indices: the index of its layer, for each iteration; scanned over. None where nothing changes.
    """

    def __init__(self, layered: Sequence[Any], length: int, *, reverse: bool) -> None:
        self._changing = {i: x.changing for i, x in enumerate(layered) if getattr(x, "changing", None) is not None}
        self._length, self._reverse = length, reverse
        self.first = self._of(length - 1 if reverse else 0) if length else []
        self.indices = jnp.arange(length) if self._changing else None

    def _of(self, index: jax.Array | int) -> list[jax.Array]:
        return [stack.layer(index) for stack in self._changing.values()]

    def after(self, index: jax.Array | None) -> list[jax.Array]:
        """What the iteration after that of a layer will need."""
        if index is None:
            return []
        return self._of(jnp.maximum(index - 1, 0) if self._reverse else jnp.minimum(index + 1, self._length - 1))

    def stacks(self, layered: Sequence[Any]) -> list[Any]:
        """What is scanned over, the changing stacks without their weights."""
        return [
            dataclasses.replace(x, shard=None, secondary_stack=x.placement.dim, changing=None)
            if i in self._changing else x for i, x in enumerate(layered)
        ]  # fmt: skip

    def filled(self, sliced: Sequence[Any], current: Sequence[jax.Array]) -> list[Any]:
        """The arrays of one layer of all that is scanned over, the changing ones with their weights."""
        out = list(sliced)
        for (i, stack), weight in zip(self._changing.items(), current, strict=True):
            out[i] = (weight.astype(stack.dtype), *sliced[i][1:])
        return out

    def paths(self) -> list[str]:
        """Key paths of the changing stacks."""
        return [stack.placement.path for stack in self._changing.values()]


def is_scanned_directly(jaxpr: Any, number: int, dtype: np.dtype) -> bool:
    """Whether one of a program's inputs is used once, by a loop that scans over it.

    Args:
        jaxpr: the program.
        number: of the input.
        dtype: to which the program may cast the input first.
    """
    inner, _ = _compat.open_jaxpr(jaxpr)
    var = inner.invars[number]
    while True:
        users = [(eqn, i) for eqn in inner.eqns for i, atom in enumerate(eqn.invars) if atom is var]
        if len(users) != 1 or any(var is out for out in inner.outvars):
            return False
        ((eqn, place),) = users
        if eqn.primitive.name != "convert_element_type":
            break
        if jnp.dtype(eqn.params["new_dtype"]) != dtype:
            return False
        (var,) = eqn.outvars
    kind = PRIMITIVES.get(eqn.primitive.name)
    if kind is Kind.SCAN:
        return place >= sum(_compat.scan_arity(eqn.params))
    return kind is Kind.CALL and is_scanned_directly(_compat.called_jaxpr(eqn), place, dtype)
