"""zerojax: ZeRO stages 0-3 for any JAX model and any optax optimizer."""

from zerojax.config import ZeroConfig
from zerojax.gather_on_use import GatherWarning
from zerojax.gradients import apply, value_and_grad
from zerojax.layout import Layout
from zerojax.mesh import make_mesh
from zerojax.optimizer import ZeroState, zero
from zerojax.partition import partition
from zerojax.placement import Placement
from zerojax.train_step import TrainState, make_train_step

__version__ = "0.1.0"

__all__ = [
    "GatherWarning", "Layout", "Placement", "TrainState", "ZeroConfig", "ZeroState", "apply", "make_mesh",
    "make_train_step", "partition", "value_and_grad", "zero",
]  # fmt: skip
