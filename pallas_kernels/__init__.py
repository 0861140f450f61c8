"""Block quantisation for communication: one meaning, several backends.

    from pallas_kernels import quantize_slices, pack_bytes, unpack_bytes, dequantize_sum

`reference.py` is the meaning of every op; see `ops` for the ops, `array` for formats and records, `message` for the
bytes of one message, `backend` for the choice of an implementation.
"""

from pallas_kernels.array import BlockFormat, QuantizedArray
from pallas_kernels.message import pack_bytes, unpack_bytes
from pallas_kernels.ops import dequantize, dequantize_sum, dequantize_sum_quantize, quantize, quantize_slices
from pallas_kernels.slices import from_slices, to_slices

__all__ = [
    "BlockFormat",
    "QuantizedArray",
    "dequantize",
    "dequantize_sum",
    "dequantize_sum_quantize",
    "from_slices",
    "pack_bytes",
    "quantize",
    "quantize_slices",
    "to_slices",
    "unpack_bytes",
]
