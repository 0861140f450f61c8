"""Which stacked parameters of a loop are gathered one layer ahead of their use, and the loop with them.

The layer sees them as parameters that are there in full already: nothing of it knows that they came early. Those that
fit into the window come ahead, in the order of their first use; the others are gathered where they are used, as without
this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import _compat
from zerojax.gather.ahead import Ahead, LoopAhead
from zerojax.gather.deferred import is_held, plain
from zerojax.gather.equation import Equation, disassemble
from zerojax.gather.primitives import PRIMITIVES, Kind
from zerojax.gather.stored import Scope, Stored
from zerojax.gather.traced_layer import Operands
from zerojax.gather.uses import LeafUse, Loop, cast_target

Join = Callable[[Iterator[Any], Sequence[Any]], list[Any]]


def gathered_ahead(e: Equation, loop: Loop, inputs: Sequence[Any], flags: Sequence[bool]) -> list[Ahead | None]:
    """For each stack that the loop scans over, how it travels ahead; None for what does not.

    Args:
        e: the loop's equation.
        loop: the loop.
        inputs: what enters the body.
        flags: which of them are the same on every device.
    """
    window, xs = e.scope.window, inputs[loop.first_xs :]
    stacks = [(i, x) for i, x in enumerate(xs) for _ in range(_stacks_in(x))]
    results = [v.aval for v in e.eqn.outvars[loop.carried :]]
    # An effect must happen once for each layer, as it stands.
    plain = not _compat.holds_effect(loop.body) and all(map(_can_be_put, results))
    if window is None or e.scope.forward_only or loop.length < 2 or not plain:
        return [None] * len(stacks)
    uses = loop.uses([is_held(x) for x in inputs], flags)[loop.first_xs :]
    found = {i: _ahead(x, uses[i], e.scope) for i, x in stacks if isinstance(x, Stored)}
    kept, in_all = set[int](), 0
    for i in _first_uses(loop.body, loop.first_xs):
        one = found.get(i)
        if one is not None and in_all + one.placement.full_bytes <= window:
            in_all += one.placement.full_bytes
            kept.add(i)
    return [found[i] if i in kept else None for i, _ in stacks]


def scan_with_ahead(
    e: Equation, loop: Loop, ahead: Sequence[Ahead | None], consts: Sequence[Any], carry: Sequence[Any],
    fixed: Sequence[Any], layered: Sequence[Any], join: Join, first: Sequence[Any], flags: Sequence[bool],
) -> tuple[list[Any], list[Any]]:  # fmt: skip
    """Runs a loop whose stacks travel ahead.

    Args:
        e: the loop's equation.
        loop: the loop.
        ahead: from `gathered_ahead`.
        consts: constants of the body.
        carry: what is carried in; parameters among it stay as they are.
        fixed: what else is the same for all layers.
        layered: the stacks.
        join: makes the body's last inputs from `fixed` and one layer of each stack.
        first: what is carried in and changes.
        flags: which inputs of the body are the same on every device.

    Returns:
        (what is carried out and changed, results of all layers).
    """
    params, body, evaluate, nested = e.eqn.params, e.eqn.params["jaxpr"], e.evaluate, e.scope.nested
    moving, carried = [not is_held(x) for x in carry], loop.carried
    flat, rebuild = disassemble([*consts, *(x for x in carry if is_held(x)), *fixed])
    others, rebuild_layer = disassemble([x for x, a in zip(layered, ahead, strict=True) if a is None], layer=True)
    stacks, views = [], []
    for x, a in zip(layered, ahead, strict=True):
        if a is not None:
            stacks.append((x.shard, None if x.grad_input is x.shard else x.grad_input, x.feedback))
            views.append(x.view)
    early, travels, num_consts = [a is not None for a in ahead], [a for a in ahead if a is not None], len(consts)

    def layer(flat: Any, now: Any, sliced: Any, fulls: Any, holders: Any) -> tuple[list[Any], list[Any]]:
        inner = nested()
        of_all, changing = iter(rebuild(flat, inner)), iter(now)
        args = [*(next(of_all) for _ in range(num_consts)), *(next(changing) if m else next(of_all) for m in moving)]
        arrived = iter([_arrived(*one, inner) for one in zip(travels, views, fulls, holders, strict=True)])
        own = iter(rebuild_layer(sliced, inner))
        layers = [next(arrived) if is_early else next(own) for is_early in early]
        out = evaluate(body, [*args, *join(of_all, layers)], inner, flags)
        return [plain(x) for x, m in zip(out, moving, strict=False) if m], [plain(x) for x in out[carried:]]

    fixed_count, opened = len(fixed), loop.body
    plain_xs = len(layered) == len(loop.body.invars) - loop.first_xs

    def spread(wanted: Operands) -> list[bool]:
        of_all, changing, of_xs, of_stacks = map(iter, wanted)
        inputs = [*(_any(next(of_all)) for _ in range(num_consts)),
                  *(next(changing) if m else _any(next(of_all)) for m in moving)]  # fmt: skip
        per_stack = [_any(next(of_stacks)) if is_early else _any(next(of_xs)) for is_early in early]
        rest = [*per_stack, *(_any(x) for x in of_all)]
        count = len(opened.invars) - len(inputs)  # values that are computed from several stacks: any of them may be
        inputs += per_stack if plain_xs and not fixed_count else [any(rest)] * count
        reached = _differentiated(opened, inputs, num_consts, len(moving))
        return [r for r, m in zip(reached, moving, strict=True) if m]

    loop_ahead = LoopAhead(
        layer, travels, [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in e.eqn.outvars[carried:]],
        params["length"], params["reverse"], int(params["unroll"]), spread,
    )  # fmt: skip
    return loop_ahead.run(Operands(flat, list(first), others, stacks))


def _ahead(x: Stored, uses: Sequence[LeafUse], scope: Scope) -> Ahead | None:
    """How a stack travels ahead, or None where its uses would gather it in more than one way."""
    if not x.placement.is_sharded or not uses or any(use.by_layer or use.in_branch for use in uses):
        return None
    target, placement = cast_target(uses, x.aval.dtype), x.placement.without_leading_dim()
    if len({use.dtype for use in uses}) > 1:
        return None
    casts = not (x.view or x.is_secondary or placement.dtype != x.aval.dtype)
    if casts and target != x.aval.dtype:
        placement = placement.with_dtype(target)
    grad_dtype = None if x.grad_input is None else x.grad_input.dtype
    return Ahead(
        scope.collectives, placement, x.is_secondary, grad_dtype, any(use.in_backward for use in uses), scope.fed_back
    )


def _arrived(a: Ahead, view: Sequence[Any], full: jax.Array, holder: Any, scope: Scope) -> Stored:
    """One layer of a parameter that is there in full already."""
    return scope.enter(full, holder, a.placement.replicated()).under(view)


def _stacks_in(x: Any) -> int:
    """How many stacks a value that is scanned over stands for."""
    return sum(x.stacked) if hasattr(x, "stacked") else 1


def _can_be_put(aval: Any) -> bool:
    """Whether results of such a kind can be written into an array of zeros, layer by layer."""
    extended = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return not extended and not jax.sharding.get_abstract_mesh().explicit_axes


def _first_uses(jaxpr: Any, begin: int) -> list[int]:
    """Numbers of the inputs from `begin` on, in the order in which the jaxpr uses them."""
    found: dict[int, None] = {}

    def follow(inner: Any, numbers: dict[Any, int]) -> None:
        for eqn in inner.eqns:
            entered = PRIMITIVES.get(eqn.primitive.name) in (Kind.CALL, Kind.CHECKPOINT)
            known = [None if isinstance(v, _compat.Literal) else numbers.get(v) for v in eqn.invars]
            if entered:
                called = _compat.open_jaxpr(_compat.called_jaxpr(eqn))[0]
                follow(called, {v: n for v, n in zip(called.invars, known, strict=True) if n is not None})
            elif len(eqn.invars) == 1 and known[0] is not None:
                numbers.update(dict.fromkeys(eqn.outvars, known[0]))  # a view or a cast is no use yet
            else:
                found.update(dict.fromkeys(n for n in known if n is not None))

    follow(jaxpr, {v: i - begin for i, v in enumerate(jaxpr.invars) if i >= begin})
    rest = range(len(jaxpr.invars) - begin)
    return [*found, *(i for i in rest if i not in found)]


def _differentiated(jaxpr: Any, inputs: Sequence[bool], consts: int, carried: int) -> list[bool]:
    """For each carried value of a loop's body, whether it is differentiated in some iteration.

    Args:
        jaxpr: the body: constants, carried values, the rest; returns the carried values first.
        inputs: for each of its inputs, whether it is differentiated in the first iteration.
        consts: number of constants.
        carried: number of carried values.
    """
    flags = list(inputs)
    while True:
        reached = {v for v, f in zip(jaxpr.invars, flags, strict=True) if f}
        for eqn in jaxpr.eqns:
            if PRIMITIVES.get(eqn.primitive.name) is Kind.STOP:
                continue
            if any(not isinstance(v, _compat.Literal) and v in reached for v in eqn.invars):
                reached.update(v for v in eqn.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact))
        after = [not isinstance(v, _compat.Literal) and v in reached for v in jaxpr.outvars[:carried]]
        now = flags[consts : consts + carried]
        new = [a or b for a, b in zip(now, after, strict=True)]
        if new == now:
            return new
        flags[consts : consts + carried] = new


def _any(tree: Any) -> bool:
    return any(jax.tree.leaves(tree))
