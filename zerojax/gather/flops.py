"""FLOP of a traced loss, for when nothing is compiled."""

from __future__ import annotations

import math
from typing import Any

from zerojax import _compat
from zerojax.gather.primitives import PRIMITIVES, Kind


def traced_flops(jaxpr: Any, *, recomputed: bool = True) -> int:
    """FLOP of forward and backward in matrix products, from a traced loss: 3 of each, 4 where it is recomputed.

    An estimate for when nothing is compiled: the backward pass of a product is two of its size.

    >>> import jax, jax.numpy as jnp
    >>> traced_flops(jax.make_jaxpr(lambda w, x: jnp.sum(x @ w))(jnp.ones((8, 8)), jnp.ones((2, 8))))
    768
    """
    return _flops(_compat.open_jaxpr(jaxpr)[0], 3, recomputed)


def _flops(jaxpr: Any, factor: int, recomputed: bool) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            inner = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
            total += factor * 2 * inner * math.prod(eqn.outvars[0].aval.shape)
            continue
        again = factor + 1 if recomputed and PRIMITIVES.get(name) is Kind.CHECKPOINT else factor
        times = eqn.params["length"] if name == "scan" else 1
        total += sum(times * _flops(body, again, recomputed) for body in _compat.sub_jaxprs(eqn))
    return total
