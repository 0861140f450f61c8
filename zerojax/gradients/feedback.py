"""Error feedback: what the quantised reduction lost between nodes, carried into the next step.

Each device adds the loss of its last step to the node's sum before quantising it for the hop between nodes, and keeps
what is lost then (1-bit SGD and its descendants; an option of `ZeroConfig`, off by default, since under Adam it did not
pay in our measurements). Only the hop between nodes is fed back, so the state is one chunk of the leaf per device,
1/local of it, in bfloat16.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.layout.layout import Layout
from zerojax.layout.placement import Placement, trimmed_spec

Tree = Any


def init_feedback(layout: Layout, *, abstract: bool = False) -> Tree:
    """The feedback before the first step: zeros for each leaf that is reduced quantised between nodes, else None.

    Args:
        layout: the layout of the parameters.
        abstract: give `jax.ShapeDtypeStruct`s instead of arrays.

    Returns:
        A pytree of the parameters' structure. A leaf has the global shape (nodes, *padded shape): device (node, local)
        holds the loss of its node in the chunk that it reduces.

    >>> import zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> config = zerojax.ZeroConfig.zero_plus_plus(error_feedback=True, min_shard_size=0, min_quantize_size=0)
    >>> layout = zerojax.partition({"w": jnp.ones((16, 4)), "b": jnp.ones((8,))}, mesh, config)
    >>> feedback = init_feedback(layout)
    >>> feedback["b"], feedback["w"].shape, feedback["w"].addressable_shards[0].data.shape
    (None, (2, 16, 4), (1, 4, 4))
    """
    shapes = [_shape(p, layout) if has_feedback(p, layout) else None for p in layout.leaves]
    if not abstract:
        shardings = [None if s is None else s.sharding for s in shapes]
        zeros = jax.jit(
            lambda: [None if s is None else jnp.zeros(s.shape, s.dtype) for s in shapes], out_shardings=shardings
        )
        return layout.treedef.unflatten(zeros())
    return layout.treedef.unflatten(shapes)


def has_feedback(placement: Placement, layout: Layout) -> bool:
    """Whether a leaf's reduction between nodes is quantised, so that something can be lost."""
    two_hops = len(placement.axes) == 2
    return layout.config.error_feedback and placement.is_quantized and placement.trainable and two_hops


def feedback_specs(layout: Layout) -> list[PartitionSpec | None]:
    """PartitionSpecs over the data axes, per leaf, for `shard_map`."""
    return [_data_spec(p) if has_feedback(p, layout) else None for p in layout.leaves]


def check_feedback(feedback: Tree, layout: Layout) -> list[Any]:
    """The leaves of a feedback tree, None where there is none.

    Raises:
        ValueError: it is not what `init_feedback(layout)` gives.
    """
    try:
        leaves = layout.leaves_of(feedback)
    except ValueError:
        leaves = []
    wanted = [_shape(p, layout).shape if has_feedback(p, layout) else None for p in layout.leaves]
    found = [None if x is None else tuple(x.shape) for x in leaves]
    if feedback is None or found != wanted:
        raise ValueError(
            "ZeroConfig(error_feedback=True): pass feedback=zerojax.init_feedback(layout) first and the returned "
            "feedback from then on (make_train_step: TrainState.create(params, tx, layout=layout)); got shapes "
            f"{found if feedback is not None else None}, required {wanted}"
        )
    return leaves


def _data_spec(p: Placement) -> PartitionSpec:
    assert p.dim is not None
    outer, inner = p.axes
    return PartitionSpec(outer, *(None,) * p.dim, inner)


def _shape(p: Placement, layout: Layout) -> jax.ShapeDtypeStruct:
    assert p.dim is not None
    outer, inner = p.axes
    entries: list[Any] = [outer, *p.spec]
    entries[p.dim + 1] = inner
    shape = (layout.mesh.shape[outer], *p.padded_shape)
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(layout.mesh, trimmed_spec(entries)))
