"""zerojax: ZeRO stages 0-3 for any JAX model and any optax optimizer."""

from zerojax.checkpoints.export import export
from zerojax.checkpoints.manager import CheckpointManager
from zerojax.checkpoints.saving import restore, save
from zerojax.config import QuantFormat, ZeroConfig
from zerojax.gather.equation import GatherWarning
from zerojax.gradients.transform import apply, value_and_grad
from zerojax.gradients.wire import WireState, init_wire_state
from zerojax.hlo.program import expect_collectives, read_program
from zerojax.hosts.start import distributed
from zerojax.layout.layout import Layout
from zerojax.layout.mesh import make_mesh
from zerojax.layout.notices import ZeroNotice
from zerojax.layout.partition import partition
from zerojax.layout.placement import Placement
from zerojax.layout.simulated import simulate_devices
from zerojax.optimizer.moments import low_precision_adamw, scale_by_low_precision_adam
from zerojax.optimizer.zero import ZeroState, zero
from zerojax.planner.plan import plan
from zerojax.planner.traffic import predict_traffic
from zerojax.training.compiler_options import compiler_options
from zerojax.training.loss_scaling import DynamicScale, LossScaleState
from zerojax.training.nonfinite import NonFinite, NonFiniteError
from zerojax.training.remat import checkpoint
from zerojax.training.state import TrainState
from zerojax.training.step import make_train_step
from zerojax.tuning.pilot import pilot
from zerojax.tuning.report import PilotReport

__version__ = "0.1.0"

LossScale = LossScaleState  # the name it had before

__all__ = [
    "CheckpointManager",
    "DynamicScale",
    "GatherWarning",
    "Layout",
    "LossScale",
    "LossScaleState",
    "NonFinite",
    "NonFiniteError",
    "PilotReport",
    "Placement",
    "QuantFormat",
    "TrainState",
    "WireState",
    "ZeroConfig",
    "ZeroNotice",
    "ZeroState",
    "apply",
    "checkpoint",
    "compiler_options",
    "distributed",
    "expect_collectives",
    "export",
    "init_wire_state",
    "low_precision_adamw",
    "make_mesh",
    "make_train_step",
    "partition",
    "pilot",
    "plan",
    "predict_traffic",
    "read_program",
    "restore",
    "save",
    "scale_by_low_precision_adam",
    "simulate_devices",
    "value_and_grad",
    "zero",
]
