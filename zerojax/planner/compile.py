"""The step that would run, compiled ahead of time for a target GPU, and the largest microbatch that fits.

Nothing is specific to planning here but two things: the state and the batch are shapes, and the compiler is told not to
look for the fastest kernels, since there is no GPU to time them on.

Memory is close to a straight line in the examples of a microbatch, and convex: each further example can only bring more
that is alive at once. The line through two sizes therefore errs to the safe side between them, and is trusted up to so
many times the larger of the two. Near the bound the compiler may save more than the line says (it recomputes, or fuses
otherwise), so that the step at the size found fits and a little more may.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.hlo.program import CompiledProgram, read_program
from zerojax.layout.layout import Layout
from zerojax.optimizer.zero import zero
from zerojax.planner.records import Largest
from zerojax.planner.workload import Workload
from zerojax.training.compiler_options import compiler_options
from zerojax.training.state import TrainState
from zerojax.training.step import make_train_step

# Fewer passes over machine code that nobody will run, and no search for the fastest kernels, which needs a GPU:
# half of the compile time. Collectives, schedule and memory are the same. Products by Triton, by default: those of
# the library (xla_gpu_enable_triton_gemm=false) carry no JAX names on 0.10, which scopes of fused kernels
# need; the step is 5 % slower to 7 % faster by them, and compiles 0.9 to 1.5 times as fast (18B with 16 examples 36
# against 32 s of processor time, 7B with 6 examples 12 against 17 s; JAX 0.12).
_OPTIONS: dict[str, str | bool] = {"xla_gpu_autotune_level": "0", "xla_backend_optimization_level": "0"}
_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"


def lower_step(workload: Workload, layout: Layout, *, microbatches: int) -> jax.stages.Lowered:
    """Traces one training step of a workload under a layout, ready to be compiled.

    Args:
        workload: loss, optimizer and global shapes.
        layout: the layout, on a mesh of target GPUs.
        microbatches: as for `zerojax.make_train_step`.

    Raises:
        ValueError: a batch or loss that the step cannot take.
    """
    over, nowhere = PartitionSpec(layout.config.axes), PartitionSpec()
    batch = jax.tree.map(lambda x: _on(layout, x, over if x.shape else nowhere), workload.batch)
    rest = jax.tree.map(lambda x: _on(layout, x, nowhere), workload.rest)
    tx = zero(workload.tx, layout)
    state = TrainState.create(layout.param_shapes(), tx, layout)
    step = make_train_step(
        workload.loss_fn, tx, layout, microbatches=microbatches, has_aux=workload.has_aux, weighted=workload.weighted
    )
    return step.lower(state, batch, *rest)


def compile_step(lowered: jax.stages.Lowered, layout: Layout, *, num_nodes: int) -> tuple[CompiledProgram | None, str]:
    """Compiles and reads a step; several may be compiled at once, in threads.

    Args:
        lowered: from `lower_step`.
        layout: the layout it was traced under.
        num_nodes: machines, for counting what enters a node where one data axis spans them all.

    Returns:
        The program as read, or None and the reason why the compiler refused the step.
    """
    try:
        compiled = lowered.compile(compiler_options=_OPTIONS)
    except jax.errors.JaxRuntimeError as error:
        return None, f"the compiler refused the step: {str(error).strip().splitlines()[0]}"
    axes = layout.config.axes
    if len(axes) == 2:
        return read_program(compiled, layout.mesh, node_axes=axes[:1]), ""
    # A flat axis runs through the nodes one after the other.
    inner = {name: size for name, size in layout.mesh.shape.items() if name not in axes}
    sizes = {"node": num_nodes, "local": layout.num_shards // num_nodes, **inner}
    return read_program(compiled, sizes, node_axes=("node",)), ""


def overlap_limit(layout: Layout) -> int:
    """Collectives that may be under way at once in a step as the runtime compiles it; one by XLA's default."""
    return int(compiler_options(layout).get(_LIMIT, 1))


def _on(layout: Layout, x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(layout.mesh, spec))


# The second size at least; the compiler takes longer the more ways there are to cut a batch into tiles.
SPAN = 4
# A line is trusted up to so many times the larger microbatch that it was drawn through.
_FAR = 6


def line_through(sizes: Sequence[tuple[int, int]], capacity: int) -> tuple[Largest, int | None]:
    """The largest microbatch by a line through the last two sizes.

    Args:
        sizes: (examples, bytes in all) of the steps compiled, each of more examples than the one before.
        capacity: bytes that may be used.

    Returns:
        What was found; and where the line leads too far beyond its points, the examples to compile at next.

    >>> line_through([(1, 30), (8, 100)], capacity=205)[0].examples  # 20 bytes and 10 for each example
    18
    >>> line_through([(1, 30), (8, 100)], capacity=2020)[1]
    200
    """
    (few, least), (many, most) = sizes[-2:]
    per_example = (most - least) / (many - few)
    compiled = ", ".join(str(size) for size, _ in sizes)
    method = f"line through compiles at {compiled} examples: {per_example / 1e9:.3g} GB per example"
    if per_example <= 0:
        fitting = max((size for size, held in sizes if held <= capacity), default=0)
        return Largest(fitting, method + ", no bound found"), None
    examples = max(0, math.floor(many + (capacity - most) / per_example))
    return Largest(examples, method), examples if len(sizes) < 3 and examples > _FAR * many else None
