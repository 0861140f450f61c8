"""The first step of a job of several processes: all compare what they are about to run, and learn when to stop.

At the first call of a step the processes compare versions, configuration, layout, batch shapes and the step's program
(loss, optimizer, hyperparameters); from then on nothing is compared. A job that is told to stop (SIGTERM, which JAX's
coordination service catches), and whose loop does nothing about it, ends here a few steps later, at the same step on
all processes, as a single process would have at once.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from zerojax import _compat
from zerojax.hosts.agreement import agree
from zerojax.hosts.preemption import StopPoint
from zerojax.layout.facts import layout_facts
from zerojax.layout.layout import Layout

Tree = Any
# A loop with a checkpoint manager ends by itself at the step of the notice.
_GRACE_STEPS = 8
_TERMINATED = 128 + 15


class AgreeingStep:
    """A step whose first call is preceded by an agreement of all processes."""

    def __init__(self, step: Callable[..., Any], layout: Layout) -> None:
        self._step, self._layout = step, layout
        self._count = 0
        self._stop = StopPoint(grace=_GRACE_STEPS)

    def __call__(self, state: Any, batch: Tree, *rest: Any) -> Any:
        """Takes a step; the first time, after all processes agree on it.

        Raises:
            ValueError: they do not; the field and the processes are named.
        """
        if any(_compat.is_traced(x) for x in jax.tree.leaves((state, batch, rest))):
            return self._step(state, batch, *rest)
        if self._count == 0:
            agree("the first step", self._facts(state, batch, rest))
        self._count += 1
        if self._stop.reached(self._count):
            print(
                f"zerojax: process {jax.process_index()} was told to stop (SIGTERM) {_GRACE_STEPS} steps ago, and the "
                "loop goes on: it ends now. zerojax.CheckpointManager saves in time (manager.stopping)",
                file=sys.stderr,
            )
            raise SystemExit(_TERMINATED)
        return self._step(state, batch, *rest)

    def __getattr__(self, name: str) -> Any:
        """`lower` and the like of the compiled step."""
        return getattr(self._step, name)

    def _facts(self, state: Any, batch: Tree, rest: Any) -> dict[str, Any]:
        shapes = [(jax.tree_util.keystr(path), tuple(np.shape(x)), str(getattr(x, "dtype", type(x).__name__)))
                  for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]]  # fmt: skip
        facts = layout_facts(self._layout) | {"shapes of the batch": shapes}
        try:
            program = program_digest(self._step.trace(state, batch, *rest).jaxpr)  # type: ignore[attr-defined]
        except ValueError as error:  # wrong here, perhaps fine elsewhere: all must hear of it
            program = f"{type(error).__name__}: {error}"
        return facts | {"the step (loss, optimizer or a hyperparameter)": program}


def program_digest(jaxpr: Any) -> str:
    """A name of a traced program: operations, shapes, literals and the values of small constants.

    >>> first, second = (jax.make_jaxpr(lambda x: x * rate)(1.0) for rate in (0.1, 0.2))
    >>> program_digest(first) == program_digest(second)
    False
    """
    found = hashlib.sha256()

    def add(value: Any) -> None:
        found.update(repr(value).encode())

    def walk(jaxpr: Any) -> None:
        jaxpr, consts = _compat.open_jaxpr(jaxpr)
        for const in consts:
            add((np.shape(const), str(getattr(const, "dtype", ""))))
            if np.size(const) <= 1024 and not _compat.is_prng_key(const) and getattr(const, "is_fully_addressable", 1):
                add(np.asarray(const).tobytes())
        for eqn in jaxpr.eqns:
            add(eqn.primitive.name)
            for var in eqn.invars:
                literal = isinstance(var, _compat.Literal)
                add(np.asarray(var.val).tolist() if literal else str(getattr(var.aval, "shape", "")))
            add([f"{getattr(var.aval, 'shape', '')} {getattr(var.aval, 'dtype', '')}" for var in eqn.outvars])
            for name in sorted(eqn.params):
                parameter(eqn.params[name])

    def parameter(value: Any) -> None:
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            walk(value)
        elif isinstance(value, (tuple, list)):
            for item in value:
                parameter(item)
        elif isinstance(value, (int, float, complex, str, np.dtype)):
            add(value)

    walk(jaxpr)
    return found.hexdigest()[:12]
