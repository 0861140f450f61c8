"""The kernels of the "mosaic_gpu" backend, each as a plan over the static description of a call."""

from pallas_kernels.mosaic.quantize import plan as plan_quantize
from pallas_kernels.mosaic.sum import plan_sum, plan_sum_quantize

__all__ = ["plan_quantize", "plan_sum", "plan_sum_quantize"]
