"""What a scheduled program holds at its fullest, and how much less where some values never reach the device memory.

A buffer lives from the instruction that writes it to the last one that reads it; the peak is the largest sum of what
lives at one moment, loop bodies at the moment of their loop. Values that the compiler must keep in one place (a loop's
state, an update in place, the parts of a tuple) are one buffer. What is counted are temporaries: neither arguments nor
results, nor what lies in host memory. The compiler's own figure differs by a few percent: its buffers lie at addresses,
between which gaps stay.

A fused kernel, as of attention, keeps on the chip what the compiled program has in memory between its operations:
`memory_within` says how many bytes the peak is lower without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from zerojax.hlo.text import Computation, Instruction, Module

_VIEWS = ("bitcast", "reshape", "opt-barrier")
_IN_PLACE = ("dynamic-update-slice", "scatter")
_INDEX = re.compile(r"index=(\d+)")
# What is put together of other buffers, and reads none of them.
_NO_READER = ("tuple", "get-tuple-element", "parameter", "while", *_VIEWS)


def memory_within(module: Module, scopes: Iterable[str]) -> int:
    """Bytes by which the peak is lower if what only operations of some scopes write and read took no memory.

    Args:
        module: a scheduled program.
        scopes: names in JAX's name stack (`jax.named_scope`).
    """
    names = tuple(scopes)
    if not any(name in line.op_name for one in module.computations.values() for line in one.instructions
               for name in names):  # fmt: skip
        return 0
    return temporary_peak(module) - temporary_peak(module, names)


def temporary_peak(module: Module, without: Sequence[str] = ()) -> int:
    """The largest sum of bytes of temporaries that live at one moment.

    Args:
        module: a scheduled program.
        without: scopes in JAX's name stack, whose inner values count nothing.

    >>> from zerojax.hlo.text import parse_module
    >>> temporary_peak(parse_module('''HloModule tiny, is_scheduled=true
    ...
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8]{0} parameter(0)
    ...   %a = f32[8]{0} negate(%x)
    ...   %b = f32[16]{0} concatenate(%a, %x)
    ...   ROOT %c = f32[8]{0} slice(%b)
    ... }
    ... '''))  # a and b, 32 and 64 bytes; the result is none
    96
    """
    return _Lifetimes(module, tuple(without)).peak(module.computations[module.entry])


class _Lifetimes:
    """Buffers of the computations of a module; peaks are remembered by computation."""

    def __init__(self, module: Module, without: tuple[str, ...]) -> None:
        self.module, self.without = module, without
        self.found: dict[str, int] = {}

    def peak(self, computation: Computation) -> int:
        """Of a computation that is run: the entry, a body, a branch."""
        if computation.name not in self.found:
            self.found[computation.name] = _peak(computation, self)
        return self.found[computation.name]

    def inner(self, line: Instruction) -> int:
        """What an instruction holds while the computations that it runs go on."""
        if line.opcode not in ("while", "conditional", "call", "async-start"):
            return 0
        names = [name for found in line.called().values() for name in found]
        return max((self.peak(self.module.computations[n]) for n in names if n in self.module.computations), default=0)

    def is_hidden(self, line: Instruction) -> bool:
        """Whether an operation is of a scope that counts nothing."""
        return any(scope in line.op_name for scope in self.without)

    def updated(self, line: Instruction) -> dict[int, int]:
        """Results of a fusion that are written in place, by the operand whose buffer they take."""
        names = [name for names in line.called().values() for name in names]
        fused = self.module.computations.get(names[0]) if len(names) == 1 else None
        if fused is None:
            return {}
        root, found = fused.root, {}
        results = [fused.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
        for number, one in enumerate(results):
            while one.opcode in _VIEWS and one.operands:
                one = fused.by_name[one.operands[0]]
            if one.opcode not in _IN_PLACE:
                continue
            while one.opcode in (*_IN_PLACE, *_VIEWS) and one.operands:
                one = fused.by_name[one.operands[0]]
            if one.opcode == "parameter":
                found[number] = int(one.arguments)
        return found


def _peak(computation: Computation, within: _Lifetimes) -> int:
    sizes: list[int] = []  # of each buffer; 0: of the caller, or not counted
    written: list[int] = []  # by which instruction
    last: list[int] = []  # the last that reads it
    readers: list[list[Instruction]] = []
    values: dict[str, list[int]] = {}
    under_way: dict[str, list[list[int]]] = {}

    def new(size: int, at: int) -> int:
        sizes.append(size)
        written.append(at)
        last.append(at)
        readers.append([])
        return len(sizes) - 1

    for at, line in enumerate(computation.instructions):
        taken = [values[name] for name in line.operands if name in values]
        if line.opcode == "get-tuple-element":  # reads one part
            taken = [_part(line, leaves) for leaves in taken]
        if line.opcode.endswith(("-start", "-update")):
            under_way[line.name] = [*taken, *(held for name in line.operands for held in under_way.get(name, ()))]
        if line.opcode.endswith("-done"):  # what a start reads must stay until then
            taken += under_way.get(line.operands[0], [])
        for buffer in (buffer for leaves in taken for buffer in leaves):
            last[buffer] = at
            if line.opcode not in _NO_READER:
                readers[buffer].append(line)
        values[line.name] = _results(line, taken, lambda size, at=at: new(size, at), within)
    results = set(values[computation.root.name])
    lines = computation.instructions
    for buffer, at in enumerate(written):
        hidden = within.is_hidden(lines[at]) and all(map(within.is_hidden, readers[buffer]))
        if buffer in results or hidden:
            sizes[buffer] = 0
    return _largest(lines, sizes, written, last, values, within)


def _largest(
    lines: Sequence[Instruction], sizes: list[int], written: list[int], last: list[int],
    values: dict[str, list[int]], within: _Lifetimes,
) -> int:  # fmt: skip
    """The largest sum over the instructions, in their order."""
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for buffer, size in enumerate(sizes):
        if size:
            begins.setdefault(written[buffer], []).append(buffer)
            ends.setdefault(last[buffer], []).append(buffer)
    live = most = 0
    for at, line in enumerate(lines):
        fresh = begins.get(at, [])
        live += sum(sizes[buffer] for buffer in fresh)
        # An elementwise kernel writes over an operand that nothing reads after it.
        over = 0
        if line.opcode == "fusion" and "kind=kLoop" in line.attributes:
            dying = [sizes[b] for name in line.operands for b in values.get(name, ()) if last[b] == at and sizes[b]]
            for buffer in fresh:
                if sizes[buffer] in dying:
                    dying.remove(sizes[buffer])
                    over += sizes[buffer]
        most = max(most, live - over + within.inner(line))
        live -= sum(sizes[buffer] for buffer in ends.get(at, []))
    return most


def _part(line: Instruction, leaves: list[int]) -> list[int]:
    index = _INDEX.search(line.attributes)
    return leaves[int(index.group(1)) :][: len(line.shapes)] if index else leaves


def _results(line: Instruction, taken: list[list[int]], new: Callable[[int], int], within: _Lifetimes) -> list[int]:
    """The buffers that an instruction's results lie in; of a start, those that its done will hand out first."""
    opcode, given = line.opcode, [buffer for leaves in taken for buffer in leaves]
    if opcode in ("parameter", "constant"):
        return [new(0) for _ in line.shapes]
    if opcode in (*_VIEWS, "tuple", "get-tuple-element", "while") or opcode.endswith("-update"):
        return given
    if opcode.endswith("-done"):
        return given[: len(line.shapes)]
    if opcode in _IN_PLACE and taken:
        return taken[0]
    if opcode == "copy-start" and line.shapes:
        return [new(0 if line.shapes[0].on_host else line.shapes[0].num_bytes)]
    # A start's results stand behind its operands, and before contexts of a few bytes.
    held = len(given) if opcode.endswith("-start") and len(line.shapes) > len(given) else 0
    placed = within.updated(line) if opcode in ("fusion", "fusion-start") else {}
    found: list[int] = []
    for number, shape in enumerate(line.shapes[held:]):
        operand = placed.get(number)
        is_placed = operand is not None and operand < len(taken) and taken[operand]
        found.append(taken[operand][0] if is_placed else new(0 if shape.on_host else shape.num_bytes))  # type: ignore[index]
    return found
