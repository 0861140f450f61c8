"""Where the collectives of an HLO module stand: in which loops, how often run, and what is computed meanwhile.

A collective is blocking when it is one instruction, or a start marked `is_sync`; otherwise the instructions between its
start and its done are issued while the data travels. How often it runs is the product of the trip counts of the loops
around it: the compiler's own count, else one derived from the loop's condition. Costs are for `compiled_program`.
"""

import dataclasses
import re
from collections.abc import Iterator

from zerojax.hlo_text import ArrayShape, Computation, Instruction, Module

KINDS = frozenset(
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast".split()
)
_BRANCHES = ("true_computation", "false_computation", "branch_computations")
_NOT_COMPUTING = frozenset(
    "parameter constant bitcast tuple get-tuple-element after-all partition-id replica-id opt-barrier domain copy "
    "copy-start iota send recv async-update".split()
)
# A loop counter or a flag is updated by a kernel too; it hides no transfer.
_BOOKKEEPING_BYTES = 256


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop: its name, its trips (None: not known before it runs) and JAX's name stack."""

    name: str
    trip_count: int | None
    op_name: str


@dataclasses.dataclass(frozen=True)
class Occurrence:
    """A collective where the schedule reaches it; fields as in `compiled_program.Collective`."""

    kind: str
    instruction: Instruction
    operands: tuple[ArrayShape, ...]
    results: tuple[ArrayShape, ...]
    loops: tuple[Loop, ...]
    in_conditional: bool
    asynchronous: bool
    overlapped: tuple[str, ...]
    op_name: str

    @property
    def pipelined(self) -> bool:
        """Whether the compiler moved it into another iteration."""
        return '"is_pipelined":true' in self.instruction.attributes


@dataclasses.dataclass(frozen=True)
class _Place:
    """What surrounds a computation: loops, a branch, names of the operations, and the async pair that runs it."""

    loops: tuple[Loop, ...] = ()
    in_conditional: bool = False
    op_names: tuple[str, ...] = ()
    wrapper: tuple[bool, tuple[str, ...]] | None = None


def find_collectives(module: Module) -> tuple[Occurrence, ...]:
    """All collectives of a module in the order of its schedule, those of called computations where they are called."""
    return tuple(_walk(module, module.computations[module.entry], _Place(), _communicating(module)))


def _communicating(module: Module) -> frozenset[str]:
    """Names of the computations that hold a collective, or call one that does."""
    callers: dict[str, set[str]] = {}
    found = []
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if _kind(instruction) is not None:
                found.append(computation.name)
            for names in instruction.called().values():
                for name in names:
                    callers.setdefault(name, set()).add(computation.name)
    reached: set[str] = set()
    while found:
        name = found.pop()
        if name not in reached:
            reached.add(name)
            found.extend(callers.get(name, ()))
    return frozenset(reached)


def _kind(instruction: Instruction) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def _walk(
    module: Module, computation: Computation, place: _Place, communicating: frozenset[str]
) -> Iterator[Occurrence]:
    inside = tuple(line.op_name for line in computation.instructions if "transpose(" in line.op_name)[:1]
    for index, line in enumerate(computation.instructions):
        if (kind := _kind(line)) is not None:
            yield _occurrence(kind, computation, index, place, inside)
            continue
        called = {
            key: [name for name in names if name in communicating and name in module.computations]
            for key, names in line.called().items()
        }
        if not any(called.values()):
            continue
        inner = dataclasses.replace(place, op_names=(*place.op_names, line.op_name))
        if line.opcode == "while":
            loop = Loop(line.name, _trip_count(module, computation, line), line.op_name)
            inner = dataclasses.replace(inner, loops=(*place.loops, loop))
        elif line.opcode.endswith("-start"):
            inner = dataclasses.replace(inner, wrapper=_manner(computation, index))
        for key, names in called.items():
            for name in names:
                branch = dataclasses.replace(inner, in_conditional=place.in_conditional or key in _BRANCHES)
                yield from _walk(module, module.computations[name], branch, communicating)


def _occurrence(kind: str, computation: Computation, index: int, place: _Place, inside: tuple[str, ...]) -> Occurrence:
    line = computation.instructions[index]
    operands = tuple(
        shape for name in line.operands if name in computation.by_name for shape in computation.by_name[name].shapes
    )
    done = _done(computation, index)
    if done is not None:
        results = computation.instructions[done].shapes
    elif line.opcode == kind or kind == "all-reduce":
        results = line.shapes
    else:  # A start whose done is in another iteration: (operands, results, contexts).
        results = line.shapes[len(operands) : 2 * len(operands)]
    asynchronous, overlapped = _manner(computation, index)
    if place.wrapper is not None:
        asynchronous, overlapped = place.wrapper if '"is_sync":true' not in line.attributes else (False, ())
    names = [line.op_name, *(computation.instructions[done].op_name for done in [done] if done is not None)]
    names += [*reversed(place.op_names), *(inside if place.op_names else ())]
    op_name = next((name for name in names if name), "")
    return Occurrence(
        kind, line, operands, results, place.loops, place.in_conditional, asynchronous, overlapped, op_name
    )


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


def _manner(computation: Computation, start: int) -> tuple[bool, tuple[str, ...]]:
    """Whether the instruction at `start` is asynchronous, and what is computed before its done."""
    line = computation.instructions[start]
    if not line.opcode.endswith("-start") or '"is_sync":true' in line.attributes:
        return False, ()
    done = _done(computation, start)
    between = computation.instructions[start + 1 : done]
    return True, tuple(other.name for other in between if _computes(computation, other))


def _computes(computation: Computation, line: Instruction) -> bool:
    if line.opcode in _NOT_COMPUTING or line.opcode.endswith("-done") or _kind(line) is not None:
        return False
    read = (computation.by_name[name].num_bytes for name in line.operands if name in computation.by_name)
    return max(line.num_bytes, *read, 0) > _BOOKKEEPING_BYTES


# A scalar expression: ("constant", 5), ("element", 0) of the loop's state, or (operation, left, right).
_Expression = tuple
_Caller = tuple[Computation, Instruction, "_Caller | None"]


def _trip_count(module: Module, computation: Computation, line: Instruction) -> int | None:
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
    if line.opcode == "get-tuple-element":
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
