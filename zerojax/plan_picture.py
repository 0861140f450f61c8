"""A plan as a picture: stacked bars of memory by class, and of traffic by mesh axis, for each configuration.

Needs matplotlib; draws to a file, no display.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from zerojax.plan_records import Plan


def draw_plan(plan: Plan, path: str | Path) -> None:
    """Writes the picture; the suffix of `path` chooses the format.

    Args:
        plan: what to draw.
        path: file to write.
    """
    names = [one.name.replace(" + ", "\n+ ") for one in plan.configs]
    figure = Figure(figsize=(max(7.0, 1.4 * len(names) + 3), 8.5), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    classes = list(dict.fromkeys(name for one in plan.configs for name in one.memory.classes))
    bars = {name: [one.memory.classes.get(name, 0) / 1e9 for one in plan.configs] for name in classes}
    _stack(upper, names, bars)
    upper.margins(y=0.05)
    upper.axhline(plan.configs[0].memory.capacity / 1e9, color="black", linestyle="--", label="usable")
    upper.set_ylabel("GB per device")
    upper.set_title(f"{plan.model} on {plan.num_nodes} x {plan.devices_per_node} {plan.target.name}")
    upper.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    axes = list(dict.fromkeys("+".join(s.axes) for one in plan.configs for s in one.streams))
    bars = {
        f"over {axis}": [
            sum(s.received_bytes for s in one.streams if "+".join(s.axes) == axis) / 1e9 for one in plan.configs
        ]
        for axis in axes
    }
    _stack(lower, names, bars)
    entering = [one.node_bytes / 1e9 for one in plan.configs]
    lower.plot(range(len(names)), entering, "kD", label="into each node")
    lower.set_ylabel("GB into a device per step")
    lower.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)


def _stack(axes: object, names: Sequence[str], bars: dict[str, list[float]]) -> None:
    bottom = [0.0] * len(names)
    for label, heights in bars.items():
        if any(heights):
            axes.bar(range(len(names)), heights, bottom=bottom, label=label)  # type: ignore[attr-defined]
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(names)), names, fontsize="small")  # type: ignore[attr-defined]
