"""The text of a compiled XLA program as records: computations, instructions, shapes and groups of devices.

`compiled.as_text()` is the one complete account of what a program does that JAX gives out. This file reads its syntax,
as printed by the compilers of JAX 0.10 to 0.12 for GPUs and CPUs, and nothing more. In a scheduled module the order of
the instructions is the order in which they are issued. Replica groups come as explicit lists, as iotas (consecutive
numbers, reshaped and transposed) or as axes of a mesh; all are read into tuples of device numbers, which for a program
compiled by JAX are positions in the flat device array of its mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=?]*)\](\{[^{}]*\})?")
_HOST_MEMORY = "S(5)"
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(to_apply|calls|body|condition|true_computation|false_computation|branch_computations|called_computations|"
    r"select|scatter|comparator|async_execution_computation)=(\{[^{}]*\}|%?[\w.\-]+)"
)
_BITS = re.compile(r"(?:bf|[a-z])(\d+)")


@dataclasses.dataclass(frozen=True)
class ArrayShape:
    """One array of an instruction's result.

    Attributes:
        dtype: HLO element type: "bf16", "s8", ..
        dims: sizes.
        on_host: whether it lies in host memory.
    """

    dtype: str
    dims: tuple[int, ...]
    on_host: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes, elements of less than a byte packed."""
        return math.ceil(math.prod(self.dims) * element_bits(self.dtype) / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: without the percent sign.
        opcode: as printed: "all-gather-start", "fusion", ..
        shapes: arrays of the result, tuples flattened.
        operands: names of the operands.
        arguments: what stands between the brackets, as printed: a constant's value, a parameter's number.
        attributes: the rest of the line, unread.
        is_root: whether the computation returns it.
    """

    name: str
    opcode: str
    shapes: tuple[ArrayShape, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the result, all arrays together."""
        return sum(shape.num_bytes for shape in self.shapes)

    @property
    def op_name(self) -> str:
        """JAX's name stack of the operation, empty where the compiler made it."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found.group(1) if found else ""

    def called(self) -> dict[str, tuple[str, ...]]:
        """Computations the instruction refers to, by attribute: `{"body": ("loop_body",), "condition": (..)}`."""
        return {key: tuple(re.findall(r"[\w.\-]+", value)) for key, value in _CALLED.findall(self.attributes)}


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in their printed order, and the same by name."""

    name: str
    instructions: tuple[Instruction, ...]
    by_name: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next((line for line in self.instructions if line.is_root), self.instructions[-1])


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations, which of them is run, and over how many devices."""

    computations: dict[str, Computation]
    entry: str
    num_devices: int
    is_scheduled: bool


def parse_module(text: str) -> Module:
    """Reads an HLO module as text.

    Args:
        text: what `compiled.as_text()` returns.

    Raises:
        ValueError: no module header or no entry computation in the text.

    >>> module = parse_module('''HloModule tiny, is_scheduled=true, num_partitions=4
    ...
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8]{0} parameter(0)
    ...   ROOT %sum = f32[8]{0} all-reduce(%x), replica_groups={}, to_apply=%add
    ... }
    ... ''')
    >>> module.num_devices, module.computations["main"].instructions[1].operands
    (4, ('x',))
    """
    header = next((line for line in text.splitlines() if line.startswith("HloModule")), None)
    if header is None:
        raise ValueError("no HloModule line: pass the text of compiled.as_text()")
    computations: dict[str, Computation] = {}
    entry = None
    name, lines = None, []
    for line in text.splitlines():
        if line.startswith("}"):
            if name is not None:
                computations[name] = _computation(name, lines)
            name, lines = None, []
        elif name is not None:
            lines.append(line)
        elif (found := _HEADER.match(line)) and not line.startswith("HloModule"):
            name, lines = found.group(2), []
            entry = name if found.group(1) else entry
    if entry is None or entry not in computations:
        raise ValueError("the HLO text has no ENTRY computation: pass the whole text of compiled.as_text()")
    counts = (int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header))
    return Module(computations, entry, math.prod(counts), "is_scheduled=true" in header)


def _computation(name: str, lines: list[str]) -> Computation:
    instructions = tuple(_instructions(lines))
    return Computation(name, instructions, {instruction.name: instruction for instruction in instructions})


def _instructions(lines: list[str]) -> Iterator[Instruction]:
    for line in lines:
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        root, name, rest = found.groups()
        end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
        opcode, bracket, tail = rest[end:].strip().partition("(")
        if not bracket:
            continue
        close = _closing("(" + tail, 0) - 1
        shapes = tuple(parse_shape(rest[:end]))
        yield Instruction(
            name, opcode, shapes, tuple(_NAME.findall(tail[:close])), tail[:close], tail[close + 1 :], bool(root)
        )


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`; text in quotes is skipped."""
    depth, quoted = 0, False
    for found in re.compile(r'[()"\\]').finditer(text, start):
        index, mark = found.start(), found.group()
        if mark == '"' and text[index - 1] != "\\":
            quoted = not quoted
        elif not quoted and mark == "(":
            depth += 1
        elif not quoted and mark == ")":
            depth -= 1
            if depth == 0:
                return index
    return len(text)


@functools.lru_cache(maxsize=65536)
def parse_shape(text: str) -> tuple[ArrayShape, ...]:
    """Arrays of a printed shape, tuples flattened: `(bf16[8,4]{1,0}, u32[])` gives two."""
    return tuple(
        ArrayShape(dtype, tuple(int(re.sub(r"\D", "", dim)) for dim in dims.split(",") if dim), _HOST_MEMORY in layout)
        for dtype, dims, layout in _ARRAY.findall(text)
        if dtype not in ("token", "opaque")
    )


@functools.lru_cache(maxsize=256)
def element_bits(dtype: str) -> int:
    """Bits of one element of an HLO type.

    >>> [element_bits(dtype) for dtype in ("pred", "s4", "f8e4m3fn", "bf16", "f32", "c64")]
    [8, 4, 8, 16, 32, 64]
    """
    if dtype == "pred":
        return 8
    found = _BITS.match(dtype)
    if not found:
        raise ValueError(f"HLO element type {dtype!r} is not known: its name holds no width")
    return int(found.group(1))


def hlo_dtype(dtype: Any) -> str:
    """HLO's name of an element type; a name that is HLO's already is returned as it is.

    >>> [hlo_dtype(dtype) for dtype in ("bfloat16", np.float32, "int8", bool, "float8_e4m3fn", "s4", "uint4")]
    ['bf16', 'f32', 's8', 'pred', 'f8e4m3fn', 's4', 'u4']
    """
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name == "bool":
        return "pred"
    short = {"bfloat": "bf", "float": "f", "uint": "u", "int": "s", "complex": "c"}
    found = re.fullmatch(r"(bfloat|float|uint|int|complex)(\d+)(?:_(\w+))?", name)
    return short[found.group(1)] + found.group(2) + (found.group(3) or "") if found else name


_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(((?:[^()]|\([^()]*\))*)\))? \{([^}]*)\}")
_GROUPS = re.compile(
    r"\{(?:\{[\d, ]*\},? ?)*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|maximal_mesh\[device_id=\d+\]|" + _MESH.pattern
)


def parse_groups(text: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Groups of devices that take part in a collective together, in any of the printed forms.

    Explicit `{{0,1},{2,3}}`; all devices `{}`; iota `[4,2]<=[2,4]T(1,0)`, the numbers 0, 1, .. shaped (2, 4),
    transposed and cut into 4 groups of 2; mesh `mesh['a'=2,'b'=4] {'b'}`, groups along the named axes, where
    `'b':(2)2` is a part of an axis (the axis seen as 2 x 2 x rest) and `device_ids=(..)` orders the mesh's devices.

    Args:
        text: attributes of an instruction, or the groups alone.
        num_devices: devices of the program, for `{}` and where no groups are printed.

    Returns:
        Device numbers of each group, in the group's order.

    Raises:
        ValueError: groups in a form that is none of these.

    >>> parse_groups("[4,2]<=[2,4]T(1,0)", 8)
    ((0, 4), (1, 5), (2, 6), (3, 7))
    >>> parse_groups("channel_id=1, replica_groups=mesh['node'=2,'local'=4] {'local'}, dimensions={0}", 8)
    ((0, 1, 2, 3), (4, 5, 6, 7))
    """
    _, printed, rest = text.partition("replica_groups=")
    rest = rest if printed else text
    found = _GROUPS.match(rest)
    if not found:
        if printed or rest.startswith(("{", "[", "mesh")):
            raise ValueError(f"replica groups in an unknown form: {rest[:80]!r}")
        return (tuple(range(num_devices)),)
    return _groups(found.group(), num_devices)


@functools.lru_cache(maxsize=4096)
def _groups(text: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    if text.startswith("{"):
        groups = tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d, ]+)\}", text))
        return groups or (tuple(range(num_devices)),)
    if text.startswith("["):
        shape, _, order = text.partition("<=")
        return _rows(_device_order(order).reshape(_numbers(shape)))
    if text.startswith("maximal"):
        return (tuple(_numbers(text)),)
    return _rows(_mesh_groups(text))


def _rows(groups: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, groups.reshape(-1, groups.shape[-1]).tolist()))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _device_order(text: str) -> np.ndarray:
    """Flat device numbers of `[2,8]T(1,0)` or of a plain list."""
    if not text.startswith("["):
        return np.array(_numbers(text))
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return (ids.transpose(_numbers(order)) if order else ids).reshape(-1)


def _mesh_groups(text: str) -> np.ndarray:
    found = _MESH.match(text)
    assert found, text
    axes = {name: int(size) for name, size in re.findall(r"[\"']?([^\"'=,\s]+)[\"']?=(\d+)", found.group(1))}
    ids = _device_order(found.group(2)) if found.group(2) else np.arange(math.prod(axes.values()))
    grouped = [
        (name, int(before or 1), int(size) if size else axes[name])
        for name, before, size in re.findall(r"[\"']?([^\"':,\s]+)[\"']?(?::\((\d+)\)(\d+))?", found.group(3))
    ]
    sizes: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for axis, size in axes.items():
        done = 1
        for _, before, part in sorted(entry for entry in grouped if entry[0] == axis):
            if before != done:
                sizes.append(before // done)
            place[axis, before] = len(sizes)
            sizes.append(part)
            done = before * part
        sizes.append(size // done)
    last = [place[axis, before] for axis, before, _ in grouped]
    first = [dim for dim in range(len(sizes)) if dim not in last]
    group_size = math.prod(sizes[dim] for dim in last)
    return ids.reshape(sizes).transpose(first + last).reshape(-1, group_size)
