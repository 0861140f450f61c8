"""Block quantisation for communication: one meaning, several backends.

    q = quantize_slices(grad, QuantFormat(8, 128), dim=0, num_slices=8)     # lead (8,), destination order
    message = lax.all_to_all(pack_bytes(q), "local", 0, 0, tiled=True)         # one uint8 message a destination
    mean = dequantize_sum(unpack_bytes(message, q), mean=True)

`reference` is the meaning of every op, in plain jnp. The kernels are built for the ZeRO++ collectives (arXiv
2306.10209) and equal it bit for bit; `backend` chooses when a program is lowered. What is shown where, and how:

| | CPU | H100, H200 | B200 | A100 (JAX 0.11 on) |
|---|---|---|---|---|
| "xla" | run, tests | compiled | - | - |
| "mosaic_gpu" | interpreted (JAX 0.11 on): equal bits | PTX executed on a CPU: equal bits | compiled | compiled |
| speed | - | counted (H100) and modelled | modelled only | modelled only |

No kernel has run on a GPU yet: by default XLA runs every op, and `prefer_kernels()` asks for the kernels.
Bits are equal on one device. A CPU takes subnormal numbers for zero, a GPU does not: below 2**-126 their signs differ.
"Counted" is from the machine code (`sass`): no spills, 16-byte loads, bytes moved at most 1.1x the ideal, and fewer
issue slots than memory time on an H100, but for rotations with stochastic rounding or to e2m1 and for sums from e2m1 to
e2m1; ``python -m pallas_kernels.survey`` counts every variant. Modelled on an H100 for a leaf of 8192 x 8192 in
bfloat16 and 8 contributions (``python -m pallas_kernels.bench``; bytes over ideal, launches of the compiled program):

| op | XLA | kernel | preferred |
|---|---|---|---|
| quantize int8 / int4 with e4m3 scales | 1.7x, 3 / 2.1x, 5 launches | 1.00x, 1 launch | kernel |
| quantize int4, rotated | 7.4x, 4 launches | 1.00x, 1 launch | kernel |
| quantize_slices int4, stochastic, residual | 2.1x, 6 launches | 1.00x, 1 launch | kernel |
| dequantize | 1.00x, 1 launch | none | XLA |
| dequantize int4, rotated | 4.2x, 2 launches | 1.00x, 1 launch | kernel |
| dequantize_sum int8 / int4 with e4m3 scales | 1.04x / 1.24x, 2 launches | 1.00x, 1 launch | kernel |
| dequantize_sum_quantize | 2.1x to 2.8x, 4 to 6 launches | 1.00x, 1 launch | kernel |

`pack_bytes` and `unpack_bytes` add a copy of the payload each to a kernel, `pack_apart` of the scales alone; XLA fuses
packing into its own program.
XLA alone does: leaves whose contiguous run per slice is no multiple of the block (of the tile of 1024 with e4m3
scales) or is a single one, sums of padded slices, and sums requantised in larger blocks than they came in, int4 in
smaller ones, blocks of 2048 with e4m3 scales.
"""

from pallas_kernels.array import QuantFormat, QuantizedArray
from pallas_kernels.backend import kernels_preferred, prefer_kernels
from pallas_kernels.message import pack_apart, pack_bytes, unpack_bytes
from pallas_kernels.ops import dequantize, dequantize_sum, dequantize_sum_quantize, quantize, quantize_slices
from pallas_kernels.slices import from_slices, to_slices

__all__ = [
    "QuantFormat",
    "QuantizedArray",
    "dequantize",
    "dequantize_sum",
    "dequantize_sum_quantize",
    "from_slices",
    "kernels_preferred",
    "pack_apart",
    "pack_bytes",
    "prefer_kernels",
    "quantize",
    "quantize_slices",
    "to_slices",
    "unpack_bytes",
]
