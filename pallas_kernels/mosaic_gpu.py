"""Plans of the Mosaic GPU kernels. At present every plan is refused with a reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """A kernel for one static description of a call.

    Attributes:
        problems: why the kernel cannot do the call; empty if it can.
        run: function of the operands and the keyword ``interpret``.
    """

    problems: tuple[str, ...]
    run: Callable[..., Any]


def _refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a plan with problems was run")


def plan_quantize(*_: Any) -> Plan:
    """Refuses every call."""
    return Plan(("the kernel is not written yet",), _refuse)


plan_sum = plan_sum_quantize = plan_quantize
