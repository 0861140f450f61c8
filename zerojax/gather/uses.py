"""Where a loss uses each parameter: in which dtype, once or once per layer, and whether its backward pass reads it.

What a placement cannot know about traffic is in the loss itself: a float32 parameter that is cast to bfloat16 travels
in 2 bytes, a stack that is scanned over moves one layer at a time, and the table of an embedding lookup is not read
again by the backward pass. This follows the parameters through the traced loss, with nothing compiled, by the table and
by the `Loop` that the evaluator runs by.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax import _compat
from zerojax.gather.primitives import PRIMITIVES, Kind, defers, kind_of, layer_flags
from zerojax.gather.replicated import Flags, body_flags
from zerojax.gather.rewritten import rewritten, sums_over_layers
from zerojax.gather.views import moved_dims

# Linear in the parameter with coefficients that do not depend on it: its value is not needed for any gradient.
_LINEAR = frozenset({"gather", "add", "add_any", "sub", "neg", "concatenate", "pad", "reduce_sum", "select_n", "psum"})


@dataclasses.dataclass(frozen=True)
class LeafUse:
    """One way in which a parameter is used.

    Attributes:
        dtype: in which it enters the computation.
        layers: in how many parts along dim 0 it is gathered: the length of the loop that takes it apart, else 1.
        in_backward: whether the backward pass needs its value: an operation that is not linear in it, or recomputation.
        repeats: how often all of it is gathered: the length of a loop around that loop.
        alternatives: number of branches of which one is taken, where not all of them use it, or of entries along a dim
            other than the first of which one is taken.
        in_branch: whether it stands in a branch of a condition that is not recomputed.
    """

    dtype: np.dtype
    layers: int = 1
    in_backward: bool = True
    repeats: int = 1
    alternatives: int = dataclasses.field(default=1, repr=False)
    in_branch: bool = dataclasses.field(default=False, repr=False)

    @property
    def by_layer(self) -> bool:
        """Whether each iteration of a loop needs another part: a layer of a stack, or the branch that it takes."""
        return self.layers * self.alternatives > 1


def leaf_uses(jaxpr: Any, num_leaves: int) -> list[tuple[LeafUse, ...]]:
    """The different uses of the first inputs of a loss.

    Args:
        jaxpr: the traced loss, `jax.make_jaxpr(loss_fn)(params, batch)`.
        num_leaves: number of leading inputs to follow.

    Returns:
        For each of them its uses, one per dtype, number of layers and repeats; none for a parameter that is not used.

    >>> import jax
    >>> loss = lambda w, x: jnp.sum(x @ w.astype(jnp.bfloat16))
    >>> leaf_uses(jax.make_jaxpr(loss)(jnp.ones((4, 4)), jnp.ones((2, 4), jnp.bfloat16)), 1)
    [(LeafUse(dtype=dtype(bfloat16), layers=1, in_backward=True, repeats=1),)]
    """
    inner, _ = _compat.open_jaxpr(jaxpr)
    first = [i < num_leaves for i in range(len(inner.invars))]
    return uses_in(inner, first, first)[:num_leaves]


def uses_in(jaxpr: Any, followed: Sequence[bool], replicated: Sequence[bool]) -> list[tuple[LeafUse, ...]]:
    """The different uses, in a part of a loss, of some of its inputs.

    Args:
        jaxpr: the part.
        followed: for each of its inputs, whether it is followed.
        replicated: for each of them, whether its value is the same on every device.

    Returns:
        For each input its uses; none for one that is not followed.
    """
    inner, _ = _compat.open_jaxpr(jaxpr)
    values = [(_Leaf.of(var),) if wanted else () for var, wanted in zip(inner.invars, followed, strict=True)]
    _end(_follow(inner, values, replicated, _Place()), _Place())
    return [_merged([use for leaf in value for use in leaf.uses]) for value in values]


def uses_inside(eqn: Any, followed: Sequence[bool], replicated: Sequence[bool]) -> list[tuple[LeafUse, ...]]:
    """The uses, in what an equation holds, of some of its inputs, as if it were entered."""
    values = [(_Leaf.of(var),) if wanted else () for var, wanted in zip(eqn.invars, followed, strict=True)]
    kind = PRIMITIVES.get(eqn.primitive.name, Kind.GATHER)
    _end(_of_equation(eqn, kind, values, list(replicated), _Place()), _Place())
    return [_merged([use for leaf in value for use in leaf.uses]) for value in values]


def cast_target(uses: Sequence[LeafUse], dtype: np.dtype) -> np.dtype:
    """The narrower float dtype to which every use casts a parameter of `dtype`; `dtype` if there is none.

    >>> cast_target([LeafUse(jnp.dtype("bfloat16"))], jnp.dtype("float32"))
    dtype(bfloat16)
    """
    dtypes = {use.dtype for use in uses}
    return dtypes.pop() if len(dtypes) == 1 else dtype


def is_layered(uses: Sequence[LeafUse]) -> bool:
    """Whether a parameter is used, and by nothing but loops that take one layer at a time.

    >>> is_layered([LeafUse(jnp.dtype("float32"), layers=4)]), is_layered([])
    (True, False)
    """
    return bool(uses) and all(use.layers > 1 for use in uses)


def stacks_vectors(shape: tuple[int, ...], uses: Sequence[LeafUse], least: int) -> bool:
    """Whether loops take one norm scale, bias or small matrix of a stack at a time, which is not worth quantising.

    Args:
        shape: of the stack.
        uses: of the stack.
        least: fewest elements of a layer that are.
    """
    return is_layered(uses) and (len(shape) < 3 or math.prod(shape[1:]) < least)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A `scan` or `while` equation, and what of its inputs enters the body in stored form.

    Attributes:
        body: its open jaxpr: constants, carried values, one layer of each array that is scanned over.
        outside: number of inputs of the equation that do not enter the body: those of the condition of a `while`.
        consts: number of constants.
        carried: number of carried values.
        length: number of iterations; 1 where it is not known.
    """

    body: Any
    outside: int
    consts: int
    carried: int
    length: int

    @classmethod
    def of(cls, eqn: Any) -> Loop:
        """The loop of an equation."""
        if eqn.primitive.name == "scan":
            consts, carried = _compat.scan_arity(eqn.params)
            return cls(_compat.open_jaxpr(eqn.params["jaxpr"])[0], 0, consts, carried, eqn.params["length"])
        body, _ = _compat.open_jaxpr(eqn.params["body_jaxpr"])
        consts = eqn.params["body_nconsts"]
        return cls(body, eqn.params["cond_nconsts"], consts, len(body.invars) - consts, 1)

    @property
    def first_xs(self) -> int:
        """Number of the body's first input that is scanned over."""
        return self.consts + self.carried

    @property
    def unchanged(self) -> list[bool]:
        """For each carried value, whether the body returns it as it came."""
        carried = self.body.invars[self.consts : self.first_xs]
        return [out is var for out, var in zip(self.body.outvars, carried, strict=False)]

    def flags(self, replicated: Sequence[bool]) -> list[bool]:
        """For each input of the body, whether it is the same on every device, by the inputs of the equation."""
        return body_flags(self.body, self.consts, self.carried, replicated[self.outside :])

    def uses(self, followed: Sequence[bool], flags: Sequence[bool]) -> list[tuple[LeafUse, ...]]:
        """How the body uses its inputs."""
        return uses_in(self.body, followed, flags)

    def returned(self, followed: Sequence[bool], flags: Sequence[bool]) -> list[list[int]]:
        """For each output, the numbers of the inputs that it stands for, if it is no smaller than half of them.

        A carried value that stays as it is stands for none.
        """
        values = [(_Leaf.of(var),) if wanted else () for var, wanted in zip(self.body.invars, followed, strict=True)]
        number = {id(leaf.uses): i for i, value in enumerate(values) for leaf in value}
        out = _follow(self.body, values, flags, _Place())
        same = [*self.unchanged, *(False for _ in out[self.carried :])]
        parts = [2 * math.prod(var.aval.shape) for var in self.body.outvars]
        return [
            [] if s else [number[id(x.uses)] for x in value if part * x.layers * x.alternatives >= x.size]
            for value, s, part in zip(out, same, parts, strict=True)
        ]

    def stored(self, followed: Sequence[bool], flags: Sequence[bool]) -> list[bool]:
        """Which of the body's inputs that are parameters enter it in stored form.

        Those that are scanned over; and those that stay the same if the body takes one layer at a time of them, or uses
        each in one of several branches, for gathering others in each iteration would multiply the traffic: they are
        gathered once, before the loop.
        """
        constant = [*[True] * self.consts, *self.unchanged, *[False] * (len(followed) - self.first_xs)]
        wanted = [a and b for a, b in zip(followed, constant, strict=True)]
        uses = self.uses(wanted, flags)
        return [
            one and (i >= self.first_xs or (bool(of_input) and all(use.by_layer for use in of_input)))
            for i, (one, of_input) in enumerate(zip(followed, uses, strict=True))
        ]


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A parameter under one name in a jaxpr: the counterpart of `Stored`, or a part of a `Deferred` value.

    Attributes:
        uses: where its uses are recorded.
        dtype: in which it would be gathered.
        layers: in how many parts.
        size: number of elements of the parameter.
        alternatives: see `LeafUse`.
        joined: number of parameters of a stack that it is one of.
        deferred: whether operations wait for its use; they may need its value for a gradient (`nonlinear`).
        all_layers: whether an operation on it does not go layer by layer.
    """

    uses: list[LeafUse]
    dtype: np.dtype
    layers: int = 1
    size: int = 0
    alternatives: int = 1
    joined: int = 1
    deferred: bool = False
    nonlinear: bool = False
    all_layers: bool = False

    @classmethod
    def of(cls, var: Any) -> _Leaf:
        """A parameter on its way into a jaxpr."""
        return cls([], jnp.dtype(var.aval.dtype), size=math.prod(var.aval.shape))


_Value = tuple[_Leaf, ...]  # the parameters that a value stands for; none for an ordinary array


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where in the program: under recomputation, in loops of so many iterations, in a branch."""

    recomputed: bool = False
    iterations: int = 1
    in_branch: bool = False


def _follow(jaxpr: Any, inputs: Sequence[_Value], flags: Sequence[bool], place: _Place) -> list[_Value]:
    """Records the uses of the parameters among the inputs; returns which outputs of the jaxpr still stand for some."""
    env: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    known = Flags(jaxpr, flags)

    def read(atom: Any) -> _Value:
        return () if isinstance(atom, _compat.Literal) else env.get(atom, ())

    for eqn in jaxpr.eqns:
        values, replicated = [read(atom) for atom in eqn.invars], known.step(eqn)
        if any(values):
            kind = kind_of(eqn, replicated)
            env.update(zip(eqn.outvars, _of_equation(eqn, kind, values, replicated, place), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _of_equation(eqn: Any, kind: Kind, values: list[_Value], replicated: list[bool], place: _Place) -> list[_Value]:
    """Records the uses in an equation; returns which of its outputs still stand for parameters."""
    nothing: list[_Value] = [()] * len(eqn.outvars)
    if kind in (Kind.VIEW, Kind.CAST, Kind.SLICE, Kind.SQUEEZE, Kind.STOP):
        return [tuple(_passed(eqn, kind, leaf) for leaf in values[0])]
    by_layer = kind is Kind.DEFER and sums_over_layers(eqn) and not any(x.all_layers for x in values[0])
    if kind is Kind.REWRITE or by_layer:
        return _follow(_compat.open_jaxpr(rewritten(eqn))[0], values, replicated, place)
    if kind is Kind.STACK and all(values) and all(v.aval == eqn.invars[0].aval for v in eqn.invars):
        return [tuple(dataclasses.replace(leaf, joined=len(values)) for value in values for leaf in value)]
    deferrable = kind is Kind.DEFER or (kind is Kind.STACK and all(replicated))
    if deferrable and (joined := _deferred(eqn, values)):
        return [joined]
    if kind is Kind.CALL:
        return _follow(_compat.open_jaxpr(_compat.called_jaxpr(eqn))[0], values, replicated, place)
    if kind in (Kind.SCAN, Kind.WHILE):
        return _of_loop(Loop.of(eqn), values, replicated, place)
    if kind in (Kind.CHECKPOINT, Kind.CUSTOM):
        place = dataclasses.replace(place, recomputed=place.recomputed or kind is Kind.CHECKPOINT)
        _end(_follow(_compat.open_jaxpr(_compat.called_jaxpr(eqn))[0], values, replicated, place), place)
    elif kind is Kind.EFFECT:
        _end(values, place)
    elif kind is Kind.COND:
        place = dataclasses.replace(place, in_branch=not place.recomputed)
        branches = [_compat.open_jaxpr(branch)[0] for branch in eqn.params["branches"]]
        entering = _into_branches(branches, values[1:])
        for branch in branches:
            _end(_follow(branch, entering, replicated[1:], place), place)
    else:
        for leaf in itertools.chain(*values):
            _use(leaf, place, in_backward=eqn.primitive.name not in _LINEAR)
    return nothing


def _into_branches(branches: Sequence[Any], values: Sequence[_Value]) -> list[_Value]:
    """The operands of a condition: what some branches do not read is used in one of several alternatives."""
    read = [{id(v) for eqn in b.eqns for v in eqn.invars} | {id(v) for v in b.outvars} for b in branches]
    entering = []
    for i, value in enumerate(values):
        count = 1 if all(id(b.invars[i]) in of for b, of in zip(branches, read, strict=True)) else len(branches)
        entering.append(tuple(dataclasses.replace(x, alternatives=x.alternatives * count) for x in value))
    return entering


def _passed(eqn: Any, kind: Kind, leaf: _Leaf) -> _Leaf:
    """A parameter after an equation that leaves it in stored form."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if kind is Kind.CAST and not leaf.deferred:
        new = jnp.dtype(eqn.params["new_dtype"])
        narrows = jnp.issubdtype(new, jnp.floating) and new.itemsize < leaf.dtype.itemsize
        return dataclasses.replace(leaf, dtype=new) if narrows else leaf
    if kind is Kind.VIEW:
        by_layer = (leaf.deferred or len(before) > 2) and layer_flags(eqn, before[0]) == [True]
        if not by_layer and not leaf.deferred and moved_dims(eqn):
            return leaf  # can be done on the shards
        return dataclasses.replace(leaf, deferred=leaf.deferred or by_layer, all_layers=leaf.all_layers or not by_layer)
    computed = not all(isinstance(atom, _compat.Literal) for atom in eqn.invars[1:])
    if kind is Kind.SLICE and computed and len(after) == len(before) and not leaf.all_layers:  # of each iteration
        taken = [dim for dim, extent in enumerate(before) if after[dim] != extent]
        if taken == [0] and after[0] == 1:
            return dataclasses.replace(leaf, layers=leaf.layers * before[0])
        if len(taken) == 1 and after[taken[0]] == 1:
            return dataclasses.replace(leaf, alternatives=leaf.alternatives * before[taken[0]])
    return leaf


def _deferred(eqn: Any, values: Sequence[_Value]) -> _Value:
    """The parameters of a value that is computed where it is used; none where it is computed here."""
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    leaves = list(itertools.chain(*values))
    flags = layer_flags(eqn, shape[0]) if shape else None
    at_once, sizes = flags is None, {id(leaf.uses): leaf.size for leaf in leaves}
    goes_by_layer = None if any(leaf.all_layers for leaf in leaves) else flags
    if not defers(eqn, [bool(value) for value in values], list(sizes.values()), goes_by_layer):
        return ()
    linear = name in _LINEAR or (name == "mul" and not all(values)) or (name == "div" and not values[1])
    return tuple(
        dataclasses.replace(
            leaf, deferred=True, all_layers=leaf.all_layers or at_once, nonlinear=leaf.nonlinear or not linear
        ) for leaf in leaves
    )  # fmt: skip


def _of_loop(loop: Loop, values: list[_Value], replicated: list[bool], place: _Place) -> list[_Value]:
    flags, inputs = loop.flags(replicated), values[loop.outside :]
    followed = [bool(value) for value in inputs]
    stored, uses = loop.stored(followed, flags), loop.uses(followed, flags)
    _end(values[: loop.outside], place)
    entered: list[_Value] = []
    for i, (value, enters, used) in enumerate(zip(inputs, stored, uses, strict=True)):
        if not enters or any(leaf.all_layers for leaf in value):
            before = [dataclasses.replace(leaf, dtype=cast_target(used, leaf.dtype)) for leaf in value]
            _end([tuple(before)] if used else [], place)
            value = ()
        elif i >= loop.first_xs:
            value = tuple(
                dataclasses.replace(leaf, layers=leaf.layers * max(loop.length // leaf.joined, 1), joined=1)
                for leaf in value
            )
        entered.append(value)
    inner = dataclasses.replace(place, iterations=place.iterations * loop.length)
    returned = _follow(loop.body, entered, flags, inner)
    carried = entered[loop.consts : loop.first_xs]
    changed = [value for value, same in zip(returned, loop.unchanged, strict=False) if not same]
    _end([*changed, *returned[loop.carried :]], inner)
    return [*carried, *(() for _ in returned[loop.carried :])]


def _use(leaf: _Leaf, place: _Place, *, in_backward: bool) -> None:
    repeats = max(place.iterations // (leaf.layers * leaf.alternatives), 1)
    again, parts = in_backward or leaf.nonlinear or place.recomputed, leaf.alternatives
    leaf.uses.append(LeafUse(leaf.dtype, leaf.layers, again, repeats, parts, place.in_branch))


def _end(values: Sequence[_Value], place: _Place) -> None:
    """Parameters that become ordinary arrays, which are kept for the backward pass."""
    for leaf in itertools.chain(*values):
        _use(leaf, place, in_backward=False)


def _merged(uses: Sequence[LeafUse]) -> tuple[LeafUse, ...]:
    """Uses of the same dtype, layers and repeats as one: within a step they share a gather."""
    found: dict[tuple[Any, int, int, int], list[bool]] = {}
    for use in uses:
        any_of = found.setdefault((use.dtype, use.layers, use.repeats, use.alternatives), [False, False])
        any_of[:] = any_of[0] or use.in_backward, any_of[1] or use.in_branch
    return tuple(
        LeafUse(dtype, layers, again, repeats, alternatives, in_branch)
        for (dtype, layers, repeats, alternatives), (again, in_branch) in found.items()
    )
