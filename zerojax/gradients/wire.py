"""What the wire remembers from step to step: one state, with one way into the gradient function and one out of it.

*Weight deltas*: the weights as every node has them, of which only changes travel (`zerojax.collectives.deltas`).

*Error feedback*: each device adds what its last reduction lost to the node's sum before quantising it for the hop
between nodes, and keeps what is lost then (1-bit SGD and its descendants; an option of `ZeroConfig`, off by default,
since under Adam it did not pay in our measurements). Only the hop between nodes is fed back, so the state is one chunk
of the leaf per device, 1/local of it, in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.layout.layout import Layout
from zerojax.layout.placement import Placement, trimmed_spec

Tree = Any


class WireState(NamedTuple):
    """What is remembered; None for a technique that is off, and for a leaf that it does not concern.

    Attributes:
        feedback: what each leaf's last quantised reduction lost between nodes: global shape (nodes, *padded shape),
            bfloat16; device (node, local) holds the loss of its node in the chunk that it reduces.
        replica: what every node holds of each leaf: the weights in compute of the last step, padded, two bytes an
            element, split inside the node and the same on all nodes. Zeros, which belong to no parameters, at first.

    >>> WireState().feedback is None
    True
    """

    feedback: Tree = None
    replica: Tree = None


class _Part(NamedTuple):
    """One field of the state: for which leaves it exists, and what it is for them."""

    concerns: Callable[[Placement, Layout], bool]
    shape: Callable[[Placement, Layout], jax.ShapeDtypeStruct]
    data_spec: Callable[[Placement], PartitionSpec]


def init_wire_state(layout: Layout, *, abstract: bool = False) -> WireState | None:
    """The state before the first step: zeros; None where the configuration has nothing to remember.

    Args:
        layout: the layout of the parameters.
        abstract: give `jax.ShapeDtypeStruct`s instead of arrays.

    Returns:
        A `WireState` whose fields have the structure of the parameters.

    >>> import zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> config = zerojax.ZeroConfig.zero_plus_plus(error_feedback=True, min_shard_size=0, min_quantize_size=0)
    >>> layout = zerojax.partition({"w": jnp.ones((16, 4)), "b": jnp.ones((8,))}, mesh, config)
    >>> feedback = init_wire_state(layout).feedback
    >>> feedback["b"], feedback["w"].shape, feedback["w"].addressable_shards[0].data.shape
    (None, (2, 16, 4), (1, 4, 4))
    """
    if not remembers(layout):
        return None
    shapes = WireState(*(_shapes(part, layout) for part in _PARTS))
    if not abstract:
        shardings = jax.tree.map(lambda s: s.sharding, shapes)
        shapes = jax.jit(
            lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), out_shardings=shardings
        )()
    return wire_trees(shapes, layout)


def remembers(layout: Layout) -> bool:
    """Whether the gradient function takes and returns a state."""
    return layout.config.error_feedback or layout.config.weight_deltas is not None


def has_feedback(placement: Placement, layout: Layout) -> bool:
    """Whether a leaf's reduction between nodes is quantised, so that something can be lost."""
    two_hops = len(placement.axes) == 2
    return layout.config.error_feedback and placement.is_quantized and placement.trainable and two_hops


def has_replica(placement: Placement, layout: Layout) -> bool:
    """Whether every node keeps a replica of a leaf."""
    return layout.config.weight_deltas is not None and placement.replica_dtype is not None


def wire_specs(layout: Layout) -> WireState:
    """PartitionSpecs over the data axes, one list entry per leaf: for `shard_map`."""
    return WireState(
        *([part.data_spec(p) if part.concerns(p, layout) else None for p in layout.leaves] for part in _PARTS)
    )


def kept_in_skipped_step(old: WireState | None, new: WireState | None) -> WireState | None:
    """The state after a step that changes nothing: the old one, but replicas, which no batch has touched, move on."""
    return old if old is None or new is None else old._replace(replica=new.replica)


def wire_leaves(wire: WireState | None, layout: Layout) -> WireState:
    """The state with lists in place of trees, one entry per leaf; all None where there is nothing to remember.

    Raises:
        ValueError: it is not what `init_wire_state(layout)` gives.
    """
    nothing = WireState(*([None] * len(layout.leaves) for _ in _PARTS))
    if not remembers(layout):
        return nothing
    try:
        leaves = WireState(*(_leaves_of(tree, layout) for tree in wire)) if isinstance(wire, WireState) else nothing
    except ValueError:
        leaves = nothing
    wanted = WireState(*([s and s.shape for s in _shapes(part, layout)] for part in _PARTS))
    found = WireState(*([None if x is None else tuple(x.shape) for x in part] for part in leaves))
    if not isinstance(wire, WireState) or found != wanted:
        raise ValueError(
            "this configuration remembers something from step to step: pass wire=zerojax.init_wire_state(layout) first "
            "and the returned state from then on (make_train_step: TrainState.create(params, tx, layout=layout)); got "
            f"shapes {found if isinstance(wire, WireState) else type(wire).__name__}, required {wanted}"
        )
    return leaves


def wire_trees(leaves: WireState, layout: Layout) -> WireState | None:
    """The state as it is handed out: trees of the parameters' structure in place of lists."""
    if not remembers(layout):
        return None
    return WireState(*(None if all(x is None for x in part) else layout.treedef.unflatten(part) for part in leaves))


def _leaves_of(tree: Tree, layout: Layout) -> list[Any]:
    return [None] * len(layout.leaves) if tree is None else layout.leaves_of(tree)


def _shapes(part: _Part, layout: Layout) -> list[jax.ShapeDtypeStruct | None]:
    return [part.shape(p, layout) if part.concerns(p, layout) else None for p in layout.leaves]


def _feedback_spec(p: Placement) -> PartitionSpec:
    assert p.dim is not None
    outer, inner = p.axes
    return PartitionSpec(outer, *(None,) * p.dim, inner)


def _feedback_shape(p: Placement, layout: Layout) -> jax.ShapeDtypeStruct:
    assert p.dim is not None
    outer, inner = p.axes
    entries: list[Any] = [outer, *p.spec]
    entries[p.dim + 1] = inner
    shape = (layout.mesh.shape[outer], *p.padded_shape)
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(layout.mesh, trimmed_spec(entries)))


def _replica_spec(p: Placement) -> PartitionSpec:
    assert p.dim is not None
    return PartitionSpec(*(None,) * p.dim, p.axes[-1])


def _replica_shape(p: Placement, layout: Layout) -> jax.ShapeDtypeStruct:
    assert p.dim is not None
    entries: list[Any] = list(p.spec)
    entries[p.dim] = p.axes[-1]
    assert p.replica_dtype is not None
    return jax.ShapeDtypeStruct(
        p.padded_shape, p.replica_dtype, sharding=NamedSharding(layout.mesh, trimmed_spec(entries))
    )


_PARTS = WireState(  # by field
    _Part(has_feedback, _feedback_shape, _feedback_spec), _Part(has_replica, _replica_shape, _replica_spec)
)
