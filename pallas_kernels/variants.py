"""The variants of the kernels: what is compiled, checked and counted apart.

A variant is a call without its shapes. It builds the op as a function of arrays, its inputs' shapes and its plan for a
leaf of some size: for the survey of machine code, for the self-check on a GPU, and for the tests.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import mosaic, sass, target_gpu
from pallas_kernels.array import QuantFormat, QuantizedArray
from pallas_kernels.backend import Plan

ELEMENTS = 1 << 20
"""Of a leaf, or of each contribution to a sum."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kernel: an op with formats, dtype, rounding and residual, whatever the shape.

    Attributes:
        op: which.
        fmt: the format written; of a plain sum, that of the contributions.
        dtype: of the leaf, or of the sum.
        stochastic: rounding.
        residual: whether it is written too.
        slices: whether the leaf is cut into slices for 4 x 2 destinations.
        source: format of the contributions to a sum.
        count: contributions.
        addend: whether something carried is added before quantising a sum.
        elements: of a leaf, or of each contribution; no part of the name.
    """

    op: Literal["quantize", "dequantize", "sum", "sum_quantize"]
    fmt: QuantFormat
    dtype: str = "bfloat16"
    stochastic: bool = False
    residual: bool = False
    slices: bool = False
    source: Any = None
    count: int = 0
    addend: bool = False
    elements: int = ELEMENTS

    def __str__(self) -> str:
        flags = (self.stochastic, self.residual, self.slices, self.addend)
        extra = "".join(c for c, on in zip("srda", flags, strict=True) if on)
        source = f"{self.count}x{self.source}-" if self.source else ""
        return f"{self.op}-{source}{self.fmt}-{self.dtype}{extra}"

    @property
    def leaf(self) -> tuple[int, int]:
        """Shape of what is quantised."""
        return 1024, self.elements // 1024

    def contributed(self, whole: jax.Array) -> QuantizedArray:
        """Contributions ``[count, elements]`` in their format, by the reference."""
        from pallas_kernels import ops

        return ops.quantize_slices(whole, self.source, dim=0, num_slices=self.count, implementation="xla")

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays that `function` takes."""
        if self.op == "quantize":
            return (jax.ShapeDtypeStruct(self.leaf, jnp.dtype(self.dtype)),)
        stored = self._stored()
        more = (jax.ShapeDtypeStruct((1, self.elements), jnp.float32),) if self.addend else ()
        return (*jax.tree.leaves(stored), *more)

    def _stored(self) -> Any:
        return jax.eval_shape(self.contributed, jax.ShapeDtypeStruct((self.count, self.elements), jnp.float32))

    def function(self, **how: Any) -> Callable[..., Any]:
        """The op as a function of arrays; ``how`` says by which implementation."""
        from pallas_kernels import ops

        if self.stochastic:
            how |= {"rounding": "stochastic", "seed": 3}
        if self.op in ("quantize", "sum_quantize"):
            how |= {"fmt": self.fmt, "with_residual": self.residual}
        if self.op == "quantize":
            cut = functools.partial(ops.quantize_slices, dim=0, num_slices=(4, 2))
            return functools.partial(cut if self.slices else ops.quantize, **how)
        tree = jax.tree.structure(self._stored())
        op: Any = {
            "dequantize": functools.partial(ops.dequantize, dtype=self.dtype),
            "sum": functools.partial(ops.dequantize_sum, dtype=self.dtype),
            "sum_quantize": ops.dequantize_sum_quantize,
        }[self.op]

        def call(*arrays: jax.Array) -> Any:
            q = jax.tree.unflatten(tree, arrays[: tree.num_leaves])
            more = {"addend": arrays[-1]} if self.addend else {}
            return op(q, **how, **more)

        return call

    def plan(self) -> Plan:
        """The kernel's plan."""
        shape, lead = (1, self.elements), (self.count,)
        if self.op == "quantize":
            cut = (0, (4, 2)) if self.slices else (None, ())
            return mosaic.plan_quantize(self.leaf, self.dtype, *cut, self.fmt, self.stochastic, self.residual)
        if self.op == "dequantize":
            return mosaic.plan_sum((1, *lead), shape, self.source, jnp.dtype(self.dtype), 1.0, clamp=True)
        if self.op == "sum":
            return mosaic.plan_sum(lead, shape, self.source, jnp.dtype(self.dtype), 1.0)
        addend = jnp.dtype("float32") if self.addend else None
        return mosaic.plan_sum_quantize(lead, shape, self.source, self.fmt, 1.0, self.stochastic, addend, self.residual)

    @property
    def bytes_read(self) -> float:
        """Per element: every input byte once."""
        return self.count * self.source.bits_per_element / 8 if self.source else jnp.dtype(self.dtype).itemsize

    @property
    def ideal_bytes(self) -> float:
        """Per element: every input byte read once, every output byte written once."""
        width = jnp.dtype(self.dtype).itemsize
        written = width if self.op in ("dequantize", "sum") else self.fmt.bits_per_element / 8
        return self.bytes_read + written + self.residual * (4 if self.source else width)

    def compile(self, gpu: str) -> tuple[Any, list[sass.KernelCode]]:
        """The compiled program, and its kernels' code: none for a kernel that the process compiled before."""
        arrays, tree = jax.tree.flatten(self.shapes())
        function, programs = self.function(implementation="mosaic_gpu"), self.plan().programs
        with sass.dumping() as place:
            compiled = target_gpu.compile_for(lambda *a: function(*jax.tree.unflatten(tree, a)), arrays, gpu)
            return compiled, sass.read(place, programs.trips if programs else 1)
