"""Files of the safetensors format: what they hold, slice by slice, without a library and without reading them whole.

Eight bytes with the length of a JSON header, the header with dtype, shape and place of each tensor, then the data. A
model of several files has an index beside them (`*.safetensors.index.json`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip
NAMES = {name: code for code, name in DTYPES.items()}


def open_tensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The tensors of a file, or of all files of an index, by name; mapped, not read.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is not of this format, or cut.
    """
    file = Path(path).expanduser()
    if file.name.endswith(".index.json"):
        try:
            files = set(json.loads(file.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{file} is not an index of safetensors files: {error}") from None
        found: dict[str, np.ndarray] = {}
        for name in sorted(files):
            found |= open_tensors(file.parent / name)
        return found
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        text = opened.read(length) if 0 < length <= size - 8 else b""
    try:
        header: dict[str, Any] = json.loads(text)
        return {name: _map(file, 8 + length, size, entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a complete safetensors file: {type(error).__name__}: {error}") from None


def select_tensors(
    path: str | os.PathLike[str], leaves: Sequence[tuple[Any, Any]], names: Mapping[str, str], cast: bool
) -> list[np.ndarray]:
    """The tensors of some leaves, mapped.

    Args:
        path: as for `open_tensors`.
        leaves: (keys, what has the path, shape and dtype) of each.
        names: what the file calls a leaf, by its keys joined with "."; else it is called so.
        cast: whether another dtype will do.

    Raises:
        ValueError: a leaf is missing, or has another shape or dtype.
    """
    tensors, found = open_tensors(path), []
    for keys, leaf in leaves:
        own = ".".join(jax.tree_util.keystr((key,), simple=True) for key in keys) or "value"
        name = names.get(own, own)
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != leaf.shape or not (cast or tensor.dtype == leaf.dtype):
            has = f"nothing (but {', '.join(list(tensors)[:4])}...)"
            if tensor is not None:
                has = f"{tensor.shape} {tensor.dtype.name}"
            raise ValueError(f"params{leaf.path} {leaf.shape} {leaf.dtype.name}: {path} has {has} as {name!r}")
        found.append(tensor)
    return found


def _map(file: Path, start: int, size: int, entry: dict[str, Any]) -> np.ndarray:
    dtype, (first, last) = jnp.dtype(DTYPES[entry["dtype"]]), entry["data_offsets"]
    shape = tuple(entry["shape"])
    if start + last > size or last - first != dtype.itemsize * int(np.prod(shape, dtype=np.int64)):
        raise ValueError("its data is cut")
    if first == last:
        return np.zeros(shape, dtype)
    raw = np.memmap(file, np.uint8, "r", start + first, (last - first,))
    return raw.view(dtype).reshape(shape)


def header_of(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """What stands before the data of tensors given by name as (dtype, shape), in that order.

    >>> header_of({"w": ("float32", (2,))})[8:].rstrip()
    b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    """
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = at + jnp.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
