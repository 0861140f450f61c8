"""Runs the PTX of a kernel on a CPU: what the compiler made of it, on real numbers, without a GPU.

All threads of all programs step through the code together, an instruction at a time, on NumPy arrays. It knows the
instructions that Mosaic emits for these kernels and refuses any other. Two freedoms that hardware takes are options:
a product without an explicit rounding may be fused into the addition after it (``fuse``), and an approximate reciprocal
may be off by a unit in the last place (``reciprocal_ulps``). Rounding of the rest is IEEE's, as PTX says (PTX ISA 9.0,
section 9.7).
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

WARP, THREADS = 32, 128
GUARD = 256
_STATEMENT = re.compile(r"^(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)$")
_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_TYPES: dict[str, Any] = {
    **{f"u{n}": t for n, t in _UNSIGNED.items()}, **{f"b{n}": t for n, t in _UNSIGNED.items()},
    "s16": np.int16, "s32": np.int32, "s64": np.int64, "f32": np.float32,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Code:
    """A compiled kernel: its PTX, and to which array, of operands and then results, each parameter points."""

    ptx: str
    parameters: tuple[int, ...]


def read(place: Path) -> Code:
    """The one kernel dumped into a directory (`pallas_kernels.sass.dumping`).

    Parameters stand in the order in which the kernel first uses them; the host's side of the launch says which is
    which.
    """
    (ptx,), (log,) = place.glob("*.ptx"), place.glob("*.mlir-passes.log")
    host = [stage for stage in log.read_text().split("// -----// IR Dump") if "gpu.launch_func" in stage][-1]
    launch = re.search(r"gpu\.launch_func .*? args\((.*?)\)", host)
    assert launch
    found = {}
    places = dict(re.findall(r"(%\w+) = llvm\.getelementptr %\w+\[(\d+)\]", host))
    for value, pointer in re.findall(r"(%\w+) = llvm\.load (%\w+) : !llvm\.ptr -> !llvm\.ptr", host):
        found[value] = int(places.get(pointer, 0))
    return Code(ptx.read_text(), tuple(found[name] for name in re.findall(r"(%\w+) :", launch[1])))


class Memory:
    """Global memory: the operands and results side by side, with gaps whose use is an error."""

    def __init__(self, arrays: list[np.ndarray]):
        sizes = [-(-a.nbytes // GUARD) * GUARD for a in arrays]
        self.bases = [GUARD + sum(sizes[:i]) + GUARD * i for i in range(len(arrays))]
        self.bytes = np.zeros(self.bases[-1] + sizes[-1] + GUARD, np.uint8)
        self.owned = np.zeros(self.bytes.shape, bool)
        for base, array in zip(self.bases, arrays, strict=True):
            self.bytes[base : base + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self.owned[base : base + array.nbytes] = True

    def result(self, i: int, like: np.ndarray) -> np.ndarray:
        base = self.bases[i]
        return self.bytes[base : base + like.nbytes].view(like.dtype).reshape(like.shape).copy()


def run(
    code: Code, operands: list[np.ndarray], results: list[np.ndarray], grid: int, *, fuse: bool = False,
    reciprocal_ulps: int = 0,
) -> list[np.ndarray]:  # fmt: skip
    """The results of a kernel.

    Args:
        code: from `read`.
        operands: what is read, in order.
        results: arrays of the shape and dtype of what is written, filled with anything.
        grid: number of programs, of 128 threads each.
        fuse: fuse every product that may be fused.
        reciprocal_ulps: how far approximate reciprocals are off, up and down by turns.
    """
    arrays = [*operands, *results]
    memory = Memory(arrays)
    with np.errstate(all="ignore"):
        _Threads(code, memory, grid, fuse, reciprocal_ulps).run()
    return [memory.result(len(operands) + i, array) for i, array in enumerate(results)]


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in float32, rounded once: the product is exact in float64, the sum there is rounded to odd."""
    a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
    product = a * b
    total = product + c
    there = total - product
    error = (product - (total - there)) + (c - there)
    even = (total.view(np.int64) & 1) == 0
    odd = np.where(np.isfinite(total) & (error != 0) & even, np.nextafter(total, np.copysign(np.inf, error)), total)
    return odd.astype(np.float32)


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """float32 as the bits of the nearest bfloat16, half to even; NaN as the canonical one."""
    bits = x.view(np.uint32).astype(np.uint64)
    near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), near)


class _Threads:
    def __init__(self, code: Code, memory: Memory, grid: int, fuse: bool, reciprocal_ulps: int):
        self.memory, self.fuse, self.ulps = memory, fuse, reciprocal_ulps
        self.parameters = [memory.bases[i] for i in code.parameters]
        self.count = grid * THREADS
        thread = np.arange(self.count)
        self.special = {
            "%tid.x": (thread % THREADS).astype(np.uint32), "%ctaid.x": (thread // THREADS).astype(np.uint32)
        }  # fmt: skip
        self.lane, self.program = thread % WARP, thread // THREADS
        self.shared = np.zeros((grid, 1 << 16), np.uint8)
        self.registers: dict[str, np.ndarray] = {}
        self.products: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.statements: list[tuple[str | None, bool, str, str]] = []
        self.labels: dict[str, int] = {}
        body = code.ptx[code.ptx.index(".entry") :]
        for line in body[body.index("{") + 1 :].split("\n"):
            line = line.split("//")[0].strip()
            if label := re.match(r"^(\$\w+):$", line):
                self.labels[label[1]] = len(self.statements)
            elif line and line[0] not in ".{}$" and (match := _STATEMENT.match(line.rstrip(";"))):
                self.statements.append((match[2], bool(match[1]), match[3], match[4].strip()))

    def run(self) -> None:
        at = 0
        while at < len(self.statements):
            predicate, negated, name, text = self.statements[at]
            active = np.ones(self.count, bool)
            if predicate:
                active = self.registers[predicate] ^ negated
            at += 1
            if name == "bra":
                if active.any():
                    assert active.all(), "threads that part ways are not simulated"
                    at = self.labels[text]
            elif name == "ret":
                return
            elif not name.startswith(("bar.sync", "fence")):  # threads are in step
                self.step(name.split("."), _operands(text), active)

    def read(self, operand: str, dtype: Any) -> np.ndarray:
        """An operand as values of a type: a register, a number, or an address in shared memory."""
        width = np.dtype(dtype).itemsize * 8
        if operand in self.special:
            return self.special[operand].view(dtype)
        if operand.startswith("%"):
            bits = self.registers[operand]
        elif operand.startswith("0f"):
            bits = np.full(self.count, int(operand[2:], 16), np.uint32)
        elif re.match(r"^-?\d|^0x", operand):
            bits = np.full(self.count, int(operand.rstrip("U"), 0) % (1 << width), _UNSIGNED[width])
        else:
            bits = np.zeros(self.count, np.uint64)  # the one symbol: the start of shared memory
        if bits.dtype == bool:
            return bits
        return bits.astype(_UNSIGNED[width], copy=False).view(dtype)

    def write(self, operand: str, value: np.ndarray, active: np.ndarray) -> None:
        if value.dtype != bool:
            value = value.view(_UNSIGNED[value.dtype.itemsize * 8])
        if not active.all():
            value = np.where(active, value, self.registers.get(operand, np.zeros_like(value)))
        self.registers[operand] = value
        self.products.pop(operand, None)

    def step(self, name: list[str], operands: list[str], active: np.ndarray) -> None:
        op, kind = name[0], name[-1]
        if op in ("ld", "st"):
            self.move(name, operands, active)
        elif op == "elect":
            self.write(operands[0].split("|")[1], self.lane == 0, active)
        elif op == "shfl":
            self.shuffle(name, operands, active)
        elif op == "cvt":
            self.write(operands[0], self.converted(name, operands), active)
        elif op == "setp":
            self.write(operands[0], _compared(name[1], *(self.read(o, _TYPES[kind]) for o in operands[1:])), active)
        elif op in ("mov", "cvta"):
            self.copy(kind, operands, active)
        elif op == "selp":
            a, b = (self.read(o, _TYPES[kind]) for o in operands[1:3])
            self.write(operands[0], np.where(self.registers[operands[3]], a, b), active)
        elif kind == "f32":
            self.float_operation(name, operands, active)
        else:
            self.write(operands[0], self.integer(name, operands[1:]), active)

    def copy(self, kind: str, operands: list[str], active: np.ndarray) -> None:
        if kind == "pred":  # a constant: -1 is true
            value = self.read(operands[1], np.uint32)
            self.write(operands[0], value if value.dtype == bool else value != 0, active)
            return
        bits = int(kind[1:])
        if operands[0].startswith("{"):
            parts = operands[0].strip("{}").split(",")
            value, width = self.read(operands[1], _UNSIGNED[bits]), bits // len(parts)
            for i, part in enumerate(parts):
                self.write(part.strip(), (value >> (i * width)).astype(_UNSIGNED[width]), active)
        elif operands[1].startswith("{"):
            parts = operands[1].strip("{}").split(",")
            width = bits // len(parts)
            pieces = [self.read(part.strip(), _UNSIGNED[width]).astype(_UNSIGNED[bits]) for part in parts]
            whole = sum((piece << (i * width) for i, piece in enumerate(pieces)), np.zeros(self.count, _UNSIGNED[bits]))
            self.write(operands[0], whole.astype(_UNSIGNED[bits]), active)
        else:
            self.write(operands[0], self.read(operands[1], _UNSIGNED[bits]), active)

    def move(self, name: list[str], operands: list[str], active: np.ndarray) -> None:
        load = name[0] == "ld"
        outside, place = operands if load else operands[::-1]
        symbol, _, offset = place.strip("[]").partition("+")
        if name[1].startswith("param"):
            base = self.parameters[int(symbol.rsplit("_", 1)[1])]
            return self.write(outside, np.full(self.count, base, np.uint64), active)
        if re.match(r".*-\d+$", symbol):
            symbol, minus = symbol.rsplit("-", 1)
            offset = "-" + minus
        address = self.read(symbol, np.uint64).astype(np.int64) + int(offset or 0)
        width = int(name[-1][1:]) // 8
        parts = [part.strip() for part in outside.strip("{}").split(",")]
        for i, part in enumerate(parts):
            at = address[:, None] + np.arange(i * width, (i + 1) * width)
            assert (address % (width * len(parts)) == 0)[active].all(), "an address is not aligned"
            if "shared" in name:
                where: Any = (self.program[:, None], at)
                store = self.shared
            else:
                assert self.memory.owned[at[active]].all(), f"{'.'.join(name)} reaches outside of the arrays"
                where, store = at, self.memory.bytes
            if load:
                found = np.ascontiguousarray(store[where]).view(_UNSIGNED[width * 8])[:, 0]
                self.write(part, found.astype(np.uint32) if width == 1 else found, active)
            else:
                value = self.read(part, _UNSIGNED[max(width, 2) * 8]).astype(_UNSIGNED[width * 8])
                chosen = (where[0][active], where[1][active]) if isinstance(where, tuple) else where[active]
                store[chosen] = value[active, None].view(np.uint8)
        return None

    def shuffle(self, name: list[str], operands: list[str], active: np.ndarray) -> None:
        value, other = self.read(operands[1], np.uint32), self.read(operands[2], np.uint32).astype(np.int64)
        lane = self.lane ^ other if "bfly" in name else other
        self.write(operands[0].split("|")[0], value[np.arange(self.count) - self.lane + lane], active)

    def converted(self, name: list[str], operands: list[str]) -> np.ndarray:
        to, source = name[-2], name[-1]
        if to == "bf16x2":  # the first operand is the upper half
            upper, lower = (bfloat16_bits(self.read(o, np.float32)).astype(np.uint32) for o in operands[1:])
            return upper << 16 | lower
        if to == "f16x2":
            upper, lower = (self.read(o, np.float32).astype(np.float16).view(np.uint16) for o in operands[1:])
            return upper.astype(np.uint32) << 16 | lower
        if source == "bf16":
            return self.read(operands[1], np.uint16).astype(np.uint32) << 16
        if source == "f16":
            return self.read(operands[1], np.float16).astype(np.float32)
        value = self.read(operands[1], _TYPES[source])
        if to == "bf16":
            return bfloat16_bits(value)
        if to == "f16":
            return value.astype(np.float16)
        if to == source == "f32":
            assert "rni" in name, name
            return np.rint(value)
        assert source != "f32", name
        return value.astype(_TYPES[to])

    def float_operation(self, name: list[str], operands: list[str], active: np.ndarray) -> None:
        op, target = name[0], operands[0]
        args = [self.read(o, np.float32) for o in operands[1:]]
        may_fuse, product = self.fuse and "rn" not in name, None
        if op in ("add", "sub") and may_fuse:
            negate = np.float32(-1 if op == "sub" else 1)
            if pair := self.products.get(operands[1]):
                value = fused(*pair, negate * args[1])
            elif pair := self.products.get(operands[2]):
                value = fused(negate * pair[0], pair[1], args[0])
            else:
                value = args[0] + negate * args[1]
        elif op == "mul":
            value, product = args[0] * args[1], (args[0], args[1]) if may_fuse else None
        elif op == "rcp":
            value = np.float32(1.0) / args[0]
            off = np.where(np.arange(self.count) % 2 == 0, self.ulps, -self.ulps).astype(np.int32)
            value = np.where(np.isfinite(value) & (value != 0), (value.view(np.int32) + off).view(np.float32), value)
        else:
            value = _FLOAT[op](name, *args)
        self.write(target, np.asarray(value, np.float32), active)
        if product:
            self.products[target] = product

    def integer(self, name: list[str], operands: list[str]) -> np.ndarray:
        op, kind = name[0], name[-1]
        if op == "prmt":
            return _permuted(*(self.read(o, np.uint32) for o in operands))
        if op in ("shl", "shr"):
            value, by = self.read(operands[0], _TYPES[kind]), self.read(operands[1], np.uint32)
            width = value.dtype.itemsize * 8
            amount = np.minimum(by, width - 1).astype(value.dtype)
            moved = value << amount if op == "shl" else value >> amount
            return np.where((by >= width) & (value.dtype.kind == "u"), value.dtype.type(0), moved)
        if op == "shf":
            low, high, by = (self.read(o, np.uint32).astype(np.uint64) for o in operands)
            both, by = high << np.uint64(32) | low, by & np.uint64(31)
            return (both >> by if "r" in name else both >> (np.uint64(32) - by)).astype(np.uint32)
        args = [self.read(o, _TYPES[kind]) for o in operands]
        if op == "bfe":
            assert kind == "u32", name
            return args[0] >> np.minimum(args[1], 31) & ((np.uint64(1) << args[2].astype(np.uint64)) - 1).astype(
                np.uint32
            )
        if op in ("mul", "mad") and "wide" in name:
            wide = _TYPES[f"{kind[0]}{2 * int(kind[1:])}"]
            args = [args[0].astype(wide), args[1].astype(wide), *(self.read(o, wide) for o in operands[2:])]
        elif op in ("mul", "mad"):
            assert "lo" in name, name
        return np.asarray(_INTEGER[op](*args))


def _operands(text: str) -> list[str]:
    return [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+(?:\|[^,\s]+)?", text)]


def _compared(how: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """setp; a name of three letters ending in u, as "ltu", is true where an operand is NaN."""
    plain: dict[str, Any] = {
        "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal
    }  # fmt: skip
    found = plain[how[:2]](a, b)
    if a.dtype.kind != "f":
        return found
    nan = np.isnan(a) | np.isnan(b)
    return found | nan if how.endswith("u") else found & ~nan


def _permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = b.astype(np.uint64) << np.uint64(32) | a
    out = np.zeros(a.shape, np.uint64)
    for i in range(4):
        pick = (selector >> np.uint32(4 * i) & np.uint32(0xF)).astype(np.uint64)
        byte = both >> (np.uint64(8) * (pick & np.uint64(7))) & np.uint64(0xFF)
        byte = np.where(pick & np.uint64(8), np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0)), byte)
        out |= byte << np.uint64(8 * i)
    return out.astype(np.uint32)


def _extreme(name: list[str], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    keep_nan, ignore_nan = (np.maximum, np.fmax) if name[0] == "max" else (np.minimum, np.fmin)
    return keep_nan(a, b) if "NaN" in name else ignore_nan(a, b)


_FLOAT: dict[str, Any] = {
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "fma": lambda _, a, b, c: fused(a, b, c),
    "abs": lambda _, a: np.abs(a),
    "neg": lambda _, a: -a,
    "max": _extreme,
    "min": _extreme,
}
_INTEGER: dict[str, Any] = {
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "neg": np.negative,
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": lambda a, b, c: a * b + c,
    "max": np.maximum, "min": np.minimum, "div": lambda a, b: a // b, "rem": lambda a, b: a % b,
}  # fmt: skip
