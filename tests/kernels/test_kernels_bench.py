"""The bench counts what the documentation states: bytes over ideal, launches, and what a message costs."""

import re

import jax
import pytest

from pallas_kernels import bench, target_gpu

pytestmark = pytest.mark.aot
SHAPE = (2048, 8192)
OPS = {op.name: op for op in bench.ops(SHAPE)}


def counted(name, implementation):
    """``(moved / ideal, launches)`` of a row."""
    row = bench.model(OPS[name], implementation, "h100")
    return float(row.split()[2]), int(row.split()[3])


@pytest.mark.parametrize(
    "name",
    [
        "quantize int8/128",
        "dequantize int4/64-rotated32",
        "dequantize_sum 8x int4/32-e4m3",
        "dequantize_sum_quantize 8x int8/128 -> int4/32-e4m3",
    ],
)
def test_a_kernel_is_one_launch_of_the_ideal_bytes_and_xla_needs_more(name):
    assert counted(name, "mosaic_gpu") == (1.0, 1)
    ratio, launches = counted(name, "xla")
    assert ratio > 1
    assert launches > 1


def test_xla_dequantises_ideally_without_a_kernel():
    assert OPS["dequantize int8/128"].plan is None
    assert counted("dequantize int8/128", "xla") == (1.0, 1)


def test_messages_cost_a_kernel_a_copy_of_the_scales_alone():
    for name in (name for name in OPS if "messages" in name):
        ratio, launches = counted(name, "mosaic_gpu")
        assert launches == 2
        assert ratio <= 1.04  # a scale of two bytes for 128 of payload, read once and written once
        assert counted(name, "xla")[0] > 1.5


def test_the_table_says_that_nothing_was_measured(capsys, monkeypatch):
    monkeypatch.setattr(bench, "ops", lambda shape: [OPS["quantize int8/128"]])
    bench.main(["--shapes", "1b-mlp", "--gpu", "h200"])
    printed = capsys.readouterr().out
    assert target_gpu.GPUS["h200"].name + " (absent)" in printed
    assert "nothing here is measured" in printed
    rows = [line for line in printed.splitlines() if line.startswith("1b-mlp")]
    assert [re.split(r"\s{2,}", row)[2].strip() for row in rows] == ["xla", "mosaic_gpu"]


def test_without_the_compiler_it_says_what_it_cannot_know(capsys, monkeypatch):
    monkeypatch.setattr(bench, "ops", lambda shape: [OPS["quantize int8/128"]])
    monkeypatch.setattr(target_gpu, "plugin_missing", lambda: "no plugin: pip install it")
    bench.main(["--shapes", "1b-mlp"])
    printed = capsys.readouterr().out
    assert "nothing here is compiled or measured" in printed
    elements = SHAPE[0] * SHAPE[1]
    (row,) = [line for line in printed.splitlines() if line.startswith("1b-mlp")]
    # Two bytes read, one written and a scale of two bytes for each block.
    assert float(row.split()[-1]) == pytest.approx(elements * (3 + 2 / 128) / 1e6, abs=0.1)
    for said in ("Not known: times", "Run it where there is one", "no plugin: pip install it"):
        assert said in printed


def test_what_a_gpu_measures_is_a_table_to_be_pasted(monkeypatch):
    times = iter([1.0, *[2e-6, 1e-6] * len(OPS)])
    monkeypatch.setattr(bench.selfcheck, "seconds", lambda function, arguments: next(times))
    monkeypatch.setattr(bench, "ops", lambda shape: [OPS["quantize int8/128"], OPS["dequantize int8/128"]])
    head, copy, columns, kernel, none = bench.measured(["1b-mlp"])
    assert jax.__version__ in head
    assert "reads and writes 2 GB/s" in copy
    cells = [line.split("|")[1:-1] for line in (*columns.splitlines(), kernel, none)]
    assert {len(row) for row in cells} == {7}
    assert [c.strip() for c in cells[2][3:6]] == ["2.0", "1.0", "0.50"]
    assert [c.strip() for c in cells[3][3:6]] == ["2.0", "none", ""]


def test_a_kernel_that_a_gpu_refuses_is_a_row_and_not_the_end(monkeypatch, capsys):
    def refuse(function, arguments):
        if function.__wrapped__.keywords["implementation"] == "mosaic_gpu":
            raise RuntimeError("no such instruction")
        return 1e-6

    monkeypatch.setattr(bench.selfcheck, "seconds", refuse)
    assert "| 1.0 | nan | nan |" in bench.measure("1b-mlp", OPS["quantize int8/128"], 1e12)
    assert "quantize int8/128, mosaic_gpu: RuntimeError: no such instruction" in capsys.readouterr().err
