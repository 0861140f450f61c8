"""Floating-point operations of the matrix products of a compiled program, counted on its instructions.

XLA gives no cost analysis for GPUs that are not there, so the products are counted: 2 times the elements of the result
times the length of the contracted dims, times the iterations of the loops around. Kernels XLA cannot look into
(attention in cuDNN, Pallas) are not counted, nor is anything that is not a product; recomputation is.
"""

import math
import re

from zerojax.hlo_schedule import Visit, multiplies, walk
from zerojax.hlo_text import ArrayShape, Module

_CONTRACTING = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_KERNEL_LABELS = re.compile(r"dim_labels=\w+?_(\w+)->")


def matmul_flops(module: Module) -> int:
    """FLOP of one device in one call of the program, in matrix products and convolutions; all branches count.

    Args:
      module: from `hlo_text.parse_module`.
    """
    return sum(
        _flops(visit) * math.prod(loop.trip_count or 1 for loop in visit.loops) for visit in walk(module, multiplies)
    )


def _flops(visit: Visit) -> int:
    line, by_name = visit.instruction, visit.computation.by_name
    operands = [by_name[name].shapes[0] for name in line.operands if name in by_name and by_name[name].shapes]
    if len(operands) < 2 or not line.shapes:
        return 0
    return 2 * math.prod(line.shapes[0].dims) * _contracted(line.attributes, operands)


def _contracted(attributes: str, operands: list[ArrayShape]) -> int:
    if labels := _KERNEL_LABELS.search(attributes):
        kernel = zip(labels.group(1), operands[1].dims, strict=True)
        return math.prod(size for label, size in kernel if label != "o")
    if dims := _CONTRACTING.search(attributes):
        return math.prod(operands[0].dims[int(dim)] for dim in re.findall(r"\d+", dims.group(1)))
    return 0
