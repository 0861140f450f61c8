"""What enters a machine for each byte that a device receives, by the axes that a collective spans.

The cost model is that of compiled programs, `zerojax.compiled_collective.entering_node`, so that a prediction and a
program are counted alike. Knows nothing of parameters.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from zerojax.compiled_collective import entering_node

_UNIT = 1 << 20


@functools.lru_cache(maxsize=256)
def node_share(kind: str, axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...], num_nodes: int) -> float:
    """Bytes that enter a node for each byte that a device receives, in a collective over some axes.

    Args:
        kind: of collective.
        axes: that it spans.
        mesh: axis names and sizes, outermost first; devices are numbered node by node.
        num_nodes: machines, which divide the devices into consecutive parts.

    >>> node_share("all-gather", ("node",), (("node", 48), ("local", 8)), 48)
    8.0
    """
    k = math.prod(size for axis, size in mesh if axis in axes)
    if k == 1:
        return 0.0
    received = {"all-gather": k - 1, "all-reduce": 2 * (k - 1) / k}.get(kind, (k - 1) / k) * k * _UNIT
    per_node = math.prod(size for _, size in mesh) // num_nodes
    machines = (("node", num_nodes), ("in node", per_node))
    return entering_node(kind, k * _UNIT, _groups(axes, mesh), machines, ("node",)) / received


@functools.lru_cache(maxsize=64)
def _groups(axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...]) -> tuple[tuple[int, ...], ...]:
    """Device numbers of the groups that a collective over some axes forms."""
    numbers = np.arange(math.prod(size for _, size in mesh)).reshape([size for _, size in mesh])
    inside = [d for d, (axis, _) in enumerate(mesh) if axis in axes]
    outside = [d for d, (axis, _) in enumerate(mesh) if axis not in axes]
    k = math.prod(mesh[d][1] for d in inside)
    return tuple(tuple(map(int, group)) for group in numbers.transpose([*outside, *inside]).reshape(-1, k))
