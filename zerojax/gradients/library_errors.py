"""Errors of libraries that cannot run inside `shard_map`, in words: what the library stumbles over, and the way out.

Equinox's closure conversion compares the shapes it is called with to those it was traced with, shardings included, and
inside `shard_map` the same array has another sharding in the backward pass. That fails in plain JAX too; its message
prints two equal shapes and names neither `shard_map` nor zerojax. Knows messages, not libraries: nothing is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_COMPARES_SHARDINGS = (
    "Closure-converted function called with different dynamic arguments", "pytree does not match out_structure",
)  # fmt: skip


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Around the trace of a user's function: a known error of a library becomes one that names the way out.

    Args:
        what: who runs the function, "value_and_grad" or "apply".

    Raises:
        ValueError: in place of the library's, which is its cause.

    >>> with explained("value_and_grad"):
    ...     raise ValueError("Closure-converted function called with different dynamic arguments to the example ...")
    Traceback (most recent call last):
        ...
    ValueError: value_and_grad: the loss uses a function of Equinox (a checkpointed loop, the default adjoint of ...
    """
    try:
        yield
    except ValueError as err:
        if str(err).startswith(what) or not any(words in str(err) for words in _COMPARES_SHARDINGS):
            raise
        raise ValueError(
            f"{what}: the loss uses a function of Equinox (a checkpointed loop, the default adjoint of diffrax, a "
            "solver of optimistix or lineax) that compares shapes with their shardings, and cannot run inside "
            "jax.shard_map, where losses run here. Take stage 1 or 2, jax.value_and_grad(loss) in a jax.jit of your "
            "own, and shard the optimizer alone: zerojax.zero(tx, layout). Or take another differentiation of that "
            f"library (diffrax: adjoint=diffrax.DirectAdjoint()). It said: {err}"
        ) from err
