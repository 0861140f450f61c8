"""Matrix products inside an optimizer (Muon, GaLore, Shampoo) on full matrices: two collectives, none in an iteration.

Left to the compiler, every product of an orthogonalisation of a sharded matrix moves the matrix again. Here the
update's jaxpr is read, and the value that all of a product's sharded operands are computed from is moved once, before
the norms and iterations that follow it, by sharding constraints; everything before and after stays on the shards, and
no value changes. Two movements, chosen by what they cost for matrices of m x n elements on N devices (received by each
device; 5 Newton-Schulz steps take 20 m^2 n + 10 m^3 operations for each matrix, m <= n):

- a stack of B matrices (a leaf of scanned layers): one all-to-all gives each device full matrices of its own, one
  takes the results back to the shards: 2 ceil(B/N) m n elements, and each matrix is worked on by one device;
- a single matrix: one all-gather, every device computes the same result and keeps its shard: m n elements. An owner
  would have to send the result back (2 m n) while the others wait, so this is never slower.

For a stack the gather would bring B m n elements and repeat all the work N times; from B = 2 on it never moves less.
No optimizer is known by name: products of two matrices and decompositions are recognised. For three stacks and three
single matrices on 2 x 8 H100 (tests/optimizer/test_full_matrices.py) each GPU receives 19 MB per update in 7
collectives; partitioned by the compiler alone, 603 MB in 46 (JAX 0.12.0.1).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax.layout.layout import Layout
from zerojax.layout.mesh import nontrivial_axes, with_auto_mesh

# Decompositions and solves, which need their full operand.
_DECOMPOSITIONS = {
    "cholesky", "eig", "eigh", "geqrf", "hessenberg", "householder_product", "lu", "qr", "schur", "svd",
    "triangular_solve", "tridiagonal", "tridiagonal_solve",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class _Known:
    """A literal or a constant of the jaxpr."""

    value: Any


_Operand = int | _Known
_Spec = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """One equation on numbered values, which increase in the order of the program."""

    eqn: Any
    inputs: tuple[_Operand, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass
class _Movement:
    """How a value is moved, and the steps that work on it after that.

    Attributes:
        extent: of the stack that is dealt out over the devices, or None: each device gets all.
        members: numbers of the steps between the value and the products that are computed from it, products included.
        products: numbers of the results of the products.
    """

    extent: int | None
    members: set[int] = dataclasses.field(default_factory=set)
    products: set[int] = dataclasses.field(default_factory=set)


def with_full_matrices(fn: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """`fn` with the operands of its matrix products moved as full matrices, and no other change.

    Args:
        fn: an update on logical arrays constrained to shards, under `jit`; its matrix products are the optimizer's own.
        layout: the layout of the parameters.

    Returns:
        A function `(specs, *args)`: `specs` has the PartitionSpec of each leaf of the arguments that is split over the
        data axes, None for the others.

    >>> import jax.numpy as jnp, zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> layout = zerojax.partition({"w": jnp.ones((16, 16))}, mesh, zerojax.ZeroConfig(min_shard_size=0))
    >>> gram = with_full_matrices(lambda x: x @ x.T, layout)
    >>> w = layout.shard({"w": jnp.ones((16, 16))})["w"]
    >>> float(jax.jit(lambda x: gram([layout.leaves[0].full_spec], x))(w)[0, 0])
    16.0
    """

    traced_once = jax.jit(fn)

    def moved(specs: Sequence[PartitionSpec | None], *args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(traced_once, return_shape=True)(*args)
        if not any(_multiplies_matrices(eqn) for eqn in _compat.open_jaxpr(closed)[0].eqns):
            return traced_once(*args)  # as it was just traced: not a second time
        leaves = jax.tree.leaves(args)
        steps: list[_Step] = []
        numbers = itertools.count(len(leaves))
        results = _inline(closed, range(len(leaves)), steps, numbers)
        placed: dict[int, _Spec] = {
            n: (*spec, *(None,) * (jax.numpy.ndim(x) - len(spec)))
            for n, (spec, x) in enumerate(zip(specs, leaves, strict=True)) if spec is not None
        }  # fmt: skip
        movements = _plan(steps, placed)
        values = _evaluate(steps, dict(enumerate(leaves)), movements, placed, layout)
        return jax.tree.unflatten(jax.tree.structure(shapes), [_read(values, r) for r in results])

    return moved


def _inline(closed: Any, inputs: Sequence[_Operand], steps: list[_Step], numbers: Iterator[int]) -> list[_Operand]:
    """Appends the equations of a jaxpr, and of the jitted functions in it; returns its results."""
    jaxpr, consts = _compat.open_jaxpr(closed)
    env: dict[Any, _Operand] = dict(zip(jaxpr.constvars, map(_Known, consts), strict=True))
    env |= zip(jaxpr.invars, inputs, strict=True)

    def read(atom: Any) -> _Operand:
        return _Known(atom.val) if isinstance(atom, _compat.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = tuple(map(read, eqn.invars))
        if eqn.primitive.name in _compat.CALLS:
            outputs = _inline(_compat.called_jaxpr(eqn), operands, steps, numbers)
        else:
            outputs = [next(numbers) for _ in eqn.outvars]
            steps.append(_Step(eqn, operands, tuple(outputs)))
        env |= zip(eqn.outvars, outputs, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _plan(steps: list[_Step], placed: dict[int, _Spec]) -> dict[int, _Movement]:
    """The values to be moved.

    `above` has, for each value that depends on a sharded one, the values that every such dependence passes through. A
    product is moved by the last of them that is still computed on shards alone (`placed`), else by its operands.
    """
    if not any(_multiplies_matrices(step.eqn) for step in steps):
        return {}
    above: dict[int, frozenset[int]] = {n: frozenset([n]) for n in placed}
    shapes: dict[int, tuple[int, ...]] = {}
    makers: dict[int, _Step] = {}
    products: dict[int, list[_Step]] = {}
    for step in steps:
        shapes |= {n: v.aval.shape for n, v in zip(step.inputs, step.eqn.invars, strict=True) if isinstance(n, int)}
        makers |= dict.fromkeys(step.outputs, step)
        operands = [n for n in step.inputs if isinstance(n, int) and n in above]
        if not operands:
            continue
        common = frozenset.intersection(*(above[n] for n in operands))
        if _multiplies_matrices(step.eqn):
            through = common & placed.keys()
            for n in [max(through)] if through else operands:
                products.setdefault(n, []).append(step)
        elif all(n in placed for n in operands):
            spec = _spec_of_result(step, {n: placed[n] for n in operands})
            if spec is not None:
                placed[step.outputs[0]] = spec
        above |= {n: common | {n} for n in step.outputs}
    return {n: _movement(n, shapes[n], found, makers, above) for n, found in products.items()}


def _movement(
    moved: int, shape: tuple[int, ...], products: list[_Step], makers: dict[int, _Step], above: dict[int, Any]
) -> _Movement:
    """Walks back from the products to the value that is moved."""
    stack = shape[0] if len(shape) >= 3 else 1
    dealt = stack > 1 and all(_keeps_stack(step.eqn, stack) for step in products)
    out = _Movement(stack if dealt else None, products={n for step in products for n in step.outputs})
    pending = list(products)
    while pending:
        step = pending.pop()
        out.members.update(step.outputs)
        for n in step.inputs:
            if isinstance(n, int) and n != moved and n not in out.members and moved in above.get(n, ()):
                pending.append(makers[n])
    return out


def _evaluate(
    steps: list[_Step],
    values: dict[int, Any],
    movements: dict[int, _Movement],
    placed: dict[int, _Spec],
    layout: Layout,
) -> dict[int, Any]:
    """Runs the steps; those of a movement see the moved value, all others the value on its shards."""
    full: dict[int, Any] = {}
    inside: dict[int, list[int]] = {}
    for moved, movement in movements.items():
        for n in movement.members:
            inside.setdefault(n, []).append(moved)

    def keep(number: int) -> None:
        if number in movements:
            x = values[number]
            if number in placed:  # else the compiler may move what it is computed from, one by one
                x = _constrain(x, PartitionSpec(*placed[number]), layout)
            full[number] = _constrain(x, _full_spec(x, movements[number].extent, layout), layout)

    for number in list(values):
        keep(number)
    for step in steps:
        here = inside.get(step.outputs[0], []) if step.outputs else []
        results = _compat.bind_equation(step.eqn, [full[n] if n in here else _read(values, n) for n in step.inputs])  # type: ignore[index]
        for number, result in zip(step.outputs, results, strict=True):
            for movement in (movements[n] for n in here):
                if number in movement.products and result.ndim >= 2:
                    result = _constrain(result, _full_spec(result, movement.extent, layout), layout)
            values[number] = result
            keep(number)
    return values


def _full_spec(x: Any, extent: int | None, layout: Layout) -> PartitionSpec:
    """Dealt out along the stack, in the order of the shards, or replicated."""
    axes = tuple(reversed(nontrivial_axes(layout.mesh, layout.config.axes)))
    return PartitionSpec(axes) if extent is not None and x.shape[0] == extent else PartitionSpec()


def _constrain(x: Any, spec: PartitionSpec, layout: Layout) -> Any:
    return jax.lax.with_sharding_constraint(x, with_auto_mesh(NamedSharding(layout.mesh, spec)))


def _multiplies_matrices(eqn: Any) -> bool:
    """Whether an equation needs full matrices: a product with free dims on both sides, or a decomposition."""
    return any(inner.primitive.name != "dot_general" or _is_matrix_product(inner) for inner in _heavy_equations(eqn))


def _keeps_stack(eqn: Any, extent: int) -> bool:
    """Whether every product in an equation is of a stack of matrices, each by itself."""
    for inner in _heavy_equations(eqn):
        if any(v.aval.ndim < 3 or v.aval.shape[0] != extent for v in inner.invars if v.aval.ndim >= 2):
            return False
        if inner.primitive.name == "dot_general":
            _, batch = inner.params["dimension_numbers"]
            if any(0 not in dims for dims in batch):
                return False
    return True


def _heavy_equations(eqn: Any) -> Iterator[Any]:
    """Products and decompositions in an equation, in its branches and loops."""
    if eqn.primitive.name == "dot_general" or eqn.primitive.name in _DECOMPOSITIONS:
        yield eqn
        return
    for jaxpr in _compat.sub_jaxprs(eqn):
        for inner in jaxpr.eqns:
            yield from _heavy_equations(inner)


def _is_matrix_product(eqn: Any) -> bool:
    contracted, batch = eqn.params["dimension_numbers"]
    for v, used in zip(eqn.invars, zip(contracted, batch, strict=True), strict=True):
        free = set(range(v.aval.ndim)) - {d for dims in used for d in dims}
        if math.prod(v.aval.shape[d] for d in free) == 1:
            return False
    return True


def _spec_of_result(step: _Step, specs: dict[int, _Spec]) -> _Spec | None:
    """How the result is split if each of its elements is computed from those at its own place; else None."""
    eqn = step.eqn
    if len(step.outputs) != 1 or any(True for _ in _heavy_equations(eqn)):
        return None
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    shapes = {n: v.aval.shape for n, v in zip(step.inputs, eqn.invars, strict=True) if n in specs}
    (first, spec), *others = specs.items()
    if name == "transpose":
        return tuple(spec[d] for d in eqn.params["permutation"])
    if name in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim"):
        long = [d for d, extent in enumerate(shapes[first]) if extent != 1]
        if [extent for extent in shape if extent != 1] != [shapes[first][d] for d in long]:
            return None
        kept = iter([spec[d] for d in long])
        return tuple(None if extent == 1 else next(kept) for extent in shape)
    elementwise = all(s == shape for s in shapes.values()) and not name.startswith(("cum", "sort", "rev"))
    return spec if elementwise and all(spec == other for _, other in others) else None


def _read(values: dict[int, Any], operand: _Operand) -> Any:
    return operand.value if isinstance(operand, _Known) else values[operand]
