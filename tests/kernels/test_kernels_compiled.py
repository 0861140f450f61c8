"""Each kernel compiles ahead of time for target GPUs, and its machine code keeps the promises made for it.

The deviceless compile runs the assembler: registers, spills and instructions are those of the code that would run.
"""

import dataclasses
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from kernel_formats import FP4, FP4_TILED, INT4, INT4_TILED, INT8, INT8_ONE_BLOCK_A_TILE, ROTATED, ROTATED_TILED

from pallas_kernels import QuantFormat, _compat, gpus, sass, survey, target_gpu

pytestmark = pytest.mark.needs_cuda_plugin
AOT = pytest.mark.aot

INT8_WIDE = QuantFormat(8, 2048)
LEAST_IN_FLIGHT = 32 * 1024
"""Bytes that the programs of a multiprocessor read at a time: an H100 moves 25 a nanosecond and multiprocessor, and
they take somewhat less than a microsecond."""


@dataclasses.dataclass(frozen=True)
class Case(survey.Variant):
    """A variant and what is promised of it; ``issue`` is in memory times."""

    registers: int = 64
    issue: float = 1.0


CASES = [
    Case("quantize", INT8, "float32"),
    Case("quantize", INT8),
    Case("quantize", INT8_WIDE, "float32"),
    Case("quantize", INT8, stochastic=True),
    Case("quantize", INT4, "float16"),
    Case("quantize", QuantFormat(4, 16), stochastic=True),
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
    Case("quantize", QuantFormat(4, 64, rotate=32)),
    Case("quantize", QuantFormat(8, 256, rotate=64), stochastic=True, registers=72, issue=1.05),
    Case("quantize", QuantFormat(8, 1024, rotate=64), registers=72),
    Case("quantize", QuantFormat(8, 2048, rotate=64), registers=96),
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


APART = survey.Variant("quantize", QuantFormat(8, 64), "float32")
"""No case, and of tests that read no code: a process dumps the code of a kernel once, whichever test comes first."""


# One of each op in the first tier: what ZeRO++ sends by default.
REPRESENTATIVES = ("quantize", INT8), ("sum", INT8), ("sum_quantize", INT4_TILED)


def in_tiers(cases):
    """Cases of which the first of each representative kind is in the first tier."""
    first = [next(case for case in cases if (case.op, case.fmt) == kind) for kind in REPRESENTATIVES]
    return [pytest.param(case, id=str(case), marks=() if case in first else AOT) for case in cases]


@pytest.mark.parametrize("case", in_tiers(CASES))
def test_on_h100_no_spills_few_registers_wide_loads_ideal_bytes_and_memory_bound(case):
    compiled, (code,) = case.compile("h100")
    assert (compiled.as_text() or "").count("mosaic_gpu") >= 1
    assert code.spill_bytes == 0
    assert code.registers <= case.registers
    programs = case.plan().programs
    # The last program of a run overlaps its neighbour.
    assert survey.ELEMENTS <= programs.count * programs.elements <= 1.1 * survey.ELEMENTS
    if sass.disassembler_missing():
        pytest.skip(f"registers and spills checked; the rest needs machine code: {sass.disassembler_missing()}")
    cost = survey.cost(case, code, "h100")
    if case.op == "quantize":
        # Every load of the leaf is 16 bytes wide, and they add up to each element once.
        assert code.loads["LD.E.128"] * 16 * sass.THREADS == programs.elements * case.bytes_read
        assert set(code.loads) <= {"LD.E.128", "LDG.E"}
        assert cost.in_flight >= LEAST_IN_FLIGHT
    if case.op == "sum_quantize" and not case.residual and case.fmt.bits == 4 and case.fmt.block_size >= 32:
        assert {"LD.E.128"} <= set(code.loads)
    assert 0.99 <= cost.moved <= 1.1
    assert cost.issue <= case.issue


@AOT
def test_what_is_compiled_for_h100_is_the_machine_code_of_h200():
    assert gpus.TARGETS["h200"].compute_capability == gpus.TARGETS["h100"].compute_capability
    compiled, _ = APART.compile("h200")
    assert "mosaic_gpu" in (compiled.as_text() or "")


@AOT
@pytest.mark.parametrize("gpu", ["a100", "b200"])
def test_on_other_generations_no_spills(gpu):
    # In a process of its own: the assembler of a process keeps to the generation of the first kernel.
    if gpu == "a100" and not _compat.MOSAIC_ON_AMPERE:
        pytest.skip("Mosaic GPU kernels need JAX 0.11 on Ampere")
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import test_kernels_compiled as t\n"
        "for case in t.CASES[::3]:\n"
        f"    (code,) = case.compile({gpu!r})[1]\n"
        "    print(code.spill_bytes, code.registers)\n"
    )
    here = pathlib.Path(__file__)
    command = [sys.executable, "-c", program, str(here.parent), str(here.parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = [tuple(map(int, line.split())) for line in done.stdout.splitlines() if line.count(" ") == 1]
    assert len(counts) == len(CASES[::3])
    assert all(spills == 0 and registers <= 128 for spills, registers in counts), counts


@pytest.mark.skipif(not _compat.ONE_ASSEMBLER_A_PROCESS, reason="this jaxlib assembles for each target as told")
def test_a_second_generation_in_one_process_is_refused_by_name_not_by_the_assembler():
    assert "mosaic_gpu" in (APART.compile("h100")[0].as_text() or "")
    for gpu in ("a100", "b200"):
        with pytest.raises(RuntimeError, match=rf"kernels for compute capability 9.x.*{gpu}.*process of its own"):
            APART.compile(gpu)
        # Programs without kernels are assembled as told.
        shape = jax.ShapeDtypeStruct((64,), jnp.float32)
        assert target_gpu.compile_for(lambda x: x + 1, [shape], gpu).as_text()


@AOT
def test_the_survey_prints_a_row_a_variant_and_the_worst(capsys):
    survey.main(["--only", "e2m1/128-e4m3-bfloat16", "--gpu", "h100"])
    head, *rows, worst = capsys.readouterr().out.splitlines()
    assert "H100" in head
    names = [str(v) for v in survey.variants("quantize") if "e2m1/128-e4m3-bfloat16" in str(v)]
    assert len(names) == 4
    assert [row.split()[0] for row in rows] == names
    assert worst.startswith("worst of 4")
    assert int(worst.split()[3]) == max(int(row.split()[1]) for row in rows)
