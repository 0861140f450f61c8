"""``python -m pallas_kernels.survey``: what the machine code of every variant of a kernel costs, without a GPU.

Each (`variants`) is compiled for a target GPU, and its registers,
spills, instructions and bytes are counted (`sass`). What the counts mean for time is a model: `bound`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import jax

from pallas_kernels import gpus, sass, target_gpu
from pallas_kernels.array import TILE, QuantFormat
from pallas_kernels.variants import ELEMENTS, Variant


def formats() -> Iterator[QuantFormat]:
    """Every format there is."""
    levels = ((8, "integer"), (4, "integer"), (4, "e2m1"))
    sizes = [2**n for n in range(4, 12)]
    for (bits, kind), size, scale, rotate in itertools.product(
        levels, sizes, ("bfloat16", "float8_e4m3fn"), (None, 32, 64)
    ):
        if (size <= TILE or scale == "bfloat16") and (rotate or 0) <= size:
            yield QuantFormat(bits, size, scale, kind, rotate)


def variants(op: str) -> Iterator[Variant]:
    """Every variant of quantising a leaf, or every format of an op on 8 contributions in one format."""
    for fmt in formats():
        if op == "quantize":
            for dtype, stochastic, residual in itertools.product(("bfloat16", "float32"), (False, True), (False, True)):
                yield Variant("quantize", fmt, dtype, stochastic, residual)
        elif op == "sum":
            yield Variant("sum", fmt, "float32", source=fmt, count=8)
        else:
            for residual in (False, True):
                yield Variant("sum_quantize", fmt, stochastic=residual, residual=residual, source=fmt, count=8)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the machine code of a variant costs.

    Attributes:
        registers: a thread's.
        spill_bytes: loads and stores together.
        moved: bytes moved over ideal bytes.
        issue: time to issue the instructions over the time to move the ideal bytes.
        in_flight: bytes that the programs of one multiprocessor read at a time.
    """

    registers: int
    spill_bytes: int
    moved: float
    issue: float
    in_flight: float


def cost(variant: Variant, code: sass.KernelCode, gpu: str) -> Cost:
    """The cost of a variant from its code; needs the disassembler."""
    programs = variant.plan().programs
    assert programs is not None, "a variant without a plan has no code"
    instructions, moved = code.instructions_per_element(programs), code.bytes_moved(programs)
    if instructions is None or moved is None:
        raise RuntimeError(sass.disassembler_missing())
    memory, issue = sass.bound(gpus.TARGETS[gpu], variant.ideal_bytes, instructions)
    in_flight = code.resident_programs * programs.elements * variant.bytes_read
    ratio = moved / (variant.ideal_bytes * ELEMENTS)
    return Cost(code.registers, code.spill_bytes, ratio, issue / memory, in_flight)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a row a variant, then the worst of each column."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.survey", description=__doc__)
    parser.add_argument("--op", choices=["quantize", "sum", "sum_quantize"], default="quantize")
    parser.add_argument("--gpu", choices=gpus.TARGETS, default="h100")
    parser.add_argument("--only", default="", help="variants whose name has this text in it")
    options = parser.parse_args(arguments)
    if missing := target_gpu.plugin_missing() or sass.disassembler_missing():
        parser.error(missing)
    if not target_gpu.has_nvidia_gpu():
        jax.config.update("jax_platforms", "cpu")
    columns = "registers, spilled bytes, moved / ideal bytes, issue / memory time, KiB in flight"
    print(f"jax {jax.__version__}, {gpus.TARGETS[options.gpu].name} (absent): {columns}")
    costs = []
    for variant in variants(options.op):
        if options.only not in str(variant):
            continue
        if problems := variant.plan().problems:
            print(f"{variant!s:44} no kernel: {'; '.join(problems)}", flush=True)
            continue
        _, codes = variant.compile(options.gpu)
        if not codes:
            print(f"{variant!s:44} the kernel of a variant before", flush=True)
            continue
        costs.append(cost(variant, codes[0], options.gpu))
        print(f"{variant!s:44} {_row(costs[-1])}", flush=True)
    if costs:
        worst = Cost(*(max(getattr(c, f.name) for c in costs) for f in dataclasses.fields(Cost)))
        worst = dataclasses.replace(worst, in_flight=min(c.in_flight for c in costs))
        print(f"{f'worst of {len(costs)}':44} {_row(worst)}")


def _row(cost: Cost) -> str:
    whole = f"{cost.registers:4d}  {cost.spill_bytes:4d}"
    return f"{whole}  {math.ceil(cost.moved * 100) / 100:5.2f}  {cost.issue:5.2f}  {cost.in_flight / 1024:5.0f}"


if __name__ == "__main__":
    main()
