"""A scheduled program as the steps a device goes through: kernels, collectives issued and awaited, loops, branches.

A step says what a kernel computes and touches, not how long that takes. Bytes are those a kernel really moves to and
from device memory: a fusion that slices an operand reads the slice, one that updates a buffer in place writes the
update. Matrix products keep their extents, since small ones run slower.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from zerojax.hlo.collective import Collective, describe_collective
from zerojax.hlo.schedule import (
    BRANCHES,
    NO_KERNEL,
    Loop,
    Visit,
    collective_kind,
    multiplies,
    multiplying_computations,
    trip_count,
)
from zerojax.hlo.text import ArrayShape, Computation, Instruction, Module

_CONTRACTING = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_BATCH = re.compile(r'lhs_batch_dim(?:s=\{|ensions":\[)([\d,"]*)')
_KERNEL_LABELS = re.compile(r"dim_labels=\w+?_(\w+)->")
_ALLOCATES = 'custom_call_target="AllocateBuffer"'  # writes nothing
_VIEWS = ("bitcast", "reshape")
_SLICES = ("slice", "dynamic-slice")


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product of (m, k) with (k, n), `batch` times; `dtype` is HLO's name of the left operand's element."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str

    @property
    def flops(self) -> int:
        """Two for each multiply-add."""
        return 2 * self.batch * self.m * self.n * self.k

    def __str__(self) -> str:
        return f"{f'{self.batch} x ' if self.batch > 1 else ''}({self.m}, {self.k}) @ ({self.k}, {self.n})"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch on the device.

    Attributes:
        name: the instruction's name.
        op_name: JAX's name stack.
        products: matrix products in it.
        num_bytes: bytes read from and written to device memory.
        asynchronous: whether the program goes on beside it until it is awaited (started copies and slices).
        host_bytes: bytes that pass between the device and host memory, which are not among `num_bytes`.
    """

    name: str
    op_name: str
    products: tuple[Product, ...]
    num_bytes: int
    asynchronous: bool = False
    host_bytes: int = 0

    @property
    def flops(self) -> int:
        """FLOP of its matrix products."""
        return sum(product.flops for product in self.products)


@dataclasses.dataclass(frozen=True)
class Issue:
    """A collective is issued; `start` is what an `Await` names, "" where everything waits for it."""

    collective: Collective
    start: str


@dataclasses.dataclass(frozen=True)
class Await:
    """The program waits for the collectives or the kernel started under a name."""

    start: str


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A loop: `count` times its body, once where the count is not known."""

    name: str
    op_name: str
    count: int
    body: tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """Branches, of which one runs."""

    name: str
    branches: tuple[tuple[Step, ...], ...]


Step: TypeAlias = Kernel | Issue | Await | Repeat | Choice


def program_steps(
    module: Module, mesh: tuple[tuple[str, int], ...] = (), node_axes: tuple[str, ...] = ()
) -> tuple[Step, ...]:
    """The steps of a program in the order of its schedule.

    Args:
        module: the program.
        mesh: axis names and sizes, outermost first; empty when not known.
        node_axes: the axes along which the node changes.
    """
    multiplying = multiplying_computations(module)

    def enter(visits: Iterator[Visit]) -> tuple[Step, ...]:
        return tuple(step for visit in visits for step in steps_of(visit))

    def steps_of(visit: Visit) -> Iterator[Step]:
        line, computation = visit.instruction, visit.computation
        if line.opcode in NO_KERNEL or _ALLOCATES in line.attributes:
            return
        called = {
            key: [module.computations[name] for name in names if name in module.computations]
            for key, names in line.called().items()
        }
        if line.opcode == "while":
            loop = Loop(line.name, trip_count(module, computation, line), line.op_name)
            body = tuple(step for one in called.get("body", ()) for step in enter(visit.enter(one, loop=loop)))
            yield Repeat(line.name, line.op_name, loop.trip_count or 1, body)
        elif line.opcode == "conditional":
            branches = [one for key, found in called.items() if key in BRANCHES for one in found]
            yield Choice(line.name, tuple(enter(visit.enter(one, branch=True)) for one in branches))
        elif collective_kind(line) is not None:
            one = describe_collective(visit, mesh, node_axes, module.num_devices, multiplying)
            if one.group_size > 1:  # The others send nothing.
                yield Issue(one, line.name if one.asynchronous else "")
        elif line.opcode.endswith("-update"):
            return
        elif line.opcode.endswith("-done"):
            yield Await(_start_of(computation, line))
        elif line.opcode in ("call", "async-start"):
            inside = [step for found in called.values() for one in found for step in enter(visit.enter(one))]
            yield from inside if line.opcode == "call" else _asynchronous(line, inside)
        else:
            yield kernel_of(module, computation, line)

    entry = module.computations[module.entry]
    return enter(Visit(entry, index) for index in range(len(entry.instructions)))


def all_collectives(steps: tuple[Step, ...]) -> Iterator[Collective]:
    """The collectives among some steps in the order of the schedule, those of loops and branches too."""
    for step in steps:
        match step:
            case Issue():
                yield step.collective
            case Repeat():
                yield from all_collectives(step.body)
            case Choice():
                for branch in step.branches:
                    yield from all_collectives(branch)


def total_flops(steps: tuple[Step, ...]) -> int:
    """FLOP of the matrix products of some steps, loops by their counts; all branches count.

    Args:
        steps: from `program_steps`.
    """
    total = 0
    for step in steps:
        match step:
            case Kernel():
                total += step.flops
            case Repeat():
                total += step.count * total_flops(step.body)
            case Choice():
                total += sum(map(total_flops, step.branches))
    return total


def _asynchronous(line: Instruction, inside: list[Step]) -> Iterator[Step]:
    """What a generic start runs: collectives and kernels, under the start's name."""
    for step in inside:
        if isinstance(step, Issue):
            yield dataclasses.replace(step, start=line.name if step.collective.asynchronous else "")
        elif isinstance(step, Kernel):
            yield dataclasses.replace(step, name=line.name, asynchronous=True)


def _start_of(computation: Computation, done: Instruction) -> str:
    """Name of the start that a done waits for, found through updates; as far as it can be followed."""
    name = done.operands[0] if done.operands else ""
    while (line := computation.by_name.get(name)) is not None and line.opcode.endswith("-update"):
        name = line.operands[0]
    return name


def kernel_of(module: Module, computation: Computation, line: Instruction) -> Kernel:
    """What one instruction computes and touches.

    Args:
        module: the program.
        computation: the one that holds the instruction.
        line: a fusion, a copy, a product, or any other instruction that runs as a kernel.
    """
    inner = [module.computations[name] for names in line.called().values() for name in names]
    asynchronous = line.opcode.endswith("-start")
    if line.opcode in ("fusion", "fusion-start") and len(inner) == 1:
        fused = inner[0]
        products = tuple(product_of(fused, one) for one in fused.instructions if multiplies(one))
        num_bytes, host_bytes = _fusion_bytes(fused)
    else:
        products = (product_of(computation, line),) if multiplies(line) else ()
        num_bytes, host_bytes = _plain_bytes(computation, line), 0
        operands = [computation.by_name[name] for name in line.operands if name in computation.by_name]
        if any(shape.on_host for one in (line, *operands) for shape in one.shapes):
            # Read on one side and written on the other; an update or a slice of what lies on the host alone, too.
            num_bytes = host_bytes = num_bytes // 2
    return Kernel(line.name, line.op_name, tuple(p for p in products if p.flops), num_bytes, asynchronous, host_bytes)


def product_of(computation: Computation, line: Instruction) -> Product:
    """The extents of a matrix product or convolution; all zero where they cannot be read.

    Args:
        computation: the one that holds it.
        line: a dot, a convolution, or a library's call for one.
    """
    operands = [
        computation.by_name[name].shapes[0]
        for name in line.operands
        if name in computation.by_name and computation.by_name[name].shapes
    ]
    if len(operands) < 2 or not line.shapes:
        return Product(0, 0, 0, 0, "")
    left, result = operands[0], math.prod(line.shapes[0].dims)
    k = _contracted(line.attributes, operands)
    found = _BATCH.search(line.attributes)
    batch = _extent(left, found.group(1)) if found else 1
    if labels := _KERNEL_LABELS.search(line.attributes):
        columns = dict(zip(labels.group(1), operands[1].dims, strict=True)).get("o", 1)
        return Product(1, result // max(columns, 1), columns, k, left.dtype)
    rows = math.prod(left.dims) // max(batch * k, 1)
    return Product(batch, rows, result // max(batch * rows, 1), k, left.dtype)


def _contracted(attributes: str, operands: list[ArrayShape]) -> int:
    if labels := _KERNEL_LABELS.search(attributes):
        kernel = zip(labels.group(1), operands[1].dims, strict=True)
        return math.prod(size for label, size in kernel if label != "o")
    dims = _CONTRACTING.search(attributes)
    return _extent(operands[0], dims.group(1)) if dims else 0


def _extent(shape: ArrayShape, dims: str) -> int:
    return math.prod(shape.dims[int(dim)] for dim in re.findall(r"\d+", dims))


def _plain_bytes(computation: Computation, line: Instruction) -> int:
    """Bytes of an instruction that is a kernel of its own."""
    read = [computation.by_name[name].num_bytes for name in line.operands if name in computation.by_name]
    match line.opcode:
        case "slice" | "dynamic-slice" | "gather":
            return 2 * line.num_bytes
        case "dynamic-update-slice" if len(read) > 1:
            return 2 * read[1]
        case "scatter" if len(read) > 2:
            return 2 * read[-1]
        case "copy-start":
            return 2 * sum(read)
    return sum(read) + line.num_bytes


def _fusion_bytes(fused: Computation) -> tuple[int, int]:
    """Bytes that a fusion reads of its parameters and writes of its results: in device memory, and in the host's."""
    users: dict[str, list[Instruction]] = {}
    for line in fused.instructions:
        for name in line.operands:
            users.setdefault(name, []).append(line)
    moved = {False: 0, True: 0}
    for line in fused.instructions:
        if line.opcode == "parameter":
            moved[_is_on_host(line)] += min(line.num_bytes, _read_of(line, users))
    root = fused.root
    results = [fused.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    for line in results:
        moved[_is_on_host(line)] += _written(fused, line)
    return moved[False], moved[True]


def _is_on_host(line: Instruction) -> bool:
    return any(shape.on_host for shape in line.shapes)


def _read_of(line: Instruction, users: Mapping[str, list[Instruction]]) -> int:
    """Bytes read of a value in a fusion by all that use it."""
    total = 0
    for user in users.get(line.name, ()):
        if user.opcode in _VIEWS:
            total += _read_of(user, users)
        elif user.opcode in _SLICES or (user.opcode == "gather" and user.operands[0] == line.name):
            total += user.num_bytes
        elif user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == line.name:
            continue  # In place: what is not updated is not touched.
        elif user.opcode != "tuple":
            total += line.num_bytes
    return total


def _written(fused: Computation, line: Instruction) -> int:
    """Bytes written of a fusion's result: the update alone where a parameter is updated in place."""
    while line.opcode in _VIEWS:
        line = fused.by_name[line.operands[0]]
    if line.opcode in ("dynamic-update-slice", "scatter"):
        target = fused.by_name[line.operands[0]]
        while target.opcode in _VIEWS:
            target = fused.by_name[target.operands[0]]
        if target.opcode == "parameter":
            return fused.by_name[line.operands[1 if line.opcode == "dynamic-update-slice" else -1]].num_bytes
    return 0 if line.opcode == "parameter" else line.num_bytes
