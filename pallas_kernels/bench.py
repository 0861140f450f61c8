"""``python -m pallas_kernels.bench``: bytes, kernels and modelled time of each op on real leaves; on a GPU, measured.

Without a GPU the programs are compiled ahead of time for a target GPU: bytes and kernel launches are counted from the
compiled program, instructions from the machine code, and the time is a model, the larger of memory and issue. The
model knows no latency, no launch cost and no cache, so it is a bound, not a prediction.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from pallas_kernels import backend, gpus, mosaic, sass, selfcheck, target_gpu
from pallas_kernels.program_bytes import moved_bytes

SHAPES = {
    "1b-mlp": (2048, 8192),
    "8b-mlp": (4096, 14336),
    "8b-embedding": (128256, 4096),
    "70b-attention": (8192, 8192),
    "70b-mlp": (8192, 28672),
}
"""Leaves of decoder models with 1, 8 and 70 billion parameters (Llama 3 widths)."""

INT8 = pk.QuantFormat(8, 128)
INT4 = pk.QuantFormat(4, 256)
INT4_TILED = pk.QuantFormat(4, 32, "float8_e4m3fn")
INT4_ROTATED = pk.QuantFormat(4, 64, rotate=32)
COUNT = 8


@dataclasses.dataclass(frozen=True)
class Op:
    """One row of the table.

    Attributes:
        name: what is measured.
        function: of arrays and the keyword ``implementation``.
        arguments: their shapes.
        plan: the kernel's plan, or None where there is no kernel.
        elements: of the leaf.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    plan: Any
    elements: int

    def ideal_bytes(self) -> int:
        """Every operand read once and every result written once."""
        out = jax.eval_shape(functools.partial(self.function, implementation="xla"), *self.arguments)
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves((self.arguments, out)))


def ops(shape: tuple[int, ...]) -> list[Op]:
    """The ops on one bfloat16 leaf: what one step of a quantised gather and a two-hop reduction does."""
    size = math.prod(shape)
    leaf = jax.ShapeDtypeStruct(shape, jnp.dtype("bfloat16"))
    rows = []
    for fmt in (INT8, INT4_TILED, INT4_ROTATED):
        plan = mosaic.plan_quantize(shape, leaf.dtype, None, (), fmt, False, False)
        rows.append(Op(f"quantize {fmt}", functools.partial(pk.quantize, fmt=fmt), (leaf,), plan, size))
    stochastic = {"rounding": "stochastic", "seed": 1, "with_residual": True}
    slices = functools.partial(pk.quantize_slices, dim=0, num_slices=COUNT, fmt=INT4_TILED, **stochastic)
    plan = mosaic.plan_quantize(shape, leaf.dtype, 0, (COUNT,), INT4_TILED, True, True)
    rows.append(Op("quantize_slices int4 +sr +residual", slices, (leaf,), plan, size))
    one = (shape[0] // COUNT, *shape[1:])

    def received(fmt: pk.QuantFormat) -> Any:
        cut = functools.partial(pk.quantize_slices, dim=0, num_slices=COUNT, implementation="xla", fmt=fmt)
        return jax.eval_shape(cut, leaf)

    part = size // COUNT
    rows.append(Op(f"dequantize {INT8}", pk.dequantize, (received(INT8),), None, size))
    plan = mosaic.plan_sum((1, COUNT), one, INT4_ROTATED, leaf.dtype, 1.0, clamp=True)
    rows.append(Op(f"dequantize {INT4_ROTATED}", pk.dequantize, (received(INT4_ROTATED),), plan, size))
    for fmt in (INT8, INT4_TILED):
        plan = mosaic.plan_sum((COUNT,), one, fmt, jnp.dtype("float32"), 1.0)
        rows.append(Op(f"dequantize_sum {COUNT}x {fmt}", pk.dequantize_sum, (received(fmt),), plan, part))
    for source, fmt in ((INT8, INT4_TILED), (INT4, INT4)):
        fused = functools.partial(pk.dequantize_sum_quantize, fmt=fmt)
        plan = mosaic.plan_sum_quantize((COUNT,), one, source, fmt, 1.0, False, None, False)
        rows.append(Op(f"dequantize_sum_quantize {COUNT}x {source} -> {fmt}", fused, (received(source),), plan, part))
    return [*rows, *_with_messages(leaf, one)]


def _with_messages(leaf: jax.ShapeDtypeStruct, one: tuple[int, ...]) -> list[Op]:
    """What the two sides of an all-to-all do: XLA writes one message a destination, a kernel payload and scales."""

    def send(x: jax.Array, implementation: backend.Implementation) -> Any:
        q = pk.quantize_slices(x, dim=0, num_slices=COUNT, implementation=implementation, fmt=INT8)
        return pk.pack_apart(q) if implementation == "mosaic_gpu" else pk.pack_bytes(q)

    def receive(payload: jax.Array, scales: jax.Array, implementation: backend.Implementation) -> pk.QuantizedArray:
        q = pk.unpack_bytes((payload, scales), format=INT8, shape=one, dtype="bfloat16")
        return pk.dequantize_sum_quantize(q, implementation=implementation, fmt=INT4_TILED)

    size = math.prod(leaf.shape)
    payload = INT8.num_blocks(size // COUNT) * INT8.block_bytes
    rest = INT8.message_bytes(size // COUNT) - payload
    received = tuple(jax.ShapeDtypeStruct((COUNT, width), jnp.uint8) for width in (payload, rest))
    sent = mosaic.plan_quantize(leaf.shape, leaf.dtype, 0, (COUNT,), INT8, False, False)
    fused = mosaic.plan_sum_quantize((COUNT,), one, INT8, INT4_TILED, 1.0, False, None, False)
    return [
        Op(f"quantize_slices {INT8}, messages", send, (leaf,), sent, size),
        Op(f"messages, d_sum_q {COUNT}x {INT8} -> {INT4_TILED}", receive, received, fused, size // COUNT),
    ]


def model(op: Op, implementation: str, gpu: str) -> str:
    """One row without a GPU: counts of the compiled program and the modelled time."""
    ideal, facts = op.ideal_bytes(), gpus.TARGETS[gpu]
    arrays, tree = jax.tree.flatten(op.arguments)
    call = lambda *arrays: op.function(*jax.tree.unflatten(tree, arrays), implementation=implementation)  # noqa: E731
    with sass.dumping() as place:
        compiled = target_gpu.compile_for(call, arrays, gpu)
        codes = sass.read(place, op.plan.programs.trips if op.plan and op.plan.programs else 1)
    total, kernels = moved_bytes(compiled.as_text())
    memory = total / facts.memory_bandwidth
    cells = [f"{ideal / 1e6:9.1f}", f"{total / 1e6:9.1f}", f"{total / ideal:5.2f}", f"{kernels:3d}"]
    if codes and codes[0].instructions is not None:
        per_element = codes[0].instructions_per_element(op.plan.programs) or 0.0
        issue = per_element * op.elements / sass.ISSUE_LANES / facts.core_count / (sass.sustained_ghz(facts) * 1e9)
        bound = "issue" if issue > memory else "memory"
        kernel = (codes[0].bytes_moved(op.plan.programs) or 0.0) / 1e6
        counted = f"{bound} ({per_element:.1f} instr/elem, {kernel:.1f} MB by machine code)"
        return "  ".join([*cells, f"{max(memory, issue) * 1e6:9.1f}", counted])
    return "  ".join([*cells, f"{memory * 1e6:9.1f}", "memory (instructions not counted)"])


MEASURED_HEAD = (
    "| leaf | op | ideal MB | XLA us | kernel us | kernel / XLA | kernel (else XLA) of a copy |\n"
    "|---|---|---|---|---|---|---|"
)


def measure(leaf: str, op: Op, copy_rate: float) -> str:
    """One row on the GPU at hand, as Markdown: times of XLA's program and of the kernel, and the rate of ideal bytes.

    Args:
        leaf: name of the leaf's shape.
        op: what is measured.
        copy_rate: bytes per second of a copy, read and written.
    """
    key, ideal = jax.random.key(0), op.ideal_bytes()

    def fill(a: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(a.dtype, jnp.integer):
            return jax.random.randint(key, a.shape, 0, 100, jnp.int32).astype(a.dtype)
        return jax.random.uniform(key, a.shape, jnp.float32, 0.5, 1.0).astype(a.dtype)

    arguments = jax.tree.map(fill, op.arguments)
    has_kernel = op.plan is not None and not op.plan.problems
    times = {}
    for implementation in ("xla", "mosaic_gpu") if has_kernel else ("xla",):
        call = jax.jit(functools.partial(op.function, implementation=implementation))
        try:
            times[implementation] = selfcheck.seconds(call, arguments)
        except Exception as error:  # a kernel that a GPU refuses is a row of the table, not its end
            times[implementation] = math.nan
            print(f"{op.name}, {implementation}: {type(error).__name__}: {error}", file=sys.stderr)
    xla, kernel = times["xla"], times.get("mosaic_gpu")
    cells = ["none", ""] if kernel is None else [f"{kernel * 1e6:.1f}", f"{kernel / xla:.2f}"]
    share = ideal / (xla if kernel is None else kernel) / copy_rate
    return f"| {leaf} | {op.name} | {ideal / 1e6:.1f} | {xla * 1e6:.1f} | {' | '.join(cells)} | {share:.0%} |"


def measured(shapes: Sequence[str]) -> Iterator[str]:
    """The table on the GPU at hand, line by line, to be pasted into an issue."""
    device = jax.local_devices()[0]
    block = jnp.zeros(1 << 28, jnp.float32)
    copy_rate = 2 * block.nbytes / selfcheck.seconds(jax.jit(lambda x: x + 1), (block,))
    yield f"{device.device_kind}, {device.client.platform_version}, JAX {jax.__version__}".replace("\n", " ")
    yield f"\nA copy of 1 GiB reads and writes {copy_rate / 1e9:.0f} GB/s.\n"
    yield MEASURED_HEAD
    for name in shapes:
        for op in ops(SHAPES[name]):
            yield measure(name, op, copy_rate)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["70b-attention"])
    parser.add_argument("--gpu", choices=gpus.TARGETS, default="h100", help="GPU to compile for if none is here")
    options = parser.parse_args(arguments)
    if not target_gpu.has_nvidia_gpu() and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")  # the CUDA plugin is here to compile, and would look for CUDA
    here = jax.devices()[0]
    on_gpu = here.platform == "gpu"
    if on_gpu:
        for line in measured(options.shapes):
            print(line, flush=True)
        return
    missing = target_gpu.plugin_missing()
    print(f"jax {jax.__version__}, {gpus.TARGETS[options.gpu].name} (absent)")
    if missing:
        print("ideal MB; nothing here is compiled or measured")
    else:
        print("ideal MB, moved MB, moved / ideal, kernels, modelled us, bound; nothing here is measured")
    for name in options.shapes:
        for op in ops(SHAPES[name]):
            if missing:
                print(f"{name:14s} {op.name:48s} {op.ideal_bytes() / 1e6:9.1f}", flush=True)
                continue
            backends = ["xla"] if op.plan is None or op.plan.problems else ["xla", "mosaic_gpu"]
            for implementation in backends:
                row = model(op, implementation, options.gpu)
                print(f"{name:14s} {op.name:48s} {implementation:10s} {row}", flush=True)
    print("Not known: times, and their share of a copy's bandwidth; there is no GPU here. Run it where there is one,")
    print("and paste what it prints into an issue.")
    if missing:
        print(f"Not known: bytes that the programs move, and their kernels: {missing}")


if __name__ == "__main__":
    main()
