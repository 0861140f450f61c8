"""What a compiled GPU program moves, read from its text: each launched instruction reads operands, writes results.

An operand of which a fusion only takes slices counts as those slices. Caches are not known, so that an operand that a
fusion reads twice counts once, and what one instruction writes and the next reads counts twice.
"""

from __future__ import annotations

import math
import re

_ITEM = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn"), 1),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2),
    **dict.fromkeys(("f32", "s32", "u32"), 4),
}
_LAUNCHED = ("fusion", "custom-call", "copy", "transpose", "reduce", "convert", "concatenate", "slice")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")


def moved_bytes(program: str) -> tuple[int, int]:
    """``(bytes, launches)`` of the text of a compiled program without loops."""
    computations = _computations(program)
    sizes: dict[str, int] = {}
    total = launches = 0
    for name, size, op, rest in computations["ENTRY"]:
        sizes[name] = size
        if op not in _LAUNCHED:
            continue
        launches += 1
        total += size
        operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
        called = re.search(r"calls=%?([\w.\-]+)", rest) if op == "fusion" else None
        taken = _slices_taken(computations.get(called[1], [])) if called else {}
        total += sum(min(sizes.get(operand, 0), taken.get(i, math.inf)) for i, operand in enumerate(operands))
    return int(total), launches


def _computations(program: str) -> dict[str, list[tuple[str, int, str, str]]]:
    """``(name, bytes of the result, operation, operands and attributes)`` of each instruction, by computation."""
    found: dict[str, list[tuple[str, int, str, str]]] = {}
    current: list[tuple[str, int, str, str]] = []
    for line in program.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$", line):
            current = found.setdefault("ENTRY" if head[1] else head[2], [])
        elif match := _INSTRUCTION.match(line):
            name, kind, op, rest = match.groups()
            current.append((name, _size(kind), op, rest))
    return found


def _size(kind: str) -> int:
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", kind)
    return sum(math.prod(int(d) for d in dims.split(",") if d) * _ITEM.get(dtype, 4) for dtype, dims in shapes)


def _slices_taken(instructions: list[tuple[str, int, str, str]]) -> dict[int, int]:
    """Bytes taken from each parameter of a fused computation that is only sliced."""
    taken: dict[int, int] = {}
    for name, _, op, rest in instructions:
        if op != "parameter":
            continue
        names, bytes_taken, whole = {name}, 0, False
        for other, size, user, operands in instructions:
            if names & set(re.findall(r"%([\w.\-]+)", operands.split("), ")[0])):
                if user == "bitcast":
                    names.add(other)
                elif user == "slice":
                    bytes_taken += size
                else:
                    whole = True
        if not whole:
            taken[int(rest.split(")")[0])] = bytes_taken
    return taken
