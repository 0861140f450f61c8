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
from collections.abc import Iterator
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

    def enter(self, called: Computation, *, loop: Loop | None = None, branch: bool = False) -> Iterator[Visit]:
        """Visits the instructions of a computation that this one calls, in their order.

        Args:
            called: the computation.
            loop: the loop whose body it is.
            branch: whether it may not run.
        """
        loops = self.loops if loop is None else (*self.loops, loop)
        callers = (*self.callers, (self.computation, self.index))
        for index in range(len(called.instructions)):
            yield Visit(called, index, loops, self.in_conditional or branch, callers)


def multiplying_computations(module: Module) -> frozenset[str]:
    """Names of the computations that hold a matrix product, or call one that does."""
    callers: dict[str, set[str]] = {}
    found = []
    for computation in module.computations.values():
        for line in computation.instructions:
            if multiplies(line):
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


def collective_kind(line: Instruction) -> str | None:
    """The kind of a collective's instruction or start; None for all others."""
    kind = line.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def arrays_of(visit: Visit) -> tuple[tuple[ArrayShape, ...], tuple[ArrayShape, ...]]:
    """Arrays that one device puts into a collective, and gets out."""
    computation, line = visit.computation, visit.instruction
    operands = tuple(
        shape for name in line.operands if name in computation.by_name for shape in computation.by_name[name].shapes
    )
    done = _done(computation, visit.index)
    if done is not None:
        return operands, computation.instructions[done].shapes
    if not line.opcode.endswith("-start") or collective_kind(line) == "all-reduce":
        return operands, line.shapes
    # A start whose done is in another iteration: (operands, results, contexts).
    return operands, line.shapes[len(operands) : 2 * len(operands)]


def mode_of(visit: Visit, multiplying: frozenset[str]) -> Mode:
    """How a collective is issued.

    Args:
        visit: the collective where the schedule reaches it.
        multiplying: from `multiplying_computations`.
    """
    if visit.callers and not _is_sync(visit.instruction):
        outer, start = visit.callers[-1]
        if outer.instructions[start].opcode.endswith("-start"):
            return _mode(outer, start, multiplying)
    return _mode(visit.computation, visit.index, multiplying)


def name_stack(visit: Visit) -> str:
    """JAX's name stack: the collective's, or else its callers', the innermost first, or a neighbour's."""
    lines, done = visit.computation.instructions, _done(visit.computation, visit.index)
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
