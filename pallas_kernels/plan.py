"""The answer of a backend to a call described in static terms: how to run it, or every reason why it cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


def _refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a plan with problems was run")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The programs that a kernel runs; with its machine code they say what it costs (`sass`).

    Attributes:
        count: programs of the grid.
        elements: of the result that one program makes.
        trips: how often the loop of a program runs; 1 without a loop.
        loads_shared: by the bytes of a load, lanes that read the same address, which costs one transaction.
        stores_shared: the same for stores.
    """

    count: int
    elements: int
    trips: int = 1
    loads_shared: Mapping[int, int] = dataclasses.field(default_factory=dict)
    stores_shared: Mapping[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A kernel for one static description of a call.

    Attributes:
        problems: why the kernel cannot do the call; empty if it can.
        run: function of the operands and the keyword ``interpret``.
        programs: what runs; None where there are problems.
    """

    problems: tuple[str, ...]
    run: Callable[..., Any] = _refuse
    programs: Programs | None = None
