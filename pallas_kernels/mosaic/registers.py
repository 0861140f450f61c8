"""What a kernel says in the compiler's own terms, on the registers of one thread.

Pallas's products may be fused into an addition after them, its reciprocals are approximate, and its conversions take
more instructions than they need. These functions have exactly the bits of the reference; interpreted, they are plain
JAX. `tests/kernels/test_kernels_values.py` runs what the compiler makes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as mgpu

from pallas_kernels import numerics


def _each_register(function: Callable[..., Any], target: Any, *operands: jax.Array) -> jax.Array:
    """A float32 array of the layout ``target`` whose every register is a function of those of the operands."""
    result: Any = plgpu.ShapeDtypeStruct(operands[0].shape, jnp.dtype("float32"), layout=target)

    def body(_: Any, *arrays: Any) -> Any:
        registers = np.empty_like(arrays[0].registers)
        for where in np.ndindex(registers.shape):
            registers[where] = function(*(array.registers[where] for array in arrays))
        return mgpu.FragmentedArray(_registers=registers, _layout=arrays[0].layout, _is_signed=None)

    return plgpu.inline_mgpu(arg_types=(target,) * len(operands), return_type=result)(body)(*operands)


def product(a: jax.Array, b: jax.Array, target: Any) -> jax.Array:
    """``a * b`` in float32, which no compiler fuses into an addition after it. Only where a kernel is compiled."""

    def on_register(x: Any, y: Any) -> Any:
        from jaxlib.mlir.dialects import arith

        return arith.mulf(x, y)

    return _each_register(on_register, target, a, b)


def reciprocal(x: jax.Array, target: Any, interpret: bool) -> jax.Array:
    """`numerics.reciprocal` of normal numbers whose reciprocal is normal and whose last bit is zero, as of scales.

    Pallas's own is off by a unit in the last place. One step of Newton's iteration, each half of it rounded once, mends
    that (Markstein, IBM J. Res. Dev. 34(1), 1990, theorem 5; its exception, a mantissa of ones, is excluded above).
    """
    near = numerics.reciprocal(x)
    if interpret:
        return near

    def on_register(value: Any, start: Any) -> Any:
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir.dialects import arith
        from jaxlib.mlir.dialects import math as mlir_math

        error = mlir_math.fma(arith.negf(value), start, utils.c(1.0, start.type))
        return mlir_math.fma(error, start, start)

    return _each_register(on_register, target, x, near)


def widened(x: jax.Array, target: Any, vec: int, interpret: bool) -> jax.Array:
    """An array in float32; ``vec`` elements make a register.

    Two bfloat16 of a word are a shift and a mask apart; the compiler's own conversion takes three instructions.
    """
    if x.dtype != jnp.bfloat16 or vec % 2 or interpret:
        return x.astype(jnp.float32)

    def on_register(register: Any) -> Any:
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, vector

        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        words = utils.bitcast(register, ir.VectorType.get((vec // 2,), i32))
        halves = []
        for i in range(vec // 2):
            word = vector.extract(words, dynamic_position=[], static_position=[i])
            halves += [arith.shli(word, utils.c(16, i32)), arith.andi(word, utils.c(-0x10000, i32))]
        return vector.from_elements(ir.VectorType.get((vec,), f32), [utils.bitcast(half, f32) for half in halves])

    return _each_register(on_register, target, x)
