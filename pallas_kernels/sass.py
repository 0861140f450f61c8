"""Reads what the Mosaic compiler dumps for a kernel: registers, spills, and the machine code's cost per element.

The deviceless compile runs the assembler, so these are facts of the code that would run. What they cannot say is time:
`bound` turns counts into clocks per element under a stated model, the larger of memory and instruction issue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pallas_kernels.backend import Programs
from pallas_kernels.gpus import GpuTarget

THREADS, LANES = 128, 32
ISSUE_LANES = 128
"""Lane-instructions one multiprocessor issues per clock: four schedulers of 32 lanes."""
SUSTAINED_GHZ = {8: 1.41, 9: 1.755, 10: 1.85}
"""By compute capability."""
REGISTERS, REGISTERS_AT_ONCE = 65536, 8
"""Registers of a multiprocessor, and how many of a thread are given together (CUDA programming guide, table of compute
capabilities 8.0 to 10.0)."""
SHUFFLE_LANES = 32
"""Lanes that exchange a value per clock and multiprocessor (CUDA programming guide, arithmetic throughput)."""

_DUMPS = ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_SASS")
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*)")


def disassembler_missing() -> str | None:
    """Why machine code cannot be read here, or None."""
    return None if _disassembler_root() else "no nvdisasm: pip install nvidia-cuda-nvdisasm"


def _disassembler_root() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for tool in Path(place).glob("*/bin/nvdisasm"):
            return tool.parent.parent
    return None


@dataclasses.dataclass(frozen=True)
class KernelCode:
    """Facts of one compiled kernel.

    Attributes:
        registers: per thread.
        spill_bytes: stores and loads together.
        instructions: executed per thread, loops counted by their trips; None without the disassembler.
        loads: how often each global load instruction is executed, by name such as "LD.E.128", loops counted by their
            trips.
        stores: the same for stores.
        shuffles: exchanges between lanes that a thread executes.
    """

    registers: int
    spill_bytes: int
    instructions: float | None
    loads: dict[str, float]
    stores: dict[str, float]
    shuffles: float = 0.0

    def instructions_per_element(self, programs: Programs) -> float | None:
        """Lane-instructions per element of the result; a shuffle counts as the issue slots it keeps busy, if those
        alone are more than all instructions take."""
        if self.instructions is None:
            return None
        slots = max(self.instructions, self.shuffles * ISSUE_LANES / SHUFFLE_LANES)
        return slots * THREADS / programs.elements

    @property
    def resident_programs(self) -> int:
        """Programs that a multiprocessor has registers for at a time; it takes 16 at most, of 128 threads."""
        given = -(-self.registers // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
        return min(16, REGISTERS // (given * THREADS))

    def bytes_moved(self, programs: Programs) -> float | None:
        """Bytes loaded and stored in global memory by all programs: widths times executions times threads.

        An address that lanes of a warp share counts once a warp, as the memory sees it.
        """
        if self.instructions is None:
            return None
        total = 0.0
        for counts, shared in ((self.loads, programs.loads_shared), (self.stores, programs.stores_shared)):
            for name, times in counts.items():
                # LDG is what the compiler makes of an address that no thread changes: constants and the seed.
                lanes = LANES if name.startswith("LDG") else shared.get(_width(name), 1)
                total += _width(name) * times / lanes
        return total * THREADS * programs.count


@contextlib.contextmanager
def dumping() -> Iterator[Path]:
    """A directory into which kernels compiled inside the block leave their code.

    A kernel is compiled, and so dumped, once per process.
    """
    root = _disassembler_root()
    with tempfile.TemporaryDirectory() as place:
        wanted = {**dict.fromkeys(_DUMPS, "1"), "MOSAIC_GPU_DUMP_TO": place}
        if root is None:
            del wanted["MOSAIC_GPU_DUMP_SASS"]
        else:
            wanted["MOSAIC_GPU_CUDA_ROOT"] = str(root)
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield Path(place)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def read(place: Path, trips: int = 1) -> list[KernelCode]:
    """The kernels dumped into a directory, oldest first.

    Args:
        place: from `dumping`.
        trips: how often the body of each loop runs.
    """
    kernels = []
    for report in sorted(place.glob("*.ptxas"), key=lambda path: path.stat().st_mtime_ns):
        text = report.read_text()
        registers = max(int(n) for n in re.findall(r"Used (\d+) registers", text))
        spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", text))
        sass = next(iter(place.glob(report.stem + ".sass*")), None)
        lines = _instructions(sass.read_text()) if sass else []
        executed = _executed(lines, trips)
        loads = {name: times for name, times in executed.items() if re.match(r"LDG?\.", name)}
        stores = {name: times for name, times in executed.items() if re.match(r"STG?\.", name)}
        total = sum(executed.values()) if lines else None
        shuffles = sum(times for name, times in executed.items() if name.startswith("SHFL"))
        kernels.append(KernelCode(registers, spills, total, loads, stores, shuffles))
    return kernels


def _width(name: str) -> int:
    """Bytes that a load or store moves for one thread."""
    found = re.search(r"\.(128|64|[US]16|[US]8)\b", name)
    return {"128": 16, "64": 8, "16": 2, "8": 1}[found[1].lstrip("US")] if found else 4


def _instructions(sass: str) -> list[tuple[int, str, str]]:
    """``(address, name, operands)`` of each instruction; labels are resolved to addresses in the operands."""
    labels: dict[str, int] = {}
    pending: list[str] = []
    found: list[tuple[int, str, str]] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x?_?\w+):", line):
            pending.append(label[1])
        elif match := _LINE.search(line):
            address = int(match[1], 16)
            labels.update(dict.fromkeys(pending, address))
            pending = []
            found.append((address, match[3], match[4]))
    resolve = re.compile(r"`\((\.L_x?_?\w+)\)")
    return [(a, n, resolve.sub(lambda m: str(labels.get(m[1], -1)), o)) for a, n, o in found]


def _executed(lines: list[tuple[int, str, str]], trips: int) -> dict[str, float]:
    """How often one thread executes each instruction up to its exit, loop bodies counted ``trips`` times."""
    if not lines:
        return {}
    weights = {address: 1.0 for address, _, _ in lines}
    end = max((a for a, name, _ in lines if name == "EXIT"), default=lines[-1][0])
    for address, name, operands in lines:
        target = re.search(r"(\d+)\s*$", operands)
        if name.startswith("BRA") and target and int(target[1]) < address <= end:
            for inside in weights:
                if int(target[1]) <= inside <= address:
                    weights[inside] *= trips
    counts: Counter[str] = Counter()
    for address, name, _ in lines:
        if address <= end and name != "NOP":
            counts[name] += weights[address]  # type: ignore[assignment]
    return dict(counts)


def sustained_ghz(gpu: GpuTarget) -> float:
    """The clock that the model of time assumes: the boost clock that the vendor states for compute."""
    return SUSTAINED_GHZ[gpu.compute_capability]


def bound(gpu: GpuTarget, bytes_per_element: float, instructions_per_element: float) -> tuple[float, float]:
    """``(memory, issue)`` clocks per element and multiprocessor; the larger one bounds the kernel."""
    bytes_per_clock = gpu.memory_bandwidth / gpu.core_count / (sustained_ghz(gpu) * 1e9)
    return bytes_per_element / bytes_per_clock, instructions_per_element / ISSUE_LANES
