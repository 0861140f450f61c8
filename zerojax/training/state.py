"""`TrainState`: everything that a training loop carries from step to step, and that a checkpoint holds.

All its scalars live on the mesh from the start, replicated: a step counter on one device would have the step compiled a
second time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.gradients.wire import WireState, init_wire_state
from zerojax.layout.host_arrays import place_in_full
from zerojax.layout.layout import Layout
from zerojax.optimizer.zero import ZeroState, check_sharded
from zerojax.training.loss_scaling import DynamicScale, LossScaleState, init_loss_scale, loss_scale_rule
from zerojax.training.nonfinite import NonFinite, init_nonfinite, raise_if_stopped

Tree = Any


class TrainState(NamedTuple):
    """What a training loop carries from step to step.

    Attributes:
        step: number of steps taken, int32 scalar.
        params: parameters in stored form.
        opt_state: state of the sharded optimizer.
        wire: what the wire remembers from step to step (`ZeroConfig.weight_deltas`, `error_feedback`), or None.
        loss_scale: state of dynamic loss scaling, or None.
        skipped: number of steps that changed nothing because they were not finite, int32 scalar.
        nonfinite: how often loss and gradient were not finite, and whether that stopped training.
        model_state: what the model carries beside its parameters (batch statistics), the same on every device, or None.
    """

    step: jax.Array
    params: Tree
    opt_state: ZeroState
    wire: WireState | None = None
    loss_scale: LossScaleState | None = None
    skipped: jax.Array | None = None
    nonfinite: NonFinite | None = None
    model_state: Tree = None

    @classmethod
    def create(
        cls,
        params: Tree,
        tx: optax.GradientTransformation,
        layout: Layout | None = None,
        loss_scale: DynamicScale | str | None = None,
        model_state: Tree = None,
    ) -> TrainState:
        """The state before the first step.

        Args:
            params: parameters in stored form, or their `jax.ShapeDtypeStruct`s.
            tx: an optimizer made by `zerojax.zero`.
            layout: needed where the configuration remembers something from step to step, to make the `WireState`.
            loss_scale: the rule given to `make_train_step`, if any.
            model_state: arrays that the model carries beside its parameters, for `make_train_step(mutable=True)`.

        >>> import zerojax
        >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
        >>> layout = zerojax.partition({"w": jnp.ones((8, 2))}, mesh, zerojax.ZeroConfig(min_shard_size=0))
        >>> tx = zerojax.zero(optax.sgd(0.1), layout)
        >>> int(zerojax.TrainState.create(layout.shard({"w": jnp.ones((8, 2))}), tx).step)
        0
        """
        check_sharded(tx, "TrainState.create(params, tx)")
        opt_state = tx.init(params)  # refuses what is not in stored form
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
                raise ValueError(
                    f"params{jax.tree_util.keystr(path)} is a {type(x).__name__}, not in stored form: pass "
                    "layout.shard(params)"
                )
        leaves = jax.tree.leaves(params)
        # On the mesh from the start: a step counter of one device would have the step compiled a second time.
        meshes = [x.sharding.mesh for x in leaves if isinstance(x.sharding, NamedSharding)]
        everywhere = NamedSharding(meshes[0], PartitionSpec()) if meshes else None
        abstract = bool(leaves) and all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)

        def place(x: jax.Array) -> Any:
            if abstract:
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
            return place_in_full(x, everywhere)

        step, skipped = place(jnp.zeros((), jnp.int32)), place(jnp.zeros((), jnp.int32))
        rule = loss_scale_rule(loss_scale)
        scale = None if rule is None else jax.tree.map(place, init_loss_scale(rule))
        nonfinite = jax.tree.map(place, init_nonfinite())
        wire = None if layout is None else init_wire_state(layout, abstract=abstract)
        # Copies: a replica would share its buffer with the caller's array, and donating one deletes the other.
        carried = jax.tree.map(lambda x: place(x if abstract else jnp.array(x)), model_state)
        return cls(step, params, opt_state, wire, scale, skipped, nonfinite, carried)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raises what the next calls of a step would; waits for the state. For after the last step.

        Raises:
            NonFiniteError: training has stopped (`make_train_step(on_nonfinite="raise")`).
        """
        if self.nonfinite is not None:
            raise_if_stopped(self, self.nonfinite.stopped)

    def resumed(self) -> TrainState:
        """The same state without the mark that training has stopped."""
        if self.nonfinite is None:
            return self
        stopped = self.nonfinite.stopped
        return self._replace(
            nonfinite=self.nonfinite._replace(stopped=jax.device_put(jnp.zeros_like(stopped), stopped.sharding))
        )
