"""The answer of a backend to a call described in static terms: how to run it, or every reason why it cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


def _refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a plan with problems was run")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A kernel for one static description of a call.

    Attributes:
        problems: why the kernel cannot do the call; empty if it can.
        run: function of the operands and the keyword ``interpret``.
    """

    problems: tuple[str, ...]
    run: Callable[..., Any] = _refuse
