"""Cotangents as arrays, and lists of values of which some are meant: what rules of gathers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.gather.order import together


def instantiated(cotangent: Any) -> Any:
    """A cotangent as an array, also where it is known to be zero."""
    if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    return (np.zeros if aval.dtype == jax.dtypes.float0 else jnp.zeros)(aval.shape, aval.dtype)


def after(shards: list[Any], cotangents: list[Any]) -> tuple[list[Any], list[Any]]:
    """Makes what follows on `shards` wait for the cotangents: their gather cannot be merged with an earlier one."""
    real = [is_inexact(c) for c in cotangents]
    shards, waited = together(shards, take(cotangents, real))
    return shards, fill(cotangents, real, waited)


def is_inexact(x: Any) -> bool:
    """Whether a value can have a derivative."""
    return jnp.issubdtype(jnp.result_type(x) if not hasattr(x, "dtype") else x.dtype, jnp.inexact)


def take(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    """The values that are meant.

    >>> take("abc", [True, False, True])
    ['a', 'c']
    """
    return [v for v, m in zip(values, mask, strict=True) if m]


def fill(values: Sequence[Any], mask: Sequence[bool], replacements: Sequence[Any]) -> list[Any]:
    """The values, with others in place of those that are meant.

    >>> fill("abc", [True, False, True], [1, 2])
    [1, 'b', 2]
    """
    new = iter(replacements)
    return [next(new) if m else v for v, m in zip(values, mask, strict=True)]
