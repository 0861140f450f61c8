"""A replayed step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open, and its layers as windows.

Tracks: what is computed, what compute waits for, what travels inside a node, between nodes and to and from host memory,
and the iterations of loops. Times are microseconds of the replayed step; bytes and FLOP are arguments of each slice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zerojax.planner.replay import Event, Replay

TRACKS: Mapping[str, str] = {
    "compute": "compute",
    "waits": "compute waits for",
    "inside": "inside the node",
    "between": "between nodes",
    "host": "to and from host memory",
    "loop": "loops",
}
# What JAX and the gathering of weights put around every name.
_AROUND = re.compile(
    r"^(jit\(.*\)|shard_map|while|body|cond|eval_jaxpr|closed_call|checkpoint|rematted_computation|\w*\(*jvp\(\)*|vmap\(\))$"
)


def short_name(op_name: str) -> str:
    """The user's part of JAX's name stack.

    >>> short_name("jit(step)/shard_map/transpose(jvp())/while/body/eval_jaxpr/checkpoint/mlp/up/dot_general")
    'mlp/up/dot_general'
    """
    return "/".join(part for part in op_name.split("/") if not _AROUND.match(part))


def write_trace(replay: Replay, path: str | Path, *, names: Mapping[str, str], title: str) -> None:
    """Writes a recorded replay in the trace event format.

    Args:
        replay: from `zerojax.planner.replay.replay(..., record=True)`.
        path: file to write.
        names: what each collective moves, by its name.
        title: of the process.
    """
    tracks = {lane: number for number, lane in enumerate(TRACKS, 1)}
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}]
    for lane, number in tracks.items():
        common = {"ph": "M", "pid": 1, "tid": number}
        events.append({**common, "name": "thread_name", "args": {"name": TRACKS[lane]}})
        events.append({**common, "name": "thread_sort_index", "args": {"sort_index": number}})
    for event in replay.events:
        arguments: dict[str, Any] = {"instruction": event.name, "op_name": event.op_name}
        if event.num_bytes:
            arguments["bytes"] = event.num_bytes
        if event.flops:
            arguments |= {"FLOP": event.flops, "products": event.detail}
        seconds = event.end - event.begin
        if event.flops and seconds:
            arguments["TFLOP/s"] = round(event.flops / seconds / 1e12, 1)
        events.append(
            {
                "ph": "X", "pid": 1, "tid": tracks[event.lane], "name": label(event, names), "cat": phase(event),
                "ts": round(event.begin * 1e6, 3), "dur": round(seconds * 1e6, 3), "args": arguments,
            }
        )  # fmt: skip
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def label(event: Event, names: Mapping[str, str]) -> str:
    """What an event is called: by what it moves, or by the user's names."""
    if event.name in names:
        return f"{kind_of(event)} {names[event.name]}"
    return event.name if event.lane == "loop" else short_name(event.op_name) or event.name


def kind_of(event: Event) -> str:
    """The kind of a collective, by the name that the compiler gave it."""
    return event.name.replace("_", "-").split(".")[0].removesuffix("-start")


def phase(event: Event) -> str:
    """ "backward" (recomputation too), "forward" or "update"."""
    if "transpose(" in event.op_name or "rematted_computation" in event.op_name:
        return "backward"
    return "forward" if "jvp(" in event.op_name else "update"


class Window(NamedTuple):
    """A part of a step: one iteration of a loop, or all of it."""

    title: str
    begin: float
    end: float


def layer_windows(replay: Replay, most: int = 2) -> list[Window]:
    """An iteration from the middle of each of the longest loops; the whole step where there are none.

    Args:
        replay: with its events.
        most: how many windows at most.
    """
    loops: dict[str, list[Event]] = {}
    for event in replay.events:
        if event.lane == "loop":
            loops.setdefault(event.name.split(" ")[0], []).append(event)
    inner = {name: turns for name, turns in loops.items() if len(turns) > 1 and not _holds_another(name, loops)}
    longest = sorted(inner, key=lambda name: -sum(turn.end - turn.begin for turn in inner[name]))[:most]
    if not longest:
        return [Window("the step", 0.0, replay.seconds)]
    windows = []
    for name in longest:
        turn = inner[name][len(inner[name]) // 2]
        number, _, count = turn.name.split(" ")[1].partition("/")
        inside = [phase(e) for e in events_of(replay, Window("", turn.begin, turn.end)) if e.lane == "compute"]
        most_often = max(set(inside), key=inside.count, default=phase(turn))
        windows.append(Window(f"{most_often}, iteration {number} of {count}", turn.begin, turn.end))
    return sorted(windows, key=lambda window: window.begin)


def _holds_another(name: str, loops: Mapping[str, list[Event]]) -> bool:
    first = loops[name][0]
    return any(
        first.begin <= turns[0].begin and turns[0].end <= first.end and len(turns) > len(loops[name])
        for other, turns in loops.items()
        if other != name
    )


def events_of(replay: Replay, window: Window) -> Iterator[Event]:
    """The events that are, in part, in a window; loops left out."""
    for event in replay.events:
        if event.lane != "loop" and event.end > window.begin and event.begin < window.end:
            yield event
