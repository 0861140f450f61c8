"""How many iterations a while loop of an HLO module makes.

The compiler writes down the count it knows. Where it has not, the count follows from `first`, `limit` and `by` when the
loop has the form of `first; while i < limit: ..; i += by`, all three constants; any other loop has no count.
"""

import re

from zerojax.hlo_text import Computation, Instruction, Module

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
