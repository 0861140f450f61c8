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

# Saves a third of the compile time; collectives and memory are the same.
_OPTIONS = {"xla_gpu_autotune_level": "0"}


def compile_step(
    subject: Subject, layout: Layout, *, microbatches: int, num_nodes: int
) -> tuple[CompiledProgram | None, str]:
    """Compiles one training step of a subject under a layout.

    Args:
        subject: loss, optimizer and global shapes.
        layout: the layout, on a mesh of absent GPUs.
        microbatches: as for `zerojax.make_train_step`.
        num_nodes: machines, for counting what enters a node where one data axis spans them all.

    Returns:
        The program as read, or None and the reason why the compiler refused the step.

    Raises:
        ValueError: a batch or loss that the step cannot take.
    """
    axes = layout.config.axes
    over, nowhere = PartitionSpec(axes), PartitionSpec()
    batch = jax.tree.map(lambda x: _on(layout, x, over if x.shape else nowhere), subject.batch)
    rest = jax.tree.map(lambda x: _on(layout, x, nowhere), subject.rest)
    tx = zero(subject.tx, layout)
    state = TrainState.create(layout.param_shapes(), tx, layout)
    step = make_train_step(
        subject.loss_fn, tx, layout, microbatches=microbatches, has_aux=subject.has_aux, weighted=subject.weighted
    )
    lowered = step.lower(state, batch, *rest)
    try:
        compiled = lowered.compile(compiler_options=_OPTIONS)
    except jax.errors.JaxRuntimeError as error:
        return None, f"the compiler refused the step: {str(error).strip().splitlines()[0]}"
    if len(axes) == 2:
        return read_program(compiled, layout.mesh, node_axes=axes[:1]), ""
    # A flat axis runs through the nodes one after the other.
    inner = {name: size for name, size in layout.mesh.shape.items() if name not in axes}
    sizes = {"node": num_nodes, "local": layout.num_shards // num_nodes, **inner}
    return read_program(compiled, sizes, node_axes=("node",)), ""


def _on(layout: Layout, x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(layout.mesh, spec))
