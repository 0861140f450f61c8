"""Processes agree when a program is compiled: a difference is one error on all of them instead of a hang.

Every process of a job compiles the same programs in the same order, and each program once: the moment to compare what
goes into it, at no cost for the steps that follow. The comparison rides on an operation that returns its input and is
nothing in the compiled program; tracing alone (`jax.make_jaxpr`, `jax.eval_shape`) compares nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from zerojax.hosts.agreement import agree

_Facts = tuple[tuple[str, str], ...]
_agreed: set[tuple[str, _Facts]] = set()


def agreeing(x: jax.Array, what: str, facts: Mapping[str, Any]) -> jax.Array:
    """`x`; where a program with it is compiled, all processes must say the same of these facts, and compile it too.

    Args:
        x: an array of any shape that the program uses.
        what: what is being compiled, for messages.
        facts: as for `agree`.

    Raises:
        ValueError: when it is compiled: a fact differs, or a process does not compile it.

    >>> import jax.numpy as jnp
    >>> float(jax.jit(lambda x: 2 * agreeing(x, "a test", {"batch": x.shape}))(jnp.ones(())))
    2.0
    """
    return _agreeing.bind(x, what=what, facts=tuple((name, str(value)) for name, value in facts.items()))


def _compare(what: str, facts: _Facts) -> None:
    if (what, facts) not in _agreed:
        agree(what, dict(facts))
        _agreed.add((what, facts))


def _when_run(x: Any, *, what: str, facts: _Facts) -> Any:
    _compare(what, facts)
    return x


def _when_lowered(_: Any, x: Any, *, what: str, facts: _Facts) -> list[Any]:
    _compare(what, facts)
    return [x]


_agreeing = jex_core.Primitive("zerojax_agreeing")
_agreeing.def_impl(_when_run)
_agreeing.def_abstract_eval(lambda aval, **_: aval)
ad.deflinear2(_agreeing, lambda cotangent, _, **__: [cotangent])
batching.defvectorized(_agreeing)
mlir.register_lowering(_agreeing, _when_lowered)
