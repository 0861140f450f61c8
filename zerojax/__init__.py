"""zerojax: ZeRO stages 0-3 for any JAX model and any optax optimizer."""

from zerojax.config import QuantFormat, ZeroConfig
from zerojax.feedback import init_feedback
from zerojax.gather_on_use import GatherWarning
from zerojax.gradients import apply, value_and_grad
from zerojax.layout import Layout
from zerojax.loss_scaling import DynamicScale, LossScale
from zerojax.low_precision_moments import low_precision_adamw, scale_by_low_precision_adam
from zerojax.mesh import make_mesh
from zerojax.nonfinite import NonFinite, NonFiniteError
from zerojax.notices import ZeroNotice
from zerojax.optimizer import ZeroState, zero
from zerojax.partition import partition
from zerojax.placement import Placement
from zerojax.planner import plan
from zerojax.remat import checkpoint
from zerojax.saving import restore, save
from zerojax.simulated import simulate_devices
from zerojax.train_state import TrainState
from zerojax.train_step import make_train_step

__version__ = "0.1.0"

__all__ = [
    "DynamicScale",
    "GatherWarning",
    "Layout",
    "LossScale",
    "NonFinite",
    "NonFiniteError",
    "Placement",
    "QuantFormat",
    "TrainState",
    "ZeroConfig",
    "ZeroNotice",
    "ZeroState",
    "apply",
    "checkpoint",
    "init_feedback",
    "low_precision_adamw",
    "make_mesh",
    "make_train_step",
    "partition",
    "plan",
    "restore",
    "save",
    "scale_by_low_precision_adam",
    "simulate_devices",
    "value_and_grad",
    "zero",
]
