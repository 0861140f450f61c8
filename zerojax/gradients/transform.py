"""`value_and_grad` and `apply`: a loss or forward function on stored parameters, inside `shard_map` over the data axes.

Each device computes the loss of its part of the batch; the gradient is the mean over all devices, reduced where it
arises (stages 2 and 3: in the backward loop body; stages 0 and 1: after it) by explicit collectives. Source: arXiv
1910.02054, sections 5 and 7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax.collectives.select import has_secondary
from zerojax.gradients import inputs as batches
from zerojax.gradients.backward import forward
from zerojax.gradients.eager import CompiledOnce
from zerojax.gradients.local import (
    Accumulation,
    Gradients,
    LossKind,
    accumulation_for,
    local_gradients,
    split_outputs,
)
from zerojax.gradients.outputs import check_loss, check_model_state
from zerojax.gradients.stored_arguments import (
    argument_specs,
    gathering_arguments,
    logical_arguments,
    marked_arguments,
    without_gradient,
)
from zerojax.gradients.wire import WireState, remembers, wire_leaves, wire_specs, wire_trees
from zerojax.layout.layout import Layout
from zerojax.layout.optimizer_form import entering, leaving
from zerojax.layout.placement import Placement

Tree = Any

_APPLY_IS_FORWARD = (
    "zerojax.apply is forward only and cannot be differentiated with respect to the parameters: use "
    "zerojax.value_and_grad(loss_fn, layout) in place of jax.grad"
)
_NO_SECOND_DERIVATIVE = (
    "zerojax.value_and_grad cannot itself be differentiated with respect to the parameters where weights keep a "
    "secondary partition (ZeroConfig(secondary=True)): for gradient penalties, meta-learning or Hessians use a layout "
    "with secondary=False"
)


def value_and_grad(
    loss_fn: Callable[..., Any],
    layout: Layout,
    *,
    has_aux: bool = False,
    weighted: bool = False,
    microbatches: int = 1,
    accumulation: Accumulation | None = None,
    per_example: Tree = None,
) -> Callable[..., Any]:
    """Replaces `jax.value_and_grad` for parameters in stored form.

    Args:
        loss_fn: `loss_fn(params, batch, *rest)`, written for full parameters and one device's part of the batch;
            returns a scalar mean loss. With `weighted` it returns (sum, weight), and the result is the exact quotient
            of the global sums, also for unequal weights (token counts, say). With `has_aux` it returns (loss, aux).
        layout: the layout of the parameters.
        has_aux: see above. Arrays of `aux` with one entry (or several) for each example come back sharded along their
            leading dim, all other float values averaged over the devices.
        weighted: see above.
        microbatches: number of pieces into which each device's part of the batch is cut, one after the other; loss and
            gradients are those of the global batch. A secondary partition of the weights is made once for all of them.
        accumulation: how their gradients are summed, in float32. "sharded" (default of stages 2 and 3): each
            microbatch's is reduced, the accumulators are shards. "deferred" (default of stages 0 and 1): full
            gradients are summed on each device and reduced once per step, in the dtype on the wire that they have
            without microbatches. With one microbatch there is nothing to sum, and both are the same.
        per_example: which arrays of `aux` hold one entry for each example: a bool, or bools in its structure. None:
            found by tracing the loss with twice the examples, never by a length that happens to be the batch's.

    Returns:
        A function of (params in stored form, batch, *rest) that returns (loss, grads), or ((loss, aux), grads). `batch`
        is sharded on its leading dim over the data axes, 0-d leaves are replicated; `rest` is replicated, PRNG keys in
        it (`jax.random.key`) are folded with the index of the device, so that dropout differs per device, and further
        parameters in stored form (a teacher, a target network) are marked by `Layout.stored`. The loss
        is the global mean, the same on every device. Gradients: full at stage 0, else this device's shards (padded
        form), in the dtype of the parameter; None for leaves that are not trained. Where the
        configuration remembers something from step to step (`ZeroConfig.error_feedback`), the function takes `wire=`
        (from `init_wire_state`) and returns the new state as a third value. With `loss_scale=`, a scalar, the gradients
        (not the loss) come back multiplied by it.
