"""zerojax: ZeRO stages 0-3 for any JAX model and any optax optimizer."""

from zerojax.config import ZeroConfig
from zerojax.gather_on_use import GatherWarning
from zerojax.gradients import apply, value_and_grad
from zerojax.layout import Layout
from zerojax.mesh import make_mesh
from zerojax.optimizer import ZeroState, zero
from zerojax.partition import partition
from zerojax.placement import Placement

__version__ = "0.1.0"

__all__ = ["GatherWarning", "Layout", "Placement", "ZeroConfig", "ZeroState", "apply", "make_mesh", "partition",
           "value_and_grad", "zero"]  # fmt: skip
