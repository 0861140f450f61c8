"""``python -m pallas_kernels.survey``: what the machine code of every variant of a kernel costs, without a GPU.

A variant is an op with formats, dtype, rounding and residual. Each is compiled for an absent GPU, and its registers,
spills, instructions and bytes are counted (`sass`). What the counts mean for time is a model: `bound`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import absent_gpu, gpus, mosaic, ops, sass
from pallas_kernels.array import TILE, QuantFormat
from pallas_kernels.backend import Plan

ELEMENTS = 1 << 20
"""Of a leaf, or of each contribution to a sum."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kernel.

    Attributes:
        op: which.
        fmt: the format written; of a plain sum, that of the contributions.
        dtype: of the leaf, or of the sum.
        stochastic: rounding.
        residual: whether it is written too.
        slices: whether the leaf is cut into slices for 4 x 2 destinations.
        source: format of the contributions to a sum.
        count: contributions.
    """

    op: Literal["quantize", "sum", "sum_quantize"]
    fmt: QuantFormat
    dtype: str = "bfloat16"
    stochastic: bool = False
    residual: bool = False
    slices: bool = False
    source: Any = None
    count: int = 0

    def __str__(self) -> str:
        extra = "".join(c for c, on in zip("srd", (self.stochastic, self.residual, self.slices), strict=True) if on)
        source = f"{self.count}x{self.source}-" if self.source else ""
        return f"{self.op}-{source}{self.fmt}-{self.dtype}{extra}"

    @property
    def leaf(self) -> tuple[int, int]:
        """Shape of what is quantised."""
        return 1024, ELEMENTS // 1024

    def function_and_shapes(self) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
        """The op as a function of arrays, and their shapes."""
        how: dict[str, Any] = {"rounding": "stochastic", "seed": 3} if self.stochastic else {}
        if self.op != "sum":
            how |= {"fmt": self.fmt, "with_residual": self.residual}
        how["implementation"] = "mosaic_gpu"
        if self.op == "quantize":
            cut = functools.partial(ops.quantize_slices, dim=0, num_slices=(4, 2))
            op = cut if self.slices else ops.quantize
            return functools.partial(op, **how), [jax.ShapeDtypeStruct(self.leaf, jnp.dtype(self.dtype))]
        cut = functools.partial(ops.quantize_slices, dim=0, num_slices=self.count, implementation="xla")
        whole = jax.ShapeDtypeStruct((self.count, ELEMENTS), jnp.float32)
        arrays, tree = jax.tree.flatten(jax.eval_shape(functools.partial(cut, fmt=self.source), whole))
        if self.op == "sum":
            reduced: Any = functools.partial(ops.dequantize_sum, dtype=self.dtype)
        else:
            reduced = ops.dequantize_sum_quantize
        return lambda *arrays: reduced(jax.tree.unflatten(tree, arrays), **how), arrays

    def plan(self) -> Plan:
        """The kernel's plan."""
        shape, lead = (1, ELEMENTS), (self.count,)
        if self.op == "quantize":
            cut = (0, (4, 2)) if self.slices else (None, ())
            return mosaic.plan_quantize(self.leaf, self.dtype, *cut, self.fmt, self.stochastic, self.residual)
        if self.op == "sum":
            return mosaic.plan_sum(lead, shape, self.source, jnp.dtype(self.dtype), 1.0)
        return mosaic.plan_sum_quantize(lead, shape, self.source, self.fmt, 1.0, self.stochastic, None, self.residual)

    @property
    def bytes_read(self) -> float:
        """Per element: every input byte once."""
        return self.count * self.source.bits_per_element / 8 if self.source else jnp.dtype(self.dtype).itemsize

    @property
    def ideal_bytes(self) -> float:
        """Per element: every input byte read once, every output byte written once."""
        width = jnp.dtype(self.dtype).itemsize
        written = width if self.op == "sum" else self.fmt.bits_per_element / 8
        return self.bytes_read + written + self.residual * (4 if self.source else width)

    def compile(self, gpu: str) -> tuple[Any, list[sass.KernelCode]]:
        """The compiled program, and its kernels' code: none for a kernel that the process compiled before."""
        function, shapes = self.function_and_shapes()
        programs = self.plan().programs
        with sass.dumping() as place:
            compiled = absent_gpu.compile_for(function, shapes, gpu)
            return compiled, sass.read(place, programs.trips if programs else 1)


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
    if missing := absent_gpu.plugin_missing() or sass.disassembler_missing():
        parser.error(missing)
    if not absent_gpu.has_nvidia_gpu():
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
