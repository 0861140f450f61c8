"""The largest microbatch that fits, from the memory of steps compiled at a few sizes.

Memory is close to a straight line in the examples of a microbatch, and convex: each further example can only bring more
that is alive at once. The line through two sizes therefore errs to the safe side between them, and is trusted up to so
many times the larger of the two. Near the bound the compiler may save more than the line says (it recomputes, or fuses
otherwise), so that the step at the size found fits and a little more may. Knows nothing of how a step is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zerojax.plan_records import Largest

# The second size at least; the compiler takes longer the more ways there are to cut a batch into tiles.
SPAN = 4
# A line is trusted up to so many times the larger microbatch that it was drawn through.
_FAR = 6


def line_through(sizes: Sequence[tuple[int, int]], capacity: int) -> tuple[Largest, int | None]:
    """The largest microbatch by a line through the last two sizes.

    Args:
        sizes: (examples, bytes in all) of the steps compiled, each of more examples than the one before.
        capacity: bytes that may be used.

    Returns:
        What was found; and where the line leads too far beyond its points, the examples to compile at next.

    >>> line_through([(1, 30), (8, 100)], capacity=205)[0].examples  # 20 bytes and 10 for each example
    18
    >>> line_through([(1, 30), (8, 100)], capacity=2020)[1]
    200
    """
    (few, least), (many, most) = sizes[-2:]
    per_example = (most - least) / (many - few)
    compiled = ", ".join(str(size) for size, _ in sizes)
    method = f"line through compiles at {compiled} examples: {per_example / 1e9:.3g} GB per example"
    if per_example <= 0:
        fitting = max((size for size, held in sizes if held <= capacity), default=0)
        return Largest(fitting, method + ", no bound found"), None
    examples = max(0, math.floor(many + (capacity - most) / per_example))
    return Largest(examples, method), examples if len(sizes) < 3 and examples > _FAR * many else None
