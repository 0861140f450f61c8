"""What is done with an equation that takes a parameter, and where a loss uses each one: one table for both.

`PRIMITIVES` names, for each primitive, how the evaluator treats a stored parameter. What it does not name gathers the
parameter and is applied, which is always correct. `leaf_uses` follows parameters through a traced loss by the same
table, with nothing compiled, and tells what a placement cannot know about traffic: a float32 parameter that is cast to
bfloat16 travels in 2 bytes, a stack that is scanned over moves one layer at a time, and the table of an embedding
lookup is not read again by the backward pass. Knows nothing of meshes or placements.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax import _compat
from zerojax.gather.replicated import Flags, body_flags


class Kind(enum.Enum):
    """How an equation that takes a stored parameter is run."""

    VIEW = "rearranges, repeats or copies one operand: applied after the gather"
    CAST = "a narrowing is done on the shards, any other after the gather"
    SLICE = "taken from the shards, where its place is the same on every device"
    SQUEEZE = "a leading dim of one layer is dropped on the shards"
    STOP = "the parameter goes on without a gradient"
    CALL = "its jaxpr is run in place of the equation"
    CHECKPOINT = "entered; rebuilt around the body in stored form"
    SCAN = "entered; one layer is gathered in each iteration"
    WHILE = "entered; every device runs as many iterations"
    COND = "entered, where every device takes the same branch"
    CUSTOM = "entered; the user's rule is run in stored form"
    GATHER = "gathers the parameter and is applied"


PRIMITIVES: dict[str, Kind] = {
    **dict.fromkeys(("transpose", "reshape", "expand_dims", "broadcast_in_dim", "rev", "copy", "copy_p",
                     "sharding_constraint", "reshard", "mesh_cast", "layout_constraint"), Kind.VIEW),
    "convert_element_type": Kind.CAST,
    **dict.fromkeys(("slice", "dynamic_slice"), Kind.SLICE),
    "squeeze": Kind.SQUEEZE,
    "stop_gradient": Kind.STOP,
    **dict.fromkeys(_compat.CALLS, Kind.CALL),
    **dict.fromkeys(("remat2", "checkpoint", "remat"), Kind.CHECKPOINT),
    "scan": Kind.SCAN,
    "while": Kind.WHILE,
    "cond": Kind.COND,
    **dict.fromkeys(("custom_vjp_call", "custom_vjp_call_jaxpr", "custom_jvp_call"), Kind.CUSTOM),
}  # fmt: skip

# Linear in the parameter with coefficients that do not depend on it: its value is not needed for any gradient.
_LINEAR = frozenset({"gather", "add", "add_any", "sub", "neg", "concatenate", "pad", "reduce_sum", "select_n", "psum"})


def kind_of(eqn: Any, replicated: Sequence[bool]) -> Kind:
    """How an equation is run that takes a stored parameter.

    Args:
        eqn: the equation.
        replicated: for each of its inputs, whether its value is the same on every device.
    """
    kind = PRIMITIVES.get(eqn.primitive.name, Kind.GATHER)
    if kind is Kind.VIEW and len(eqn.invars) > 1:  # a shape given by an operand
        return Kind.GATHER
    if kind is Kind.SLICE and not all(replicated[1:]):
        # Each device would send the others a part that they did not ask for.
        return Kind.GATHER
    if kind is Kind.COND and not replicated[0]:
        return Kind.GATHER  # devices in another branch would not take part in the collectives of this one
    if kind is Kind.WHILE and _has_effects(eqn):
        return Kind.GATHER
    if kind is Kind.CUSTOM and eqn.params.get("symbolic_zeros"):
        return Kind.GATHER
    if kind is Kind.CHECKPOINT and eqn.params["differentiated"]:
        return Kind.GATHER
    return kind


def _has_effects(eqn: Any) -> bool:
    return bool(getattr(eqn, "effects", ()))


@dataclasses.dataclass(frozen=True)
class LeafUse:
    """One way in which a parameter is used.

    Attributes:
        dtype: in which it enters the computation.
        layers: in how many parts along dim 0 it is gathered: the length of the loop that takes it apart, else 1.
        in_backward: whether the backward pass needs its value: an operation that is not linear in it, or recomputation.
        repeats: how often all of it is gathered: the length of a loop around that loop.
    """

    dtype: np.dtype
    layers: int = 1
    in_backward: bool = True
    repeats: int = 1


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
    leaves = [_Leaf.of(var) if wanted else None for var, wanted in zip(inner.invars, followed, strict=True)]
    _end(_follow(inner, leaves, replicated, _Place()), _Place())
    return [() if leaf is None else _merged(leaf.uses) for leaf in leaves]


def uses_inside(eqn: Any, followed: Sequence[bool], replicated: Sequence[bool]) -> list[tuple[LeafUse, ...]]:
    """The uses, in what an equation holds, of some of its inputs, as if it were entered."""
    leaves = [_Leaf.of(var) if wanted else None for var, wanted in zip(eqn.invars, followed, strict=True)]
    kind = PRIMITIVES.get(eqn.primitive.name, Kind.GATHER)
    _end(_of_equation(eqn, kind, leaves, list(replicated), _Place()), _Place())
    return [() if leaf is None else _merged(leaf.uses) for leaf in leaves]


def holds_loop(jaxpr: Any) -> bool:
    """Whether there is a loop in a jaxpr, at any depth."""
    return any(
        PRIMITIVES.get(eqn.primitive.name) in (Kind.SCAN, Kind.WHILE) or any(map(holds_loop, _compat.sub_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


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

    def stored(self, followed: Sequence[bool], flags: Sequence[bool]) -> list[bool]:
        """Which of the body's inputs that are parameters enter it in stored form.

        Those that are scanned over; and those that stay the same if the body takes one layer at a time of them, for
        gathering others in each iteration would multiply the traffic: they are gathered once, before the loop.
        """
        constant = [*[True] * self.consts, *self.unchanged, *[False] * (len(followed) - self.first_xs)]
        wanted = [a and b for a, b in zip(followed, constant, strict=True)]
        uses = self.uses(wanted, flags)
        return [
            one and (i >= self.first_xs or is_layered(of_input))
            for i, (one, of_input) in enumerate(zip(followed, uses, strict=True))
        ]


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A parameter under one name in a jaxpr: the counterpart of `Stored`."""

    uses: list[LeafUse]
    dtype: np.dtype
    shape: tuple[int, ...]
    layers: int = 1

    @classmethod
    def of(cls, var: Any) -> _Leaf:
        """A parameter on its way into a jaxpr."""
        return cls([], jnp.dtype(var.aval.dtype), tuple(var.aval.shape))


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where in the program: under recomputation, and in loops of so many iterations."""

    recomputed: bool = False
    iterations: int = 1


def _follow(jaxpr: Any, inputs: Sequence[_Leaf | None], flags: Sequence[bool], place: _Place) -> list[_Leaf | None]:
    """Records the uses of the leaves among the inputs; returns which outputs of the jaxpr are still such leaves."""
    env: dict[Any, _Leaf | None] = dict(zip(jaxpr.invars, inputs, strict=True))
    known = Flags(jaxpr, flags)

    def leaf_of(atom: Any) -> _Leaf | None:
        return None if isinstance(atom, _compat.Literal) else env.get(atom)

    for eqn in jaxpr.eqns:
        leaves, replicated = [leaf_of(atom) for atom in eqn.invars], known.step(eqn)
        if any(leaf is not None for leaf in leaves):
            kind = kind_of(eqn, replicated)
            env.update(zip(eqn.outvars, _of_equation(eqn, kind, leaves, replicated, place), strict=True))
    return [leaf_of(atom) for atom in jaxpr.outvars]


def _of_equation(
    eqn: Any, kind: Kind, leaves: list[_Leaf | None], replicated: list[bool], place: _Place
) -> list[_Leaf | None]:
    """Records the uses in an equation; returns which of its outputs are still leaves."""
    nothing: list[_Leaf | None] = [None] * len(eqn.outvars)
    leaf = leaves[0]
    if kind in (Kind.VIEW, Kind.CAST, Kind.SLICE, Kind.SQUEEZE, Kind.STOP):
        return nothing if leaf is None else [_passed(eqn, kind, leaf)]
    if kind is Kind.CALL:
        return _follow(_compat.open_jaxpr(_compat.called_jaxpr(eqn))[0], leaves, replicated, place)
    if kind in (Kind.CHECKPOINT, Kind.CUSTOM):
        place = dataclasses.replace(place, recomputed=place.recomputed or kind is Kind.CHECKPOINT)
        _end(_follow(_compat.open_jaxpr(_compat.called_jaxpr(eqn))[0], leaves, replicated, place), place)
    elif kind is Kind.COND:
        for branch in eqn.params["branches"]:
            _end(_follow(_compat.open_jaxpr(branch)[0], leaves[1:], replicated[1:], place), place)
    elif kind in (Kind.SCAN, Kind.WHILE):
        return _of_loop(Loop.of(eqn), leaves, replicated, place)
    else:
        for each in leaves:
            _use(each, place, in_backward=eqn.primitive.name not in _LINEAR)
    return nothing


def _passed(eqn: Any, kind: Kind, leaf: _Leaf) -> _Leaf:
    """A parameter after an equation that leaves it in stored form."""
    shape, layers, dtype = tuple(eqn.outvars[0].aval.shape), leaf.layers, leaf.dtype
    if kind is Kind.CAST:
        new = jnp.dtype(eqn.params["new_dtype"])
        dtype = new if jnp.issubdtype(new, jnp.floating) and new.itemsize < dtype.itemsize else dtype
    elif kind is Kind.SLICE and shape[1:] == leaf.shape[1:] and shape[0] == 1:
        if not all(isinstance(atom, _compat.Literal) for atom in eqn.invars[1:]):  # another one in each iteration
            layers *= leaf.shape[0]
    return dataclasses.replace(leaf, shape=shape, layers=layers, dtype=dtype)


def _of_loop(loop: Loop, leaves: list[_Leaf | None], replicated: list[bool], place: _Place) -> list[_Leaf | None]:
    flags, inputs = loop.flags(replicated), leaves[loop.outside :]
    stored = loop.stored([leaf is not None for leaf in inputs], flags)
    _end(leaves[: loop.outside], place)
    uses = loop.uses([leaf is not None for leaf in inputs], flags)
    for leaf, enters, used in zip(inputs, stored, uses, strict=True):
        if leaf is not None and not enters and used:
            _end([dataclasses.replace(leaf, dtype=cast_target(used, leaf.dtype))], place)
    entered = [leaf if enters else None for leaf, enters in zip(inputs, stored, strict=True)]
    for i, leaf in enumerate(entered[loop.first_xs :], loop.first_xs):
        if leaf is not None:
            entered[i] = dataclasses.replace(leaf, shape=leaf.shape[1:], layers=leaf.layers * loop.length)
    inner = dataclasses.replace(place, iterations=place.iterations * loop.length)
    returned = _follow(loop.body, entered, flags, inner)
    changed = [leaf for leaf, same in zip(returned, loop.unchanged, strict=False) if not same]
    _end([*changed, *returned[loop.carried :]], inner)
    carried = entered[loop.consts : loop.first_xs]
    return [*carried, *(None for _ in returned[loop.carried :])]


def _use(leaf: _Leaf | None, place: _Place, *, in_backward: bool) -> None:
    if leaf is not None:
        repeats = max(place.iterations // leaf.layers, 1)
        leaf.uses.append(LeafUse(leaf.dtype, leaf.layers, in_backward or place.recomputed, repeats))


def _end(leaves: Sequence[_Leaf | None], place: _Place) -> None:
    """Parameters that become ordinary arrays, which are kept for the backward pass."""
    for leaf in leaves:
        _use(leaf, place, in_backward=False)


def _merged(uses: Sequence[LeafUse]) -> tuple[LeafUse, ...]:
    """Uses of the same dtype, layers and repeats as one: within a step they share a gather."""
    found: dict[tuple[Any, int, int], bool] = {}
    for use in uses:
        key = use.dtype, use.layers, use.repeats
        found[key] = found.get(key, False) or use.in_backward
    return tuple(LeafUse(dtype, layers, again, repeats) for (dtype, layers, repeats), again in found.items())


def traced_flops(jaxpr: Any) -> int:
    """FLOP of forward and backward in matrix products, from a traced loss: 3 of each, 4 where it is recomputed.

    An estimate for when nothing is compiled: the backward pass of a product is two of its size.

    >>> import jax
    >>> traced_flops(jax.make_jaxpr(lambda w, x: jnp.sum(x @ w))(jnp.ones((8, 8)), jnp.ones((2, 8))))
    768
    """
    return _flops(_compat.open_jaxpr(jaxpr)[0], 3)


def _flops(jaxpr: Any, factor: int) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            inner = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
            total += factor * 2 * inner * math.prod(eqn.outvars[0].aval.shape)
            continue
        again = factor + 1 if PRIMITIVES.get(name) is Kind.CHECKPOINT else factor
        times = eqn.params["length"] if name == "scan" else 1
        total += sum(times * _flops(body, again) for body in _compat.sub_jaxprs(eqn))
    return total
