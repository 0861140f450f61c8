"""Each kernel compiles for GPUs that are not there, and its machine code keeps the promises made for it.

The deviceless compile runs the assembler: registers, spills and instructions are those of the code that would run.
"""

import dataclasses
import functools
import math
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from kernel_formats import E4M3

import pallas_kernels as pk
from pallas_kernels import _compat, absent_gpu, mosaic_gpu, sass

pytestmark = pytest.mark.needs_cuda_plugin

Format = pk.BlockFormat
INT8 = Format(bits=8, block_size=128)
INT8_WIDE = Format(bits=8, block_size=2048)
INT4 = Format(bits=4, block_size=256)
INT4_TILED = Format(bits=4, block_size=32, scale_dtype=E4M3)
FP4_TILED = Format(bits=4, block_size=16, scale_dtype=E4M3, levels="e2m1")
INT8_ONE_BLOCK_A_TILE = Format(bits=8, block_size=1024, scale_dtype=E4M3)
FP4 = Format(bits=4, block_size=64, levels="e2m1")
ROTATED = Format(bits=8, block_size=128, rotate=32)
ROTATED_TILED = Format(bits=4, block_size=32, scale_dtype=E4M3, rotate=32)
ELEMENTS = 1 << 20
LEAST_IN_FLIGHT = 28 * 1024
"""Bytes that the programs of a multiprocessor read at a time: an H100 moves 25 a nanosecond and multiprocessor, and
they take somewhat less than a microsecond."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel variant: what is compiled and what is promised; ``issue`` is in memory times."""

    op: str
    fmt: pk.BlockFormat
    dtype: str = "bfloat16"
    stochastic: bool = False
    residual: bool = False
    slices: bool = False
    source: Any = None
    count: int = 0
    registers: int = 64
    issue: float = 1.0

    def __str__(self):
        extra = "".join(c for c, on in zip("srd", (self.stochastic, self.residual, self.slices), strict=True) if on)
        source = f"{self.count}x{described(self.source)}-" if self.source else ""
        return f"{self.op}-{source}{described(self.fmt)}-{self.dtype}{extra}"

    def function_and_shapes(self):
        kw = {"rounding": "stochastic", "seed": 3} if self.stochastic else {}
        if self.op != "sum":
            kw |= {**self.fmt.keywords(), "with_residual": self.residual}
        kw["implementation"] = "mosaic_gpu"
        if self.op == "quantize":
            x = jax.ShapeDtypeStruct((1024, ELEMENTS // 1024), jnp.dtype(self.dtype))
            op = functools.partial(pk.quantize_slices, dim=0, num_slices=(4, 2)) if self.slices else pk.quantize
            return functools.partial(op, **kw), [x]
        q = jax.eval_shape(
            lambda x: pk.quantize_slices(
                x, dim=0, num_slices=self.count, implementation="xla", **self.source.keywords()
            ),
            jax.ShapeDtypeStruct((self.count, ELEMENTS), jnp.float32),
        )
        op = functools.partial(pk.dequantize_sum, dtype=self.dtype) if self.op == "sum" else pk.dequantize_sum_quantize
        arrays, tree = jax.tree.flatten(q)
        return lambda *arrays: op(jax.tree.unflatten(tree, arrays), **kw), arrays

    def plan(self):
        shape, lead = (1, ELEMENTS), (self.count,)
        if self.op == "quantize":
            cut = (0, (4, 2)) if self.slices else (None, ())
            x = (1024, ELEMENTS // 1024)
            return mosaic_gpu.plan_quantize(x, self.dtype, *cut, self.fmt, self.stochastic, self.residual)
        if self.op == "sum":
            return mosaic_gpu.plan_sum(lead, shape, self.source, jnp.dtype(self.dtype), 1.0)
        return mosaic_gpu.plan_sum_quantize(
            lead, shape, self.source, self.fmt, 1.0, self.stochastic, None, self.residual
        )

    @property
    def ideal_bytes(self):
        """Per element: every input byte read once, every output byte written once."""
        width = jnp.dtype(self.dtype).itemsize
        read = self.count * self.source.bits_per_element / 8 if self.source else width
        write = width if self.op == "sum" else self.fmt.bits_per_element / 8
        return read + write + self.residual * (4 if self.source else width)


def described(fmt):
    return f"{fmt.bits}/{fmt.block_size}{fmt.levels[0]}{f'h{fmt.rotate}' if fmt.rotate else ''}"


CASES = [
    Case("quantize", INT8, "float32"),
    Case("quantize", INT8),
    Case("quantize", INT8_WIDE, "float32"),
    Case("quantize", INT8, stochastic=True),
    Case("quantize", INT4, "float16"),
    Case("quantize", Format(bits=4, block_size=16), stochastic=True),
    Case("quantize", INT4_TILED),
    Case("quantize", INT4_TILED, stochastic=True),
    Case("quantize", INT4_TILED, stochastic=True, residual=True, slices=True),
    Case("quantize", INT4, "float32", stochastic=True, residual=True, slices=True),
    Case("quantize", FP4_TILED),
    Case("quantize", FP4_TILED, "float32", stochastic=True, residual=True),
    Case("quantize", FP4_TILED, stochastic=True, residual=True),
    Case("quantize", FP4_TILED, stochastic=True, registers=80),
    Case("quantize", FP4, stochastic=True),
    Case("quantize", INT8_ONE_BLOCK_A_TILE),
    Case("quantize", INT8_WIDE, stochastic=True, residual=True, registers=80),
    Case("quantize", ROTATED),
    Case("quantize", ROTATED_TILED, "float32"),
    Case("quantize", Format(bits=4, block_size=64, rotate=32)),
    Case("quantize", Format(bits=8, block_size=256, rotate=64), stochastic=True, registers=72, issue=1.05),
    Case("quantize", Format(bits=8, block_size=1024, rotate=64), registers=72),
    Case("quantize", Format(bits=8, block_size=2048, rotate=64), registers=96),
    Case("quantize", ROTATED_TILED, stochastic=True, residual=True, slices=True),
    Case("sum", INT8, "float32", source=INT8, count=2),
    Case("sum", INT8, "float32", source=INT8, count=16, registers=96),
    Case("sum", INT8_WIDE, "float32", source=INT8_WIDE, count=8, registers=96),
    Case("sum", INT4_TILED, "float32", source=INT4_TILED, count=64, registers=96),
    Case("sum", FP4_TILED, source=FP4_TILED, count=8, registers=96),
    Case("sum", ROTATED, source=ROTATED, count=8, registers=96),
    Case("sum", ROTATED_TILED, source=ROTATED_TILED, count=8, registers=96),
    Case("sum_quantize", INT4_TILED, source=INT8, count=8, registers=96),
    Case("sum_quantize", INT4, source=INT4, count=8, registers=96),
    Case("sum_quantize", INT4_TILED, source=INT4_TILED, count=8, registers=96),
    Case("sum_quantize", INT8, source=INT8, count=16, registers=96),
    Case("sum_quantize", INT4_TILED, source=INT8_ONE_BLOCK_A_TILE, count=8, registers=96),
    Case("sum_quantize", INT4_TILED, source=INT8, count=8, stochastic=True, residual=True, registers=96),
    Case("sum_quantize", FP4_TILED, source=INT8, count=8, registers=96),
    Case("sum_quantize", ROTATED_TILED, source=ROTATED, count=8, registers=96),
    Case("sum_quantize", ROTATED_TILED, source=ROTATED, count=8, stochastic=True, residual=True, registers=96),
]


def compiled_code(case, gpu):
    """The compiled program and the kernels it had to compile (none if an equal one was compiled before)."""
    function, shapes = case.function_and_shapes()
    with sass.dumping() as place:
        compiled = absent_gpu.compile_for(function, shapes, gpu)
        return compiled, sass.read(place, case.plan().programs.trips)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_h100_no_spills_few_registers_wide_loads_ideal_bytes_and_memory_bound(case):
    compiled, (code,) = compiled_code(case, "h100")
    assert (compiled.as_text() or "").count("mosaic_gpu") >= 1
    assert code.spill_bytes == 0
    assert code.registers <= case.registers
    programs = case.plan().programs
    # The last program of a run overlaps its neighbour.
    assert ELEMENTS <= programs.count * programs.elements <= 1.1 * ELEMENTS
    if sass.disassembler_missing():
        pytest.skip(f"registers and spills checked; the rest needs machine code: {sass.disassembler_missing()}")
    if case.op == "quantize":
        # Every load of the leaf is 16 bytes wide, and they add up to each element once.
        width = jnp.dtype(case.dtype).itemsize
        assert code.loads["LD.E.128"] * 16 * sass.THREADS == programs.elements * width
        assert set(code.loads) <= {"LD.E.128", "LDG.E"}
        assert code.resident_programs * programs.elements * width >= LEAST_IN_FLIGHT
    if case.op == "sum_quantize" and not case.residual and case.fmt.bits == 4 and case.fmt.block_size >= 32:
        assert {"LD.E.128"} <= set(code.loads)
    ideal = case.ideal_bytes * ELEMENTS
    assert 0.99 * ideal <= (code.bytes_moved(programs) or 0.0) <= 1.1 * ideal
    h100 = absent_gpu.GPUS["h100"]
    memory, issue = sass.bound(h100, case.ideal_bytes, code.instructions_per_element(programs) or math.inf)
    assert issue <= case.issue * memory, f"{issue:.3f} clocks per element to issue, {memory:.3f} to move its bytes"


@pytest.mark.skipif(not _compat.MOSAIC_ON_AMPERE, reason="Mosaic GPU kernels need JAX 0.11 on Ampere")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a100_no_spills(case):
    compiled, (code,) = compiled_code(case, "a100")
    assert "mosaic_gpu" in (compiled.as_text() or "")
    assert code.spill_bytes == 0


def test_what_is_compiled_for_h100_is_the_machine_code_of_h200():
    assert absent_gpu.GPUS["h200"].major == absent_gpu.GPUS["h100"].major
    compiled, _ = compiled_code(CASES[8], "h200")
    assert "mosaic_gpu" in (compiled.as_text() or "")


def test_on_b200_no_spills():
    # In a process of its own: after a kernel for an older architecture the assembler refuses a newer one.
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import test_kernels_compiled as t\n"
        "for case in t.CASES:\n"
        "    (code,) = t.compiled_code(case, 'b200')[1]\n"
        "    print(code.spill_bytes, code.registers)\n"
    )
    here = pathlib.Path(__file__)
    command = [sys.executable, "-c", program, str(here.parent), str(here.parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = [tuple(map(int, line.split())) for line in done.stdout.splitlines() if line.count(" ") == 1]
    assert len(counts) == len(CASES)
    assert all(spills == 0 and registers <= 128 for spills, registers in counts), counts
