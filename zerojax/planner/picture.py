"""A plan as a picture: bars of memory and traffic for each configuration, and one layer's forward and backward in time.

The bars are stacked, memory by class and traffic by mesh axis. The timeline is of the replayed program that the plan
recommends, or of its first: one iteration of the loop over layers in each direction. Needs matplotlib.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zerojax.planner.records import Plan
from zerojax.planner.replay import Event, Replay
from zerojax.planner.trace import TRACKS, Window, events_of, kind_of, label, layer_windows

_LANES = ("compute", "waits", "inside", "between", "host")
_COLORS = {
    "matrix products": "#3b6fb6", "other kernels": "#9dbfe3", "compute waits": "#d1495b",
    "all-gather": "#2a9d8f", "reduce-scatter": "#e9a23b", "all-to-all": "#8c5fb0", "other collectives": "#7f7f7f",
    "host copies": "#b8860b",
}  # fmt: skip
# Bars that take less of a window carry no name, and names longer than their bar are cut.
_NAMED = 0.05
_LETTERS = 165


def draw_plan(
    plan: Plan, path: str | Path, replay: Replay | None = None, names: Mapping[str, str] | None = None
) -> None:
    """Writes the picture; the suffix of `path` chooses the format.

    Args:
        plan: what to draw.
        path: file to write.
        replay: a recorded replay, for the timeline; None leaves it out.
        names: what each collective moves, by its name.
    """
    windows = layer_windows(replay) if replay is not None else []
    labels = [one.name.replace(" + ", "\n+ ") for one in plan.configs]
    width = max(13.0 if windows else 7.0, 1.4 * len(labels) + 3)
    figure = Figure(figsize=(width, 8.5 + 3 * len(windows)), layout="constrained")
    upper, lower, *timelines = figure.subplots(
        2 + len(windows), 1, gridspec_kw={"height_ratios": [4, 4] + [3] * len(windows)}
    )
    _memory(upper, plan, labels)
    _traffic(lower, plan, labels)
    for axes, window in zip(timelines, windows, strict=True):
        assert replay is not None
        draw_window(axes, replay, window, names or {})
    if windows:
        patches = [Patch(color=color, label=name) for name, color in _COLORS.items()]
        timelines[-1].legend(handles=patches, ncols=len(patches), loc="upper center", bbox_to_anchor=(0.5, -0.25),
                             fontsize="small", frameon=False)  # fmt: skip
    figure.savefig(path, dpi=120)


def _memory(axes: Any, plan: Plan, labels: Sequence[str]) -> None:
    classes = list(dict.fromkeys(name for one in plan.configs for name in one.memory.classes))
    bars = {name: [one.memory.classes.get(name, 0) / 1e9 for one in plan.configs] for name in classes}
    _stack(axes, labels, bars)
    axes.margins(y=0.05)
    axes.axhline(plan.configs[0].memory.capacity / 1e9, color="black", linestyle="--", label="usable")
    axes.set_ylabel("GB per device")
    axes.set_title(f"{plan.model} on {plan.num_nodes} x {plan.devices_per_node} {plan.target.name}")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _traffic(axes: Any, plan: Plan, labels: Sequence[str]) -> None:
    over = list(dict.fromkeys("+".join(s.axes) for one in plan.configs for s in one.streams))
    bars = {
        f"over {axis}": [
            sum(s.received_bytes for s in one.streams if "+".join(s.axes) == axis) / 1e9 for one in plan.configs
        ]
        for axis in over
    }
    _stack(axes, labels, bars)
    axes.plot(range(len(labels)), [one.node_bytes / 1e9 for one in plan.configs], "kD", label="into each node")
    axes.set_ylabel("GB into a device per step")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _stack(axes: Any, names: Sequence[str], bars: dict[str, list[float]]) -> None:
    bottom = [0.0] * len(names)
    for name, heights in bars.items():
        if any(heights):
            axes.bar(range(len(names)), heights, bottom=bottom, label=name, width=min(0.8, 0.15 * len(names)))
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(names)), names, fontsize="small")


def draw_window(axes: Any, replay: Replay, window: Window, names: Mapping[str, str]) -> None:
    """Draws the lanes of a replay in a window, in milliseconds from its beginning.

    Args:
        axes: of matplotlib.
        replay: with its events.
        window: from `layer_windows`.
        names: what each collective moves, by its name.
    """
    length, waited = window.end - window.begin, 0.0
    lanes = _LANES if replay.busy["host"] else _LANES[:-1]
    for event in events_of(replay, window):
        begin, end = max(event.begin, window.begin), min(event.end, window.end)
        row = len(lanes) - 1 - lanes.index(event.lane)
        axes.broken_barh(
            [((begin - window.begin) * 1e3, (end - begin) * 1e3)], (row - 0.42, 0.84), color=_COLORS[_sort(event)],
            edgecolor="white", linewidth=0.4,
        )  # fmt: skip
        waited += (end - begin) * (event.lane == "waits")
        if end - begin > _NAMED * length:
            letters = int(_LETTERS * (end - begin) / length)
            axes.text(((begin + end) / 2 - window.begin) * 1e3, row, _cut(_text(event, names), letters), ha="center",
                      va="center", fontsize=7, color="white", clip_on=True)  # fmt: skip
    axes.set_yticks(range(len(lanes)), [TRACKS[lane] for lane in reversed(lanes)])
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    axes.set_xlim(0, length * 1e3)
    axes.set_xlabel("ms")
    axes.set_title(f"{window.title}: {length * 1e3:.2f} ms, compute waits {waited * 1e3:.2f} ms", loc="left")


def _sort(event: Event) -> str:
    if event.lane == "waits":
        return "compute waits"
    if event.lane == "compute":
        return "matrix products" if event.flops else "other kernels"
    if event.lane == "host":
        return "host copies"
    return kind_of(event) if kind_of(event) in _COLORS else "other collectives"


def _text(event: Event, names: Mapping[str, str]) -> str:
    """What stands on a bar: the leaves of a collective, whose kind the color says; the extents of a product."""
    if event.name in names:
        leaves = re.sub(r"\['?([^'\]]*)'?\]", r".\1", names[event.name])
        return re.sub(r"(^|\s)\.", r"\1", leaves)
    return event.detail or label(event, names)


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: max(letters - 1, 0)] + "…" if letters > 3 else ""
