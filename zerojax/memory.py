"""Bytes of the model states on one device, from placements alone: no array, no compiler, no GPU.

Model states are parameters, gradients and optimizer state (arXiv 1910.02054, section 3.1). With Ψ bfloat16 parameters
and Adam with master weights, N replicas hold 16Ψ; 4Ψ + 12Ψ/N; 2Ψ + 14Ψ/N; 16Ψ/N bytes each at stages 0 to 3 (section
5); here the same sum runs over the leaves as they are stored, with their padding, the small ones whole, and split over
the user's other mesh axes too. Activations and gathered weights are the compiler's: see `zerojax.compiled_program`.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import optax

from zerojax.layout import Layout
from zerojax.optimizer import placements_of_state
from zerojax.placement import Placement


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Bytes that one device holds, by class of model state.

    Attributes:
        params: parameters in stored form.
        grads: gradients in the dtype of their parameter: whole while the backward pass runs at stages 0 and 1 (stage
            1 returns shards, but all whole gradients exist before they are reduced), shards at stages 2 and 3.
        master: wider copies of the parameters, in the optimizer state.
        moments: all else in the optimizer state: moments, histories, counters.
    """

    params: int
    grads: int
    master: int
    moments: int

    @property
    def optimizer(self) -> int:
        """The whole optimizer state."""
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
        data_parallel: what each device would hold under plain data parallelism: every leaf whole, but for its split
            over mesh axes that are not data axes.
    """

    per_device: StateBytes
    padding: StateBytes
    data_parallel: StateBytes


def model_state_bytes(layout: Layout, tx: optax.GradientTransformation) -> ModelStateBytes:
    """Predicts the bytes of the model states on each device.

    Args:
        layout: the layout of the parameters; its mesh may be a `jax.sharding.AbstractMesh`, or of absent GPUs.
        tx: the optimizer, `zerojax.zero(..., layout)` or the optax transformation that it wraps.

    Raises:
        ValueError: `tx` belongs to another layout, or `zero` is inside a chain.

    >>> import jax.numpy as jnp, zerojax
    >>> mesh = jax.sharding.AbstractMesh((64,), ("data",))  # 64 devices that are not here
    >>> model = {"w": jax.ShapeDtypeStruct((7_500, 1_000_000), jnp.bfloat16)}  # 7.5B parameters
    >>> layout = zerojax.partition(model, mesh, zerojax.ZeroConfig(stage=1, axes="data"))
    >>> held = model_state_bytes(layout, optax.adam(1e-3))
    >>> f"{held.per_device.total / 1e9:.1f} GB instead of {held.data_parallel.total / 1e9:.0f} GB"
    '31.4 GB instead of 120 GB'
    """
    state = placements_of_state(tx, layout)
    trained = [p for p in layout.leaves if p.trainable]
    # What is sharded from which stage on (arXiv 1910.02054, figure 1).
    classes = {
        "params": (layout.leaves, 3),
        "grads": (trained, 2),
        "master": (jax.tree.leaves(state.master), 1),
        "moments": (jax.tree.leaves(state.inner), 1),
    }
    held = {name: sum(_bytes(p, layout, layout.stage >= first) for p in ps) for name, (ps, first) in classes.items()}
    whole = {name: sum(_bytes(p, layout, False) for p in ps) for name, (ps, _) in classes.items()}
    padding = {
        name: sum(_padding_bytes(p, layout) for p in ps) if layout.stage >= first else 0
        for name, (ps, first) in classes.items()
    }
    return ModelStateBytes(StateBytes(**held), StateBytes(**padding), StateBytes(**whole))


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
