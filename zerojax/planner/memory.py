"""Memory of a configuration by class: predicted from placements, next to the compiled program's own figures.

Model states are parameters, gradients and optimizer state (arXiv 1910.02054, section 3.1). With Ψ bfloat16 parameters
and Adam with master weights, N replicas hold 16Ψ; 4Ψ + 12Ψ/N; 2Ψ + 14Ψ/N; 16Ψ/N bytes each at stages 0 to 3 (section
5); here the same sum runs over the leaves as they are stored, with their padding, the small ones replicated, and split
over the user's other mesh axes too. The prediction must meet the compiler's count of the program's arguments. Gradients
and the secondary partition live among the program's temporaries; what remains of those are activations, gathered
weights and workspace.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import optax

from zerojax.gather.uses import LeafUse
from zerojax.gradients.inputs import local_shapes
from zerojax.gradients.wire import init_wire_state
from zerojax.hlo.program import MemoryFigures
from zerojax.layout.layout import Layout
from zerojax.layout.placement import Placement
from zerojax.optimizer.zero import placements_of_state, zero
from zerojax.planner.records import Memory, Replicated
from zerojax.planner.traffic import secondary_bytes
from zerojax.planner.workload import is_offloaded, without_sharding
from zerojax.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Bytes that one device holds, by class of model state.

    Attributes:
        params: parameters in stored form.
        grads: gradients in the dtype of their parameter: full while the backward pass runs at stages 0 and 1 (stage
            1 returns shards, but all full gradients exist before they are reduced), shards at stages 2 and 3.
        master: wider copies of the parameters, in the optimizer state.
        moments: all else in the optimizer state: moments, histories, counters.
    """

    params: int
    grads: int
    master: int
    moments: int

    @property
    def optimizer(self) -> int:
        """The full optimizer state."""
        return self.master + self.moments

    @property
    def total(self) -> int:
        """All model states."""
        return self.params + self.grads + self.optimizer


@dataclasses.dataclass(frozen=True)
class ModelStateBytes:
    """The model states of one device under a layout, and without it.

    Attributes:
        per_device: what each device holds, padding included.
        padding: the bytes of `per_device` that are padding, on the average device (in truth the last shards hold it).
        data_parallel: what each device would hold under plain data parallelism: every leaf in full, but for its split
            over mesh axes that are not data axes.
    """

    per_device: StateBytes
    padding: StateBytes
    data_parallel: StateBytes


def model_state_bytes(layout: Layout, tx: optax.GradientTransformation) -> ModelStateBytes:
    """Predicts the bytes of the model states on each device.

    Args:
        layout: the layout of the parameters; its mesh may be a `jax.sharding.AbstractMesh`, or of target GPUs.
        tx: the optimizer, `zerojax.zero(..., layout)` or the optax transformation that it wraps.

    Raises:
        ValueError: `tx` belongs to another layout, or `zero` is inside a chain.

    >>> import jax.numpy as jnp, zerojax
    >>> mesh = jax.sharding.AbstractMesh((64,), ("data",))  # no device is needed
    >>> model = {"w": jax.ShapeDtypeStruct((7_500, 1_000_000), jnp.bfloat16)}  # 7.5B parameters
    >>> layout = zerojax.partition(model, mesh, zerojax.ZeroConfig(stage=1, axes="data"))
    >>> held = model_state_bytes(layout, optax.adam(1e-3))
    >>> f"{held.per_device.total / 1e9:.1f} GB instead of {held.data_parallel.total / 1e9:.0f} GB"
    '31.4 GB instead of 120 GB'
    """
    classes = _state_classes(layout, tx)
    held = {name: sum(_bytes(p, layout, layout.stage >= first) for p in ps) for name, (ps, first) in classes.items()}
    full = {name: sum(_bytes(p, layout, False) for p in ps) for name, (ps, _) in classes.items()}
    padding = {
        name: sum(_padding_bytes(p, layout) for p in ps) if layout.stage >= first else 0
        for name, (ps, first) in classes.items()
    }
    return ModelStateBytes(StateBytes(**held), StateBytes(**padding), StateBytes(**full))


def _state_classes(layout: Layout, tx: optax.GradientTransformation) -> dict[str, tuple[list[Placement], int]]:
    """Placements of each class of model state, and the stage from which on it is sharded (arXiv 1910.02054, fig. 1)."""
    state = placements_of_state(tx, layout)
    return {
        "params": (list(layout.leaves), 3),
        "grads": ([p for p in layout.leaves if p.trainable], 2),
        "master": (jax.tree.leaves(state.master), 1),
        "moments": (jax.tree.leaves(state.inner), 1),
    }


def _bytes(p: Placement, layout: Layout, sharded: bool) -> int:
    """Bytes of one device's part, over all axes of the mesh."""
    if sharded:
        part = layout.shard_sharding(p).shard_shape(p.padded_shape)
    else:
        part = layout.full_sharding(p).shard_shape(p.shape)
    return math.prod(part) * p.dtype.itemsize


def _padding_bytes(p: Placement, layout: Layout) -> int:
    """The padding of a leaf, divided by the number of shards."""
    if not p.padding:
        return 0
    padded = _bytes(p, layout, True)
    return padded - padded * p.shape[p.dim or 0] // p.padded_shape[p.dim or 0]


Tree = Any
# XLA rounds each buffer up to a whole number of these.
_ALIGNMENT = 256


def plan_memory(
    layout: Layout,
    tx: optax.GradientTransformation,
    batch: Tree,
    rest: tuple[Any, ...],
    uses: list[tuple[LeafUse, ...]],
    compiled: MemoryFigures | None,
    capacity: int,
    *,
    within: int = 0,
    scopes: Sequence[str] = (),
) -> Memory:
    """Memory of one device.

    Args:
        layout: the layout.
        tx: the optimizer, not wrapped.
        batch: global shapes of the batch.
        rest: shapes of the further arguments of the loss.
        uses: from `zerojax.gather.uses`.
        compiled: figures of the compiled step, or None.
        capacity: bytes that may be used.
        within: bytes of the compiled temporaries that lie within fused kernels, and are not counted.
        scopes: the names of those kernels.
    """
    state = model_state_bytes(layout, tx).per_device
    local, host = _batch_bytes(layout, batch, rest)
    wire = init_wire_state(layout, abstract=True)
    arguments = {
        "params": state.params,
        "master": state.master,
        "moments": state.moments,
        "error_feedback": sum(map(_own_bytes, jax.tree.leaves(wire and wire.feedback))),
        "replica": sum(map(_own_bytes, jax.tree.leaves(wire and wire.replica))),
        "batch": local + _counter_bytes(layout),
    }
    inside = {"grads": state.grads, "secondary": secondary_bytes(layout, uses)}
    predicted = sum(arguments.values())
    if compiled is None:
        why = "activations, temporaries and gathered weights are not in the total: they are the compiler's"
        classes = {**arguments, **inside}
        return Memory(classes, sum(classes.values()), capacity, None, predicted, 0, why, host)
    # Devices of a target topology have one memory: the compiler counts arguments in host memory as the device's.
    difference = compiled.argument - host - predicted
    activations = compiled.temp - within - sum(inside.values())
    output = compiled.output - compiled.alias
    classes = {
        **arguments, **inside, "activations": max(activations, 0), "code": compiled.generated_code,
        "outputs": max(output, 0),
    }  # fmt: skip
    number = len(jax.tree.leaves(layout.placements)) * 4
    state_bytes = predicted - arguments["batch"]
    why = _explain(difference, predicted, state_bytes, number, compiled, activations)
    if host:
        why += f"; {host:,} bytes of arguments wait in host memory and are left out of the compiler's count"
    if within:
        why += (
            f"; {within:,} bytes of temporaries are not counted: a fused kernel keeps what lies within "
            f"{' and '.join(map(repr, scopes))} on the chip"
        )
    total, offloaded = compiled.total - host - within, compiled.host_temp + host
    return Memory(classes, total, capacity, compiled, predicted, difference, why, offloaded)


def _counter_bytes(layout: Layout) -> int:
    """Bytes of what a train state carries besides parameters, optimizer state and the wire's: counters and flags."""
    state = TrainState.create(layout.param_shapes(), zero(optax.identity(), layout))
    return sum(map(_shape_bytes, jax.tree.leaves(state._replace(params=None, opt_state=optax.EmptyState()))))  # type: ignore[arg-type]


def offloaded_arguments(layout: Layout, batch: Tree, rest: tuple[Any, ...]) -> int:
    """Bytes of one device's part of the batch and of further arguments whose sharding is in pinned host memory.

    Args:
        layout: the layout.
        batch: global shapes of the batch.
        rest: shapes of the further arguments of the loss.
    """
    return _batch_bytes(layout, batch, rest)[1]


def _batch_bytes(layout: Layout, batch: Tree, rest: tuple[Any, ...]) -> tuple[int, int]:
    """Bytes of the batch and further arguments on one device: in its memory, and in the host's."""
    given = jax.tree.leaves((batch, rest))
    sizes = map(_shape_bytes, jax.tree.leaves((local_shapes(batch, layout), rest)))
    held = {False: 0, True: 0}
    for x, size in zip(given, sizes, strict=True):
        held[is_offloaded(x)] += size
    return held[False], held[True]


def _explain(
    difference: int, predicted: int, state_bytes: int, buffers: int, compiled: MemoryFigures, activations: int
) -> str:
    parts = []
    if difference == 0:
        parts.append("the compiler counts exactly the predicted arguments")
    elif 0 < difference <= buffers * _ALIGNMENT:
        parts.append(f"the compiler rounds buffers up: {difference:,} bytes more than predicted")
    elif difference < 0:
        parts.append(f"the compiler dropped arguments that the step does not read: {-difference:,} bytes")
    else:
        parts.append(f"the compiler counts {difference:,} bytes ({difference / predicted:.1%}) more than predicted")
    if activations < 0:
        parts.append(
            f"gradients and secondary partition do not all live at once: the temporaries are {-activations:,} bytes "
            "smaller than their sum"
        )
    if compiled.alias < state_bytes * 0.99:
        parts.append(f"{state_bytes - compiled.alias:,} bytes of the state are not updated in place")
    return "; ".join(parts)


def replicated_leaves(layout: Layout, tx: optax.GradientTransformation) -> tuple[Replicated, ...]:
    """What is replicated along the data axes, the largest first, and why.

    Args:
        layout: the layout.
        tx: the optimizer, not wrapped.
    """
    if layout.num_shards == 1:
        return ()
    found = []
    for what, (placements, first) in _state_classes(layout, tx).items():
        for p in placements:
            if layout.stage < first:
                reason = f"stage {layout.stage} keeps {what} replicated, stage {first} splits them"
            elif not p.is_sharded:
                reason = p.reason
            else:
                continue
            size = math.prod(layout.full_sharding(p).shard_shape(p.shape)) * p.dtype.itemsize
            found.append(Replicated(what, p.path, size, reason))
    return tuple(sorted(found, key=lambda one: -one.bytes))


def padding_notice(layout: Layout) -> list[str]:
    """A sentence where padding to the number of shards adds a percent or more to what is held and sent."""
    full = sum(p.full_bytes for p in layout.leaves)
    padded = sum(math.prod(p.padded_shape) * p.dtype.itemsize for p in layout.leaves)
    if padded < 1.01 * full:
        return []
    return [f"padding to {layout.num_shards} shards adds {padded / full - 1:.1%} to what is sharded and sent"]


def _shape_bytes(x: Any) -> int:
    return math.prod(x.shape) * jax.eval_shape(lambda y: y, without_sharding(x)).dtype.itemsize


def _own_bytes(x: jax.ShapeDtypeStruct) -> int:
    assert x.sharding is not None
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
