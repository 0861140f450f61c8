"""Values computed from stored parameters by cheap operations, left to be computed where they are used.

A mask, a scale or a norm applied to a weight would make a full array of it that waits for the backward pass, and
applied to a stack of layers an array of all layers. Instead the operations wait: the consumer gathers the parameter,
applies them, and keeps shards alone, here as for a parameter itself. Where every operation treats each layer of a stack
by itself, a loop over the stack applies them to one layer at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from zerojax import _compat
from zerojax.gather.primitives import defers, layer_flags
from zerojax.gather.stored import Stored, apply_with_gather

# Parameters of equations that name the extent of dim 0.
_EXTENTS = ("shape", "new_sizes", "limit_indices", "slice_sizes")


@dataclasses.dataclass(frozen=True, eq=False)
class Deferred:
    """What will be computed where it is used.

    Attributes:
        leaves: what it is computed from: stored parameters, arrays, and deferred values of single layers.
        stacked: for each of them, whether its dim 0 runs along the stack.
        steps: (equation, for each input the number of its value or a literal), in order; values are the leaves and then
            the results, of which the last is this value.
        length: number of layers, where every operation treats each layer of the stack by itself; else None.
        layers: number of layers that the leaves have: fewer than `length` after a slice; 0: one, without dim 0.
        aval: shape and dtype, as the program sees the value.
    """

    leaves: tuple[Any, ...]
    stacked: tuple[bool, ...]
    steps: tuple[tuple[Any, tuple[Any, ...]], ...]
    length: int | None
    layers: int | None
    aval: jax.ShapeDtypeStruct

    @property
    def has_all_layers(self) -> bool:
        """Whether it has all its layers, so that further operations can be deferred with it."""
        return self.layers == self.length

    @property
    def params(self) -> list[Stored]:
        """The stored parameters that it is computed from."""
        return [x for leaf in self.leaves for x in params_of(leaf)]

    def computed(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """The value, from the leaves as ordinary arrays."""
        values = [x[None] if self.layers == 0 and s else x for x, s in zip(leaves, self.stacked, strict=True)]
        for eqn, inputs in self.steps:
            params = None
            if not self.has_all_layers:  # the equation was traced on all layers
                extent = self.layers or 1
                sizes = {n: (extent, *eqn.params[n][1:]) for n in _EXTENTS if n in eqn.params}
                params = {**eqn.params, **sizes}
            args = [values[i] if isinstance(i, int) else i.val for i in inputs]
            values += _compat.bind_equation(eqn, args, params)
        return lax.squeeze(values[-1], (0,)) if self.layers == 0 else values[-1]

    def full(self) -> jax.Array:
        """The value as an ordinary array, for a consumer of which nothing is known."""
        (out,) = apply_held(lambda args: [args[0]], [self])
        return out

    def map_leaves(self, op: Callable[[Any], Any]) -> Deferred:
        """The same value of other leaves, of the same shapes."""
        return dataclasses.replace(self, leaves=tuple(map(op, self.leaves)))

    def map_layers(self, op: Callable[[Any], Any], layers: int) -> Deferred:
        """The value for some layers, `op` taking each stacked leaf to those; 0: for one layer, without dim 0."""
        leaves = tuple(op(x) if along else x for x, along in zip(self.leaves, self.stacked, strict=True))
        shape = (layers, *self.aval.shape[1:]) if layers else self.aval.shape[1:]
        aval = jax.ShapeDtypeStruct(shape, self.aval.dtype)
        return dataclasses.replace(self, leaves=leaves, layers=layers, aval=aval)


def is_held(x: Any) -> bool:
    """Whether a value stands for parameters in stored form."""
    return isinstance(x, (Stored, Deferred))


def params_of(x: Any) -> list[Stored]:
    """The stored parameters that a value stands for."""
    return [x] if isinstance(x, Stored) else x.params if isinstance(x, Deferred) else []


def plain(x: Any) -> Any:
    """A value as an ordinary array, gathered if it is held."""
    return x.full() if is_held(x) else x


def without_gradient(x: Any) -> Any:
    """A value behind a `stop_gradient`."""
    if isinstance(x, Deferred):
        return x.map_leaves(without_gradient)
    return x.without_gradient() if isinstance(x, Stored) else lax.stop_gradient(x)


def apply_held(apply: Callable[[Sequence[Any]], Sequence[jax.Array]], args: Sequence[Any]) -> list[jax.Array]:
    """`apply_with_gather` for arguments of which some are held: each parameter in them is gathered once."""
    numbers: dict[int, int] = {}
    leaves: list[Any] = []

    def collect(x: Any) -> None:
        if isinstance(x, Deferred):
            for leaf in x.leaves:
                collect(leaf)
        elif id(x) not in numbers:
            numbers[id(x)] = len(leaves)
            leaves.append(x)

    for arg in args:
        collect(arg)

    def numbered(x: Any) -> Any:
        return x.map_leaves(numbered) if isinstance(x, Deferred) else numbers[id(x)]

    def value(x: Any, arrays: Sequence[Any]) -> Any:
        return x.computed([value(leaf, arrays) for leaf in x.leaves]) if isinstance(x, Deferred) else arrays[x]

    # The operation outlives the trace: it knows the leaves by their numbers, and holds none of them.
    parts = [numbered(arg) for arg in args]
    return apply_with_gather(lambda arrays: apply([value(part, arrays) for part in parts]), leaves)


def defer(eqn: Any, inputs: Sequence[Any], broadcasts: dict[int, Any]) -> Deferred | None:
    """The output of a cheap equation as a value to be computed later; None where it is better computed now.

    Args:
        eqn: the equation; what it takes beside parameters is the same on every device.
        inputs: its inputs, of which some are held.
        broadcasts: by id of an array, (the array, the equation that has broadcast it along a new leading dim, its
            input): it is broadcast again for each layer, rather than kept.
    """
    steps = _Steps()
    numbers: list[Any] = []
    for x, atom in zip(inputs, eqn.invars, strict=True):
        array, broadcast, operand = broadcasts.get(id(x), (None, None, None))
        if isinstance(atom, _compat.Literal):
            numbers.append(atom)
        else:
            numbers.append(steps.step(broadcast, [steps.value(operand)]) if array is x else steps.value(x))
    steps.step(eqn, numbers)
    params = {id(p.root): p for leaf in steps.leaves for p in params_of(leaf)}
    shape = tuple(eqn.outvars[0].aval.shape)
    stacked = steps.stacked(shape[0]) if shape else None
    sizes = [math.prod(p.placement.shape) for p in params.values()]
    flags = None if stacked is None else layer_flags(eqn, shape[0])
    if not defers(eqn, [is_held(x) for x in inputs], sizes, flags):
        return None
    length = None if stacked is None else shape[0]
    count = len(steps.leaves)
    numbered = tuple((e, tuple(k.number(count) if isinstance(k, _Key) else k for k in keys)) for e, keys in steps.steps)
    aval = jax.ShapeDtypeStruct(shape, eqn.outvars[0].aval.dtype)
    return Deferred(tuple(steps.leaves), tuple(stacked or [False] * count), numbered, length, length, aval)


@dataclasses.dataclass(frozen=True)
class _Key:
    """A leaf or a step by its place, while their number is not known."""

    index: int
    is_step: bool

    def number(self, leaves: int) -> int:
        return self.index + leaves * self.is_step


class _Steps:
    """The leaves and steps of several values put together, each once."""

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.steps: list[tuple[Any, list[Any]]] = []

    def value(self, x: Any) -> _Key:
        """The key of a value: a leaf, or the last of a deferred value's steps."""
        if isinstance(x, Deferred) and x.has_all_layers:
            keys = [self.value(leaf) for leaf in x.leaves]
            for eqn, inputs in x.steps:
                keys.append(self.step(eqn, [keys[i] if isinstance(i, int) else i for i in inputs]))
            return keys[-1]
        known = [i for i, leaf in enumerate(self.leaves) if leaf is x]
        if not known:
            self.leaves.append(x)
        return _Key(known[0] if known else len(self.leaves) - 1, False)

    def step(self, eqn: Any, keys: list[Any]) -> _Key:
        """The key of an equation's result."""
        for i, (other, inputs) in enumerate(self.steps):
            if other is eqn and all(a is b or a == b for a, b in zip(inputs, keys, strict=True) if isinstance(a, _Key)):
                return _Key(i, True)
        self.steps.append((eqn, keys))
        return _Key(len(self.steps) - 1, True)

    def stacked(self, length: int) -> list[bool] | None:
        """For each leaf, whether it runs along a stack of `length` layers; None if a step does not go by layer."""
        flags: dict[int, bool] = {}
        for eqn, keys in self.steps:
            of_step = layer_flags(eqn, length)
            for key, along in zip(keys, of_step or [], strict=False):
                if isinstance(key, _Key) and along != (True if key.is_step else flags.setdefault(key.index, along)):
                    return None
            if of_step is None:
                return None
        return [flags.get(i, False) for i in range(len(self.leaves))]
