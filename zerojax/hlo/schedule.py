"""Where the collectives of an HLO module stand: in which loops, how often run, and what is computed meanwhile.

A collective is blocking when it is one instruction, or a start marked `is_sync`; otherwise the instructions between its
start and its done are issued while the data travels. How often it runs is the product of the trip counts of the loops
around it. The compiler writes down the trip counts it knows; where it has not, the count follows from `first`, `limit`
and `by` when the loop has the form of `first; while i < limit: ..; i += by`, all three constants; any other loop has no
count.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from zerojax.hlo.text import ArrayShape, Computation, Instruction, Module

# A scalar expression: ("constant", 5), ("element", 0) of the loop's state, or (operation, left, right).
_Expression = tuple
_Caller = tuple[Computation, Instruction, "_Caller | None"]


def trip_count(module: Module, computation: Computation, line: Instruction) -> int | None:
    """Iterations of a loop.

    Args:
      module: the module it is part of.
      computation: the computation that holds it.
      line: the while instruction.

    Returns:
      The count, or None where it is not known before the program runs.
    """
    known = re.search(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)', line.attributes)
    if known:
        return int(known.group(1))
    called = line.called()
    condition, body = (module.computations.get(called.get(key, ("",))[0]) for key in ("condition", "body"))
    if condition is None or body is None or not line.operands:
        return None
    match _expression(module, condition, condition.root.name):
        case ("LT" | "LE" as direction, ("element", index), ("constant", limit)):
            pass
        case _:
            return None
    start = _state_element(module, computation, line.operands[0], index)
    step = _state_element(module, body, body.root.name, index)
    match start, step:
        case ("constant", first), ("add", ("element", same), ("constant", by)) if same == index and by > 0:
            return max(0, -(-(limit + (direction == "LE") - first) // by))
    return None


def _state_element(module: Module, computation: Computation, name: str, index: int) -> _Expression:
    state = computation.by_name.get(name)
    if state is None or state.opcode != "tuple" or index >= len(state.operands):
        return ("unknown",)
    return _expression(module, computation, state.operands[index])


def _expression(module: Module, computation: Computation, name: str, caller: _Caller | None = None) -> _Expression:
    line = computation.by_name.get(name)
    if line is None:
        return ("unknown",)
    if line.opcode == "constant" and re.fullmatch(r"-?\d+", line.arguments):
        return ("constant", int(line.arguments))
    if line.opcode == "parameter" and caller is not None:
        outer, call, above = caller
        return _expression(module, outer, call.operands[int(line.arguments)], above)
    if line.opcode == "get-tuple-element" and caller is None:
        source = computation.by_name.get(line.operands[0])
        index = re.search(r"index=(\d+)", line.attributes)
        if source is not None and source.opcode == "parameter" and index:
            return ("element", int(index.group(1)))
    if line.opcode in ("bitcast", "copy", "convert", "reshape"):
        return _expression(module, computation, line.operands[0], caller)
    if line.opcode in ("fusion", "call"):
        names = [name for names in line.called().values() for name in names if name in module.computations]
        if len(names) == 1:
            inner = module.computations[names[0]]
            return _expression(module, inner, inner.root.name, (computation, line, caller))
    if line.opcode in ("compare", "add") and len(line.operands) == 2:
        left, right = (_expression(module, computation, operand, caller) for operand in line.operands)
        direction = re.search(r"direction=(\w+)", line.attributes)
        operation = direction.group(1) if direction else line.opcode
        if operation == "add" and left[0] == "constant":
            left, right = right, left
        return (operation, left, right)
    return ("unknown",)


KINDS = frozenset(
    (
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "reduce-scatter",
    )
)
BRANCHES = ("true_computation", "false_computation", "branch_computations")
_MEMORY_ONLY = ("copy", "copy-start", "iota", "send", "recv", "async-update")
NO_KERNEL = (
    "after-all",
    "bitcast",
    "constant",
    "domain",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
)
_NOT_COMPUTING = frozenset(NO_KERNEL + _MEMORY_ONLY)
# A loop counter or a flag is updated by a kernel too; it hides no transfer.
_BOOKKEEPING_BYTES = 256


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop: its name, its trips (None: not known before it runs) and JAX's name stack."""

    name: str
    trip_count: int | None
    op_name: str


class Mode(NamedTuple):
    """How a collective is issued: whether asynchronously, and what is computed before its done."""

    asynchronous: bool
    overlapped: tuple[str, ...]
    overlaps_matmul: bool


_BLOCKING = Mode(False, (), False)


@dataclasses.dataclass(frozen=True)
class Occurrence:
    """A collective where the schedule reaches it; fields as in `compiled_collective.Collective`."""

    kind: str
    instruction: Instruction
    operands: tuple[ArrayShape, ...]
    results: tuple[ArrayShape, ...]
    loops: tuple[Loop, ...]
    in_conditional: bool
    mode: Mode
    op_name: str

    @property
    def pipelined(self) -> bool:
        """Whether the compiler moved it into another iteration."""
        return '"is_pipelined":true' in self.instruction.attributes


@dataclasses.dataclass(frozen=True)
class Visit:
    """An instruction that the schedule reaches, and what is around it.

    Attributes:
      computation: the one that holds the instruction.
      index: of the instruction in it.
      loops: loops around it, outermost first.
      in_conditional: whether it stands in a branch.
      callers: what calls its computation, and what calls that, outermost first: (computation, index).
    """

    computation: Computation
    index: int
    loops: tuple[Loop, ...] = ()
    in_conditional: bool = False
    callers: tuple[tuple[Computation, int], ...] = ()

    @property
    def instruction(self) -> Instruction:
        """The instruction itself."""
        return self.computation.instructions[self.index]


def walk(module: Module, wanted: Callable[[Instruction], bool]) -> Iterator[Visit]:
    """Visits the wanted instructions of a module in the order of its schedule, as often as they are written.

    Called computations (loop bodies, branches, fusions, ..) are entered where they are called, all branches too.
    """
    holding = _holding(module, wanted)

    def enter(name: str, around: Visit | None) -> Iterator[Visit]:
        computation = module.computations[name]
        for index, line in enumerate(computation.instructions):
            visit = Visit(computation, index)
            if around is not None:
                callers = (*around.callers, (around.computation, around.index))
                visit = Visit(computation, index, around.loops, around.in_conditional, callers)
            if wanted(line):
                yield visit
                continue
            called = [(key, name) for key, names in line.called().items() for name in names if name in holding]
            if called and line.opcode == "while":
                loop = Loop(line.name, trip_count(module, computation, line), line.op_name)
                visit = dataclasses.replace(visit, loops=(*visit.loops, loop))
            for key, name in called:
                branch = visit.in_conditional or key in BRANCHES
                yield from enter(name, dataclasses.replace(visit, in_conditional=branch))

    yield from enter(module.entry, None)


def _holding(module: Module, wanted: Callable[[Instruction], bool]) -> frozenset[str]:
    """Names of the computations that hold a wanted instruction, or call one that does."""
    callers: dict[str, set[str]] = {}
    found = []
    for computation in module.computations.values():
        for line in computation.instructions:
            if wanted(line):
                found.append(computation.name)
            for names in line.called().values():
                for name in names:
                    callers.setdefault(name, set()).add(computation.name)
    reached: set[str] = set()
    while found:
        name = found.pop()
        if name not in reached:
            reached.add(name)
            found.extend(callers.get(name, ()))
    return frozenset(reached & module.computations.keys())


def multiplies(line: Instruction) -> bool:
    """Whether an instruction is a matrix product or a convolution, the compiler's own or a library's."""
    if line.opcode == "custom-call":
        return '="__cublas' in line.attributes or '="__cudnn' in line.attributes
    return line.opcode in ("dot", "convolution")


def find_collectives(module: Module) -> tuple[Occurrence, ...]:
    """All collectives of a module in the order of its schedule, those of called computations where they are called."""
    multiplying = _holding(module, multiplies)
    found = walk(module, lambda line: collective_kind(line) is not None)
    return tuple(_occurrence(visit, multiplying) for visit in found)


def collective_kind(line: Instruction) -> str | None:
    """The kind of a collective's instruction or start; None for all others."""
    kind = line.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def _occurrence(visit: Visit, multiplying: frozenset[str]) -> Occurrence:
    computation, line = visit.computation, visit.instruction
    kind = collective_kind(line) or line.opcode
    operands = tuple(
        shape for name in line.operands if name in computation.by_name for shape in computation.by_name[name].shapes
    )
    done = _done(computation, visit.index)
    if done is not None:
        results = computation.instructions[done].shapes
    elif line.opcode == kind or kind == "all-reduce":
        results = line.shapes
    else:  # A start whose done is in another iteration: (operands, results, contexts).
        results = line.shapes[len(operands) : 2 * len(operands)]
    mode = _mode(computation, visit.index, multiplying)
    if visit.callers and not _is_sync(line):
        outer, start = visit.callers[-1]
        if outer.instructions[start].opcode.endswith("-start"):
            mode = _mode(outer, start, multiplying)
    return Occurrence(kind, line, operands, results, visit.loops, visit.in_conditional, mode, _op_name(visit, done))


def _op_name(visit: Visit, done: int | None) -> str:
    """The collective's own name; if the compiler gave it none, its callers', the innermost first, or a neighbour's."""
    lines = visit.computation.instructions
    names = [visit.instruction.op_name, lines[done].op_name if done is not None else ""]
    names += [outer.instructions[index].op_name for outer, index in reversed(visit.callers)]
    if visit.callers:
        names += [line.op_name for line in lines if "transpose(" in line.op_name]
    return next((name for name in names if name), "")


def _done(computation: Computation, start: int) -> int | None:
    """Index of the done that takes the start's value, directly or through updates."""
    names = {computation.instructions[start].name}
    for index in range(start + 1, len(computation.instructions)):
        line = computation.instructions[index]
        if names & set(line.operands):
            if line.opcode.endswith("-done"):
                return index
            if line.opcode.endswith("-update"):
                names.add(line.name)
    return None


def _is_sync(line: Instruction) -> bool:
    return '"is_sync":true' in line.attributes


def _mode(computation: Computation, start: int, multiplying: frozenset[str]) -> Mode:
    line = computation.instructions[start]
    if not line.opcode.endswith("-start") or _is_sync(line):
        return _BLOCKING
    between = computation.instructions[start + 1 : _done(computation, start)]
    computing = [other for other in between if _computes(computation, other)]
    matmul = any(
        multiplies(other) or any(multiplying & set(names) for names in other.called().values()) for other in computing
    )
    return Mode(True, tuple(other.name for other in computing), matmul)


def _computes(computation: Computation, line: Instruction) -> bool:
    if line.opcode in _NOT_COMPUTING or line.opcode.endswith("-done") or collective_kind(line) is not None:
        return False
    read = (computation.by_name[name].num_bytes for name in line.operands if name in computation.by_name)
    return max(line.num_bytes, *read, 0) > _BOOKKEEPING_BYTES
