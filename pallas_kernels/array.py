"""What a block-quantised array is: the format, the record that carries it, and its size on the wire.

A slice of ``n`` elements is flattened, padded with zeros to whole blocks, and stored as one signed level per element
and one scale per block: ``x ~ scale * level``. A *lead* dimension counts slices (destinations, contributions); the
logical ``shape`` in the metadata is always that of one slice, so stacking, gathering and exchanging slices with
``jax.tree.map`` keeps the record valid. This file knows neither how levels are computed nor on which backend.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

TILE = 1024
"""Elements under one bfloat16 scale when the block scales are float8_e4m3fn."""

LEVELS = ("integer", "e2m1")
SCALE_DTYPES = ("bfloat16", "float8_e4m3fn")
ROTATIONS = (32, 64)
FLOAT_DTYPES = ("float32", "bfloat16", "float16")
MIN_BLOCK, MAX_BLOCK = 16, 2048

Rounding = Literal["nearest", "stochastic"]


@dataclasses.dataclass(frozen=True)
class QuantFormat:
    """How one element is stored and travels: bits, elements per scale, dtype of the scale, levels, rotation.

    Attributes:
        bits: 8 (one int8 an element), 4 (two in one uint8, split by the halves of a block) or 2 (four in one, split by
            the quarters).
        block_size: elements that share a scale, a power of two from 16 to 2048.
        scale_dtype: "bfloat16", or "float8_e4m3fn" under one bfloat16 scale per tile of 1024 elements.
        levels: "integer" (-127..127, -7..7 or -1..1) or, with 4 bits, "e2m1" (0, .5, 1, 1.5, 2, 3, 4, 6 and negatives).
        rotate: width of a Hadamard rotation inside each block before quantising (32 or 64), or None.

    Raises:
        ValueError: fields are outside their choices; the message names each.

    >>> QuantFormat(4, 32, "float8_e4m3fn")
    QuantFormat(bits=4, block_size=32, scale_dtype='float8_e4m3fn', levels='integer', rotate=None)
    >>> QuantFormat(4, 32, "float8_e4m3fn").bits_per_element
    4.265625
    """

    bits: int = 8
    block_size: int = 128
    scale_dtype: Any = "bfloat16"
    levels: str = "integer"
    rotate: int | None = None

    def __post_init__(self) -> None:
        size, scale = self.block_size, _dtype_name(self.scale_dtype)
        is_size = isinstance(size, (int, np.integer)) and MIN_BLOCK <= size <= MAX_BLOCK and not size & (size - 1)
        faults = {
            "bits must be 8 or 4, or 2": self.bits not in (8, 4, 2) or isinstance(self.bits, bool),
            f"block_size must be a power of two from {MIN_BLOCK} to {MAX_BLOCK}": not is_size,
            "scale_dtype must be 'bfloat16' or 'float8_e4m3fn'": scale not in SCALE_DTYPES,
            f"float8_e4m3fn scales need a block_size of at most {TILE}": (
                is_size and scale == "float8_e4m3fn" and size > TILE
            ),
            "levels must be 'integer', or 'e2m1' with 4 bits": (
                self.levels not in LEVELS or (self.levels == "e2m1" and self.bits != 4)
            ),
            "rotate must be None, 32 or 64, and divide block_size": self.rotate is not None
            and (self.rotate not in ROTATIONS or not is_size or size % self.rotate != 0),
        }
        if found := [text for text, fault in faults.items() if fault]:
            raise ValueError(f"{self!r}: {'; '.join(found)}")
        object.__setattr__(self, "block_size", int(size))
        object.__setattr__(self, "scale_dtype", scale)

    @property
    def element(self) -> str:
        """The dtype of a level: "int8", "int4", "int2" or "e2m1"."""
        return self.levels if self.levels == "e2m1" else f"int{self.bits}"

    def __str__(self) -> str:
        """The format in one word, as tables and messages name it.

        >>> print(QuantFormat(4, 32, "float8_e4m3fn", rotate=32))
        int4/32-e4m3-rotated32
        """
        scales, rotation = "-e4m3" * self.tiled, f"-rotated{self.rotate}" if self.rotate else ""
        return f"{self.element}/{self.block_size}{scales}{rotation}"

    @property
    def qmax(self) -> int:
        """The largest level: 127, 7, 1, or 6 for e2m1."""
        return 6 if self.levels == "e2m1" else 2 ** (self.bits - 1) - 1

    @property
    def reach(self) -> float:
        """The largest element of a block, in scales: the largest level, but 1.5 where that is 1.

        With levels -1, 0, 1 no element is then off by more than a third of the largest, rather than by half of it.
        """
        return 1.5 if self.bits == 2 else self.qmax

    @property
    def tiled(self) -> bool:
        """Whether a second, bfloat16 scale per tile of 1024 elements exists."""
        return self.scale_dtype == "float8_e4m3fn"

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one block."""
        return self.block_size * self.bits // 8

    @property
    def bits_per_element(self) -> float:
        """Bits on the wire per element, scales included, for a slice of whole blocks (and whole tiles)."""
        scale_bits = 8 / self.block_size + 16 / TILE if self.tiled else 16 / self.block_size
        return self.bits + scale_bits

    def rotates_like(self, other: QuantFormat) -> bool:
        """Whether values rotated for one format are rotated for the other."""
        return self.rotate == other.rotate and (self.rotate is None or self.block_size == other.block_size)

    def padded_size(self, size: int) -> int:
        """Elements stored for a slice of ``size`` elements: whole blocks, or whole tiles where tiles have a scale."""
        unit = TILE if self.tiled else self.block_size
        return -(-size // unit) * unit

    def num_blocks(self, size: int) -> int:
        """Blocks stored for a slice of ``size`` elements."""
        return self.padded_size(size) // self.block_size

    def message_bytes(self, size: int) -> int:
        """Bytes on the wire of a slice of ``size`` elements: payload, block scales and tile scales.

        >>> QuantFormat(4, 128).message_bytes(1000)
        528
        """
        padded = self.padded_size(size)
        scales = padded // self.block_size + 2 * (padded // TILE) if self.tiled else 2 * padded // self.block_size
        return padded * self.bits // 8 + scales


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """Levels and scales of one slice, or of several slices stacked on lead dimensions; a pytree.

    Attributes:
        qvalue: ``[*lead, blocks, block_size]`` int8, or ``[*lead, blocks, block_size // 2]`` uint8 for 4 bits, where
            byte j of a block holds element j in the low nibble and element ``j + block_size / 2`` in the high one;
            ``block_size // 4`` for 2 bits, with element ``j + k * block_size / 4`` in bits 2k and 2k + 1.
        scale: ``[*lead, blocks]`` bfloat16 or float8_e4m3fn; NaN for a block that held NaN or Inf.
        tile_scale: ``[*lead, tiles]`` bfloat16 with float8 block scales, else None.
        format: `QuantFormat`, static.
        shape: logical shape of one slice, static (lead dimensions are not part of it).
        dtype: name of the dtype that was quantised, static.

    The lead dimensions are whatever the arrays carry, so ``jax.tree.map(lambda a: lax.all_gather(a, axis), q)`` and
    friends return a valid record.
    """

    qvalue: jax.Array
    scale: jax.Array
    tile_scale: jax.Array | None
    format: QuantFormat = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def lead(self) -> tuple[int, ...]:
        """Sizes of the lead dimensions, outermost first."""
        return tuple(self.qvalue.shape[:-2])

    @property
    def size(self) -> int:
        """Elements of one slice, padding not counted."""
        return math.prod(self.shape)

    @property
    def message_bytes(self) -> int:
        """Bytes on the wire of one slice."""
        return self.format.message_bytes(self.size)

    @property
    def wire_bits(self) -> float:
        """Bits on the wire per element of the slice, scales and padding included (0.0 for an empty slice)."""
        return 8.0 * self.message_bytes / self.size if self.size else 0.0

    def validate(self) -> QuantizedArray:
        """Returns self after checking the shapes and dtypes of the arrays against the metadata.

        Raises:
            ValueError: an array is missing, has the wrong dtype, or a shape that does not follow from the others.
        """
        fmt, lead, blocks = self.format, self.lead, self.format.num_blocks(self.size)
        tiles = fmt.padded_size(self.size) // TILE
        want = {
            "qvalue": ((*lead, blocks, fmt.block_bytes), "int8" if fmt.bits == 8 else "uint8"),
            "scale": ((*lead, blocks), fmt.scale_dtype),
            "tile_scale": ((*lead, tiles), "bfloat16") if fmt.tiled else None,
        }
        for name, expected in want.items():
            got = getattr(self, name)
            if (got is None) != (expected is None):
                state = "missing" if got is None else "present"
                raise ValueError(f"{name} is {state}, but scale_dtype={fmt.scale_dtype} says the opposite")
            if expected is not None and (tuple(got.shape), np.dtype(got.dtype).name) != expected:
                raise ValueError(
                    f"{name} must be {expected[1]}{list(expected[0])} for a slice of shape {self.shape} in {fmt}, "
                    f"got {np.dtype(got.dtype).name}{list(got.shape)}"
                )
        return self


def _dtype_name(dtype: Any) -> str:
    try:
        return np.dtype(dtype).name
    except TypeError:
        return repr(dtype)


def check_float(x: jax.Array | np.ndarray | jax.ShapeDtypeStruct, what: str = "input") -> None:
    """Raises ValueError unless ``x`` is float32, bfloat16 or float16."""
    if np.dtype(x.dtype).name not in FLOAT_DTYPES:
        raise ValueError(f"{what} must be one of {FLOAT_DTYPES}, got {np.dtype(x.dtype).name}{list(x.shape)}")


def check_output_dtype(dtype: Any) -> np.dtype:
    """The dtype as numpy's, after checking that it is one of the three float types."""
    name = np.dtype(dtype).name
    if name not in FLOAT_DTYPES:
        raise ValueError(f"dtype must be one of {FLOAT_DTYPES}, got {name}")
    return jnp.dtype(name)
