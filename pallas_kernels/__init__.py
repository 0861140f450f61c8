"""Block quantisation for communication: one meaning, several backends.

    q = quantize_slices(grad, QuantFormat(8, 128), dim=0, num_slices=8)     # lead (8,), destination order
    messages = [lax.all_to_all(m, "local", 0, 0, tiled=True) for m in to_messages(q)]
    mean = dequantize_sum(unpack_bytes(tuple(messages), q), mean=True)

`reference` is the meaning of every op, in plain jnp. The kernels are built for the ZeRO++ collectives (arXiv
2306.10209) and equal it bit for bit; `backend` chooses when a program is lowered. What is shown where, and how:

| | CPU | H100, H200 | B200 | A100 (JAX 0.11 on) |
|---|---|---|---|---|
| "xla" | run, tests | compiled | - | - |
| "mosaic_gpu" | interpreted (JAX 0.11 on): equal bits | PTX executed on a CPU: equal bits | compiled | compiled |
| speed | - | counted (H100) and modelled | modelled only | modelled only |

No kernel has run on a GPU yet. The first use of a variant on one checks it: the kernel runs where it has the
reference's bits and is not slower (`choice`). `prefer_kernels`, `kernel_policy` and PALLAS_KERNELS force or forbid it.
Bits are equal on one device. A CPU takes subnormal numbers for zero, a GPU does not: below 2**-126 their signs differ.
"Counted" is from the machine code (`sass`): no spills, 16-byte loads, bytes moved at most 1.01x the ideal, and at least
28 KiB of reads in flight in each multiprocessor. Modelled on an H100 for a leaf of 8192 x 8192 in
bfloat16 and 8 contributions (``python -m pallas_kernels.bench``; bytes over ideal, launches of the compiled program):

| op | XLA | kernel |
|---|---|---|
| quantize int8 / int4 with e4m3 scales | 1.71x, 3 / 2.08x, 5 launches | 1.00x, 1 launch |
| quantize int4, rotated by 32 | 7.43x, 4 launches | 1.00x, 1 launch |
| quantize_slices int4 e4m3, stochastic, with residual | 2.13x, 6 launches | 1.00x, 1 launch |
| dequantize int8 | 1.00x, 1 launch | none |
| dequantize int4, rotated by 32 | 4.16x, 2 launches | 1.00x, 1 launch |
| dequantize_sum int8 / int4 e4m3 | 1.04x / 1.24x, 2 launches | 1.00x, 1 launch |
| dequantize_sum_quantize int8 to int4 / int4 to int4 | 2.03x, 5 / 1.91x, 3 launches | 1.00x, 1 launch |
| quantize_slices int8, then the messages of an all-to-all | 1.72x, 3 launches | 1.01x, 2 launches |
| received messages, then dequantize_sum_quantize int8 to int4 | 2.09x, 6 launches | 1.03x, 2 launches |

The last two rows are what the gradient reduction does around an all-to-all of large leaves: payload and scales travel
apart, and only the scales are copied (`to_messages`). Leaves of less than 64 MiB travel as one message, whoever writes
it; XLA writes it in its own program, to a kernel it costs a copy of the payload on either side. On JAX 0.11 a preferred
kernel costs a gather: the compiler does not merge two equal kernels, so that without a secondary partition a weight
which activation checkpointing needs again travels three times instead of two.

An H100 takes longer to issue the instructions than to move the bytes only where quantising rotates with stochastic
rounding or to e2m1, and where 8 contributions of e2m1 are summed and quantised to e2m1 (up to 1.55x). All variants of
quantising (``python -m pallas_kernels.survey``, H100, JAX 0.12.0.1, 2026-11-30):

| formats | variants | registers a thread | issue over memory time |
|---|---|---|---|
| not rotated, blocks up to 1024 | 336 | up to 64 in 316, 80 | up to 0.95 |
| not rotated, blocks of 2048 | 24 | up to 118 | up to 0.81 |
| rotated, blocks up to 1024 | 528 | up to 83, with residual 124 | up to 1.16, e2m1 1.34 |
| rotated, blocks of 2048 | 48 | up to 210 | up to 1.14, e2m1 1.32 |

XLA alone does: leaves whose contiguous run per slice is no multiple of the block (of the tile of 1024 with e4m3
scales) or is a single one, sums of padded slices, and sums requantised in larger blocks than they came in, int4 in
smaller ones, blocks of 2048 with e4m3 scales.
"""

from pallas_kernels.array import QuantFormat, QuantizedArray
from pallas_kernels.choice import Decision, KernelNotice, decision, decisions, kernel_policy, prefer_kernels
from pallas_kernels.message import pack_apart, pack_bytes, to_messages, unpack_bytes
from pallas_kernels.ops import dequantize, dequantize_sum, dequantize_sum_quantize, quantize, quantize_slices
from pallas_kernels.slices import from_slices, to_slices

__all__ = [
    "Decision",
    "KernelNotice",
    "QuantFormat",
    "QuantizedArray",
    "decision",
    "decisions",
    "dequantize",
    "dequantize_sum",
    "dequantize_sum_quantize",
    "from_slices",
    "kernel_policy",
    "pack_apart",
    "pack_bytes",
    "prefer_kernels",
    "quantize",
    "quantize_slices",
    "to_messages",
    "to_slices",
    "unpack_bytes",
]
