"""One layer of a loop with its pullback, traced once, and where its residuals are found again.

A residual is kept for each layer only if it depends on what differs between layers: what the layer is given anyway is
read from there, what is the same for all layers is computed once, and what depends on the weights alone is computed
again from the weights gathered for the backward pass. So no full weight, nor a copy of one, waits for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax import _compat
from zerojax.gather.cotangents import fill, is_inexact, take
from zerojax.layout.placement import Placement

Tree = Any
Arrays = list[Any]


class Operands(NamedTuple):
    """What a loop runs on.

    Attributes:
        consts: what every layer sees.
        first: what is carried into the first.
        xs: arrays of all layers, of which each sees its own.
        stacks: (what is held, the gradient's input, the feedback or None) of each parameter gathered ahead; where what
            is held is the gradient's input too, and where there is none, it is None.
    """

    consts: Arrays
    first: Arrays
    xs: Arrays
    stacks: list[tuple[Any, Any, Any]]


# (consts, carried, own part of xs, full weights, what their gradients are cotangents of) -> (carried, results)
Layer = Callable[[Arrays, Arrays, Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]


class _Source(NamedTuple):
    """Where a residual of a layer is found in the backward pass."""

    kind: str  # "kept", "once", "xs", "full"
    index: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class TracedLayer:
    """A layer with its pullback, traced once; no array of the trace is in it.

    Attributes:
        jaxpr: inputs as `groups` counts them, outputs the layer's own and then the residuals.
        groups: numbers of leaves of consts, carried values, xs and full weights.
        structure: of the pullback.
        sources: where each residual is found.
        own: number of outputs of the layer itself.
        carried: of these, the carried values.
        inexact: which of them are differentiable.
        wanted: which operands are differentiated.
    """

    jaxpr: Any
    groups: tuple[int, ...]
    structure: Any
    sources: tuple[_Source, ...]
    own: int
    carried: int
    inexact: tuple[bool, ...]
    wanted: Operands
    by_kind: dict[str, list[Any]]

    def _bound(self, *groups: Any) -> dict[Any, Any]:
        """The inputs of the jaxpr, for groups of operands in order; None: not given."""
        inner, consts = _compat.open_jaxpr(self.jaxpr)
        env = dict(zip(inner.constvars, consts, strict=True))
        begin = 0
        for group, count in zip(groups, self.groups, strict=True):
            if group is not None:
                env.update(zip(inner.invars[begin : begin + count], jax.tree.leaves(group), strict=True))
            begin += count
        return env

    def constants(self, consts: Arrays) -> Arrays:
        """Residuals that are the same for all layers."""
        return _evaluated(self.jaxpr, self._bound(consts, None, None, None), self.by_kind["once"])

    def step(self, consts: Arrays, carried: Arrays, xs: Arrays, fulls: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """The layer: (carried, results, residuals of this layer)."""
        inner, _ = _compat.open_jaxpr(self.jaxpr)
        wanted = [*inner.outvars[: self.own], *self.by_kind["kept"]]
        out = _evaluated(self.jaxpr, self._bound(consts, carried, xs, fulls), wanted)
        return out[: self.carried], out[self.carried : self.own], out[self.own :]

    def pull(
        self, kept: Arrays, once: Arrays, consts: Arrays, xs: Arrays, fulls: Arrays, of_carried: Arrays,
        of_results: Arrays,
    ) -> tuple[Arrays, Arrays, Arrays, Arrays]:  # fmt: skip
        """Cotangents of the differentiated leaves of consts, carried values and xs, and of the full weights."""
        again = _evaluated(self.jaxpr, self._bound(consts, None, None, fulls), self.by_kind["full"])
        found = {"kept": kept, "once": once, "xs": jax.tree.leaves(xs), "full": again}
        leaves = [found[source.kind][source.index] for source in self.sources]
        cotangents = [c for c, i in zip([*of_carried, *of_results], self.inexact, strict=True) if i]
        return self.structure.unflatten(leaves)(cotangents)


def traced_layer(
    layer: Layer, placements: Sequence[Placement], wanted: Operands, examples: Sequence[Any]
) -> TracedLayer:
    """Traces a layer and its pullback.

    Args:
        layer: the layer.
        placements: of the weights that it is given in full.
        wanted: which operands are differentiated.
        examples: of consts, carried values, xs and full weights.
    """
    noted: list[Any] = []
    trained = trained_of(wanted)

    def traced(consts: Arrays, carried: Arrays, xs: Arrays, fulls: Arrays) -> tuple[Arrays, Arrays]:
        def of_wanted(d_consts: Arrays, d_carried: Arrays, d_xs: Arrays, d_fulls: Arrays) -> tuple[Arrays, Arrays]:
            out, ys = layer(
                leaves_replaced(consts, wanted.consts, d_consts), fill(carried, wanted.first, d_carried),
                leaves_replaced(xs, wanted.xs, d_xs), fulls, fill([None] * len(fulls), trained, d_fulls),
            )  # fmt: skip
            own = [*out, *ys]
            inexact = tuple(map(is_inexact, own))
            noted[:] = [inexact, len(out)]
            return take(own, inexact), take(own, [not i for i in inexact])

        holders = [jnp.zeros(p.shape, p.dtype) for p in take(placements, trained)]
        out, pullback, others = jax.vjp(
            of_wanted, leaves_where(consts, wanted.consts), take(carried, wanted.first),
            leaves_where(xs, wanted.xs), holders, has_aux=True,
        )  # fmt: skip
        leaves, structure = jax.tree.flatten(pullback)
        noted.append(structure)
        real, rest = iter(out), iter(others)
        return [next(real) if i else next(rest) for i in noted[0]], leaves

    jaxpr = jax.make_jaxpr(traced)(*examples)
    inexact, carried, structure = noted
    groups = tuple(len(jax.tree.leaves(part)) for part in examples)
    sources, by_kind = _sources(jaxpr, groups, len(inexact))
    return TracedLayer(jaxpr, groups, structure, sources, len(inexact), carried, inexact, wanted, by_kind)


def _sources(jaxpr: Any, groups: Sequence[int], own: int) -> tuple[tuple[_Source, ...], dict[str, list[Any]]]:
    """Where each residual is found: kept for each layer only if it depends on what differs between layers."""
    inner, _ = _compat.open_jaxpr(jaxpr)
    consts, carried, xs, _ = groups
    kinds: dict[Any, str] = {}
    for i, var in enumerate(inner.invars):
        kinds[var] = "once" if i < consts else "kept" if i < consts + carried + xs else "full"
    for eqn in inner.eqns:
        inputs = {kinds.get(v, "once") for v in eqn.invars if not isinstance(v, _compat.Literal)}
        kind = "kept" if "kept" in inputs else "full" if "full" in inputs else "once"
        kinds.update(dict.fromkeys(eqn.outvars, kind))
    own_xs = {var: i for i, var in enumerate(inner.invars[consts + carried : consts + carried + xs])}
    by_kind: dict[str, list[Any]] = {"kept": [], "once": [], "full": []}
    sources = []
    for atom in inner.outvars[own:]:
        literal = isinstance(atom, _compat.Literal)
        if not literal and atom in own_xs:
            sources.append(_Source("xs", own_xs[atom]))
            continue
        kind = "once" if literal else kinds.get(atom, "once")
        known = [i for i, other in enumerate(by_kind[kind]) if other is atom]
        if not known:
            by_kind[kind].append(atom)
        sources.append(_Source(kind, known[0] if known else len(by_kind[kind]) - 1))
    return tuple(sources), by_kind


def _evaluated(jaxpr: Any, env: dict[Any, Any], wanted: Sequence[Any]) -> Arrays:
    """Some values of a jaxpr, by the equations that they need."""
    inner, _ = _compat.open_jaxpr(jaxpr)
    needed = {v for v in wanted if not isinstance(v, _compat.Literal)}
    run = []
    for eqn in reversed(inner.eqns):
        if needed.intersection(eqn.outvars):
            run.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, _compat.Literal))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _compat.Literal) else env[atom]

    for eqn in reversed(run):
        env.update(zip(eqn.outvars, _compat.bind_equation(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [jnp.asarray(read(v)) if isinstance(v, _compat.Literal) else read(v) for v in wanted]


def leaves_where(tree: Tree, mask: Tree) -> list[Any]:
    """The leaves of a tree that a mask marks."""
    return take(jax.tree.leaves(tree), jax.tree.leaves(mask))


def leaves_replaced(tree: Tree, mask: Tree, new: Sequence[Any]) -> Tree:
    """The tree, with new leaves where a mask marks them."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(fill(leaves, jax.tree.leaves(mask), new))


def leaves_filled(tree: Tree, mask: Tree, new: Sequence[Any]) -> list[Any]:
    """For each leaf of a tree, a new value where a mask marks it, else None."""
    return fill([None] * len(jax.tree.leaves(tree)), jax.tree.leaves(mask), new)


def trained_of(wanted: Operands) -> list[bool]:
    """Which stacks are differentiated: by the gradient's input, which often is what is held."""
    return [any(jax.tree.leaves(shard if grad_input is None else grad_input)) for shard, grad_input, _ in wanted.stacks]
