"""Secondary partitions made ahead of a region of the program, so that what is inside stays inside the node.

The region is a checkpointed function, whose recomputation then gathers over the innermost axis only, or all
microbatches of a step (arXiv 2306.10209, section 3.2). A secondary is made in the dtype in which the region uses the
parameter and layer by layer where the region scans over it, so this file follows parameters through a jaxpr. Knows
nothing of how equations are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax import _compat
from zerojax.gather.stored import Scope, Stored

# Operations that only rearrange or repeat elements and take one operand: they commute with the gather.
VIEWS = frozenset({"transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "rev", "slice", "copy",
                    "copy_p", "sharding_constraint", "reshard", "mesh_cast", "layout_constraint"})  # fmt: skip
# Equations whose jaxpr sees the same parameter under another name.
ENTERED = frozenset({"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat"})


def hoist_secondaries(jaxpr: Any, inputs: Sequence[Any], scope: Scope) -> list[Any]:
    """The inputs of a region, each stored parameter held as its secondary partition.

    A parameter that every use in the region casts to the same narrower dtype is cast first. Without a secondary
    partition the inputs stay as they are.
    """
    if scope.collectives.secondary is None:
        return list(inputs)
    inner, _ = _compat.open_jaxpr(jaxpr)
    out: list[Any] = []
    for x, var in zip(inputs, inner.invars, strict=True):
        if isinstance(x, Stored) and not x.is_secondary:
            if (dtype := cast_target(inner, var, x.placement.dtype)) != x.placement.dtype:
                x = scope.cast(x, dtype)
            x = scope.secondary(x, stack=int(is_scanned_over(inner, var)))
        out.append(x)
    return out


def cast_target(jaxpr: Any, var: Any, dtype: np.dtype) -> np.dtype:
    """The narrower float dtype to which every use of a variable of `dtype` casts it; `dtype` if there is none."""
    targets = _cast_targets(jaxpr, var) if jnp.issubdtype(dtype, jnp.floating) else set()
    target = targets.pop() if len(targets) == 1 else None
    return target if target is not None and target.itemsize < dtype.itemsize else dtype


def _cast_targets(jaxpr: Any, var: Any) -> set[Any]:
    """The float dtypes to which the uses of a variable cast it; None among them where a use does not cast."""
    found: set[Any] = set()
    for eqn in jaxpr.eqns:
        for position, atom in enumerate(eqn.invars):
            if atom is not var:
                continue
            name = eqn.primitive.name
            if name == "convert_element_type":
                dtype = jnp.dtype(eqn.params["new_dtype"])
                found.add(dtype if jnp.issubdtype(dtype, jnp.floating) else None)
            elif name in VIEWS or name in ("dynamic_slice", "stop_gradient"):
                found |= _cast_targets(jaxpr, eqn.outvars[0])
            elif name in ENTERED or name == "scan":
                body, _ = _compat.open_jaxpr(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))
                found |= _cast_targets(body, body.invars[position])
            else:
                found.add(None)
    return found | ({None} if any(atom is var for atom in jaxpr.outvars) else set())


def is_scanned_over(jaxpr: Any, var: Any) -> bool:
    """Whether the only uses of a variable in the jaxpr, through casts and calls, are as xs of a scan."""
    found = False
    for eqn in jaxpr.eqns:
        for position, atom in enumerate(eqn.invars):
            if atom is not var:
                continue
            name = eqn.primitive.name
            if name == "convert_element_type":
                used = is_scanned_over(jaxpr, eqn.outvars[0])
            elif name == "scan":
                num_consts, num_carry = _compat.scan_arity(eqn.params)
                body, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
                nested = position < num_consts and is_scanned_over(body, body.invars[position])
                used = position >= num_consts + num_carry or nested
            elif name in ENTERED:
                body, _ = _compat.open_jaxpr(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))
                used = is_scanned_over(body, body.invars[position])
            else:
                used = False
            if not used:
                return False
            found = True
    return found
