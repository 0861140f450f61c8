"""What a run keeps beside its arrays, as JSON: the position of its data, random generators, any small record.

Dicts, lists, tuples, numbers, texts, bytes, NumPy and JAX arrays, PRNG keys, `numpy.random.Generator`s, and data
iterators that have `get_state()`. Not for what is large: it is written as text.
"""

from __future__ import annotations

import base64
from typing import Any

import jax
import numpy as np

from zerojax import _compat

_LARGEST = 1 << 20


def to_json(value: Any, where: str = "data") -> Any:
    """A value in the types of JSON.

    Raises:
        ValueError: a part cannot be kept, or is larger than 1 MiB; its place is named.

    >>> from_json(to_json({"next": (3, b"ab"), "key": jax.random.key(1)}))["next"]
    (3, b'ab')
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            return {"__pairs__": [[to_json(k, where), to_json(v, f"{where}[{k!r}]")] for k, v in value.items()]}
        return {key: to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"__tuple__": items}
    if isinstance(value, np.random.Generator):
        return {"__generator__": to_json(value.bit_generator.state, where)}
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if _compat.is_prng_key(value):
        integers = to_json(np.asarray(jax.random.key_data(value)), where)
        return {"__key__": integers, "kind": str(jax.random.key_impl(value))}
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        array = np.asarray(value)
        if array.nbytes > _LARGEST or array.dtype.hasobject:
            raise ValueError(f"{where} is an array of {array.dtype} {array.shape}: large arrays belong into the state")
        raw = base64.b64encode(array.tobytes()).decode()
        return {"__array__": raw, "dtype": array.dtype.name, "shape": list(array.shape)}
    if hasattr(value, "get_state"):
        return to_json(value.get_state(), where)
    raise ValueError(f"{where} is a {type(value).__name__}: keep dicts, lists, numbers, texts, bytes and small arrays")


def from_json(value: Any) -> Any:
    """What `to_json` made a value of; of an iterator, its state."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__pairs__" in value:
        return {from_json(k): from_json(v) for k, v in value["__pairs__"]}
    if "__tuple__" in value:
        return tuple(from_json(item) for item in value["__tuple__"])
    if "__bytes__" in value:
        return base64.b64decode(value["__bytes__"])
    if "__generator__" in value:
        state = from_json(value["__generator__"])
        generator = np.random.Generator(getattr(np.random, state["bit_generator"])())
        generator.bit_generator.state = state
        return generator
    if "__key__" in value:
        return jax.random.wrap_key_data(from_json(value["__key__"]), impl=value["kind"])
    if "__array__" in value:
        dtype = jax.numpy.dtype(value["dtype"])
        return np.frombuffer(base64.b64decode(value["__array__"]), dtype).reshape(value["shape"])
    return {key: from_json(item) for key, item in value.items()}
