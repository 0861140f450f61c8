"""The step that would run, compiled for GPUs that are not there, and read.

Nothing is specific to planning here but two things: the state and the batch are shapes, and the compiler is told not to
look for the fastest kernels, since there is no GPU to time them on. Knows nothing of what is reported.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.compiled_program import CompiledProgram, read_program
from zerojax.layout import Layout
from zerojax.optimizer import zero
from zerojax.plan_models import Subject
from zerojax.train_state import TrainState
from zerojax.train_step import make_train_step

# Fewer passes over machine code that nobody will run, and no search for the fastest kernels on a GPU that is not there:
# half of the compile time. Collectives, schedule and memory are the same.
_OPTIONS: dict[str, str | bool] = {"xla_gpu_autotune_level": "0", "xla_backend_optimization_level": "0"}


def lower_step(subject: Subject, layout: Layout, *, microbatches: int) -> jax.stages.Lowered:
    """Traces one training step of a subject under a layout, ready to be compiled.

    Args:
        subject: loss, optimizer and global shapes.
        layout: the layout, on a mesh of absent GPUs.
        microbatches: as for `zerojax.make_train_step`.

    Raises:
        ValueError: a batch or loss that the step cannot take.
    """
    over, nowhere = PartitionSpec(layout.config.axes), PartitionSpec()
    batch = jax.tree.map(lambda x: _on(layout, x, over if x.shape else nowhere), subject.batch)
    rest = jax.tree.map(lambda x: _on(layout, x, nowhere), subject.rest)
    tx = zero(subject.tx, layout)
    state = TrainState.create(layout.param_shapes(), tx, layout)
    step = make_train_step(
        subject.loss_fn, tx, layout, microbatches=microbatches, has_aux=subject.has_aux, weighted=subject.weighted
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


def _on(layout: Layout, x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(layout.mesh, spec))
