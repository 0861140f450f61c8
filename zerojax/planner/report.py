"""A plan for people: tables of memory, traffic, time and advice on the terminal.

GB are 10^9 bytes of one device unless a heading says node; M is the bytes of the parameters in the dtype of the
computation. The tables need rich; the JSON form of a plan does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from zerojax.planner.records import ConfigPlan, Plan
from zerojax.planner.speed import LARGEST_ERROR, Speed

_MEANING = {
    "params": "parameters", "master": "master weights", "moments": "optimizer moments",
    "batch": "batch and counters", "error_feedback": "error feedback",
    "replica": "replica of the weights", "grads": "gradients",
    "secondary": "secondary partition",
    "activations": "activations, gathered weights, workspace", "code": "machine code", "outputs": "further results",
}  # fmt: skip
_MOST_LEAVES = 8


def print_plan(plan: Plan, console: Console) -> None:
    """Prints a plan; one configuration in full, several side by side and the recommended one in full."""
    console.print(_heading(plan))
    if len(plan.configs) > 1:
        for table in _comparison(plan):
            console.print(table)
    index = 0 if len(plan.configs) == 1 else plan.recommended
    if index is not None:
        for part in _details(plan, plan.configs[index]):
            console.print(part)
    console.print(_advice(plan))


def _heading(plan: Plan) -> Text:
    links = plan.links
    return Text.from_markup(
        f"[bold]{plan.model}[/]: {plan.parameters / 1e9:.3g}B parameters, M = {_gb(plan.model_bytes)} GB; "
        f"{plan.num_nodes} x {plan.devices_per_node} {plan.target.name}; "
        f"{plan.examples_per_device} example{'s' * (plan.examples_per_device > 1)} per device"
        + (f" x {plan.microbatches} microbatches" if plan.microbatches > 1 else "")
        + f"; {links.node_bandwidth / 1e9:.4g} GB/s into a node, {links.link_bandwidth / 1e9:.4g} GB/s into a device "
        "inside it\n"
    )


def _comparison(plan: Plan) -> Iterator[Table]:
    table = _table("Memory: GB per device; mb: examples of the largest microbatch")
    compiled = any(one.is_compiled for one in plan.configs)
    for name in ("", "params", "grads", "optim.", "2nd", *(["activ."] if compiled else []), "total", "fits", "mb"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for index, one in enumerate(plan.configs):
        held = one.memory.classes
        table.add_row(
            _label(plan, index), _gb(held["params"]), _gb(held["grads"]),
            _gb(held["master"] + held["moments"] + held["error_feedback"]), _gb(held["secondary"] + held["replica"]),
            *([_gb(held.get("activations"))] if compiled else []),
            _gb(one.memory.total), "[green]yes[/]" if one.memory.fits else "[red]no[/]",
            "" if one.largest is None else str(one.largest.examples),
        )  # fmt: skip
    yield table
    if any(one.speed for one in plan.configs):
        yield _speeds(plan)
        return
    table = _table("Per step: GB into a device and into a node; seconds by the model")
    for name in ("", "device", "node", "node/M", "net s", "link s", "quant", "hidden", "step"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for index, one in enumerate(plan.configs):
        t = one.time
        table.add_row(
            _label(plan, index), _gb(one.received_bytes), _gb(one.node_bytes),
            f"{one.node_bytes / max(plan.model_bytes, 1):.3f}",
            *(f"{value:.3g}" for value in (t.between_nodes, t.inside_node, t.passes, t.hidden, t.step)),
        )  # fmt: skip
    yield table


def _speeds(plan: Plan) -> Table:
    """The replayed steps side by side."""
    table = _table("Per step, replayed: bytes into a node by M, seconds busy, share exposed")
    for name in ("", "node/M", "comp.", "net", "link", "exp.", "step s", "tok/s", "MFU"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for index, one in enumerate(plan.configs):
        t, speed = one.time, one.speed
        rate = None if speed is None else speed.tokens_per_second or speed.examples_per_second
        table.add_row(
            _label(plan, index), f"{one.node_bytes / max(plan.model_bytes, 1):.3f}",
            *(f"{value:.3g}" for value in (t.compute, t.between_nodes, t.inside_node)),
            "" if speed is None else f"{speed.exposed_share:.0%}", f"{t.step:.3g}",
            "" if rate is None else f"{rate:.4g}", "" if speed is None else f"{speed.utilisation:.0%}",
        )  # fmt: skip
    return table


def _label(plan: Plan, index: int) -> str:
    """A short name for a narrow table, the recommended configuration marked."""
    words = plan.configs[index].name.removeprefix("stage ").split(" + ")
    short = " ".join([words[0], *(word.split()[0] for word in words[1:])])
    return f"[bold]→ {short}[/]" if index == plan.recommended else f"  {short}"


def _details(plan: Plan, one: ConfigPlan) -> Iterator[RenderableType]:
    yield Text(f"\n{one.name}", style="bold")
    for line in (one.error, one.notice):
        if line:
            yield Text(line, style="yellow")
    yield _memory(one)
    if one.replicated:
        yield _replicated(one)
    yield _traffic(plan, one)
    yield _time(plan, one) if one.speed is None else _replayed(plan, one, one.speed)


def _memory(one: ConfigPlan) -> Group:
    table = _table("Memory per device")
    table.add_column("class")
    table.add_column("GB", justify="right")
    memory = one.memory
    for name, size in memory.classes.items():
        if size:
            table.add_row(_MEANING[name], _gb(size))
    table.add_section()
    table.add_row("total" if memory.compiled else "total without activations", _gb(memory.total))
    table.add_row("usable", _gb(memory.capacity), style="green" if memory.fits else "red")
    table.add_row("offloaded to the host", _gb(memory.offloaded))
    if memory.compiled:
        table.add_section()
        table.add_row("arguments, predicted", f"{memory.predicted_arguments / 1e9:.6f}")
        table.add_row("arguments, compiled", f"{(memory.predicted_arguments + memory.difference) / 1e9:.6f}")
        table.add_row("temporaries, compiled", _gb(memory.compiled.temp))
    lines = [memory.explanation]
    if one.largest is not None:
        lines.append(f"largest microbatch that fits: {one.largest.examples} examples per device ({one.largest.method})")
    return Group(table, Text("\n".join(lines), style="dim"))


def _replicated(one: ConfigPlan) -> Table:
    total = sum(r.bytes for r in one.replicated)
    table = _table(f"Replicated on every device: {_gb(total)} GB in {len(one.replicated)} leaves")
    for name in ("class", "leaf", "MB", "why"):
        table.add_column(name, justify="right" if name == "MB" else "left")
    for leaf in one.replicated[:_MOST_LEAVES]:
        table.add_row(leaf.what, leaf.path, f"{leaf.bytes / 1e6:,.3f}", leaf.reason)
    if rest := one.replicated[_MOST_LEAVES:]:
        table.add_row("", f"and {len(rest)} more", f"{sum(r.bytes for r in rest) / 1e6:,.3f}", "")
    return table


def _traffic(plan: Plan, one: ConfigPlan) -> Group:
    source = "compiled program" if one.is_compiled else "placements"
    table = _table(f"Communication: GB per step into a device and into a node ({source})", padding=0)
    for name in ("phase", "collective", "axes", "dtype", "loop", "mode", "runs", "device", "node"):
        number = name in ("runs", "device", "node")
        # Long names are broken in two, numbers and mode never.
        table.add_column(name, justify="right" if number else "left", no_wrap=number or name == "mode",
                         overflow="fold")  # fmt: skip
    small = [s for s in one.streams if s.received_bytes < 1e-3 * one.received_bytes]
    for s in one.streams:
        if s not in small:
            table.add_row(
                s.phase, s.kind, "+\n".join(s.axes), "+\n".join(s.dtypes), "loop" if s.in_loop else "once",
                s.mode.replace("asynchronous", "async"),
                str(s.executions), _gb(s.received_bytes), _gb(s.node_bytes),
            )  # fmt: skip
    if small:
        table.add_row("", f"{len(small)} smaller", "", "", "", "", str(sum(s.executions for s in small)),
                      _gb(sum(s.received_bytes for s in small)), _gb(sum(s.node_bytes for s in small)))  # fmt: skip
    m = max(plan.model_bytes, 1)
    table.add_section()
    table.add_row("all", "", "", "", "", "", "", _gb(one.received_bytes), _gb(one.node_bytes))
    table.add_row("in M", "", "", "", "", "", "", f"{one.received_bytes / m:.3f}", f"{one.node_bytes / m:.3f}")
    table.add_row("predicted", "", "", "", "", "", "", _gb(one.predicted_received), _gb(one.predicted_node))
    return Group(table, Text(one.explanation, style="dim"))


def _time(plan: Plan, one: ConfigPlan) -> Group:
    table = _table("Time per step, by the model")
    table.add_column("part")
    table.add_column("s", justify="right")
    t = one.time
    for name, value in (
        ("compute", t.compute), ("between nodes", t.between_nodes), ("inside nodes", t.inside_node),
        ("quantising", t.passes), ("hidden behind compute", 0.0 - t.hidden),
    ):  # fmt: skip
        table.add_row(name, f"{value:.4g}")
    table.add_section()
    table.add_row("step", f"{t.step:.4g}")
    share = plan.links.flops / plan.target.peak_bf16_flops
    note = (
        f"{plan.flops / 1e12:.4g} TFLOP per device ({plan.flops_source}) at {share:.0%} of the peak; bytes over link "
        "bandwidth, no latency; asynchronous collectives with compute beside them count as hidden as far as it reaches"
    )
    return Group(table, Text(note, style="dim"))


def _replayed(plan: Plan, one: ConfigPlan, speed: Speed) -> Group:
    """The step as replayed: its parts, what it achieves, and what compute waits for."""
    t, table = one.time, _table("Time per step, replayed from the compiled schedule")
    table.add_column("part")
    table.add_column("s", justify="right")
    for name, value in (
        ("kernels", t.compute), ("between nodes", t.between_nodes), ("inside nodes", t.inside_node),
        *([("to and from the host", t.host)] if t.host else []), ("hidden", 0.0 - t.hidden),
    ):  # fmt: skip
        table.add_row(name, f"{value:.4g}")
    table.add_section()
    table.add_row("step", f"{t.step:.4g}")
    table.add_row("if all were hidden", f"{speed.ideal:.4g}")
    unit, rate = "examples", speed.examples_per_second
    if speed.tokens_per_second is not None:
        unit, rate = "tokens", speed.tokens_per_second
    lines = [
        f"{rate:,.4g} {unit} per second and GPU, {speed.utilisation:.1%} of the peak FLOP/s for the model "
        f"(recomputation not counted); {speed.exposed_share:.0%} of the communication exposed",
        _bandwidth_line(plan, speed),
        f"of 24 published runs, half were met within {speed.uncertainty:.0%} and all within {LARGEST_ERROR:.0%} "
        "(zerojax.planner.replay)",
    ]
    parts: list[RenderableType] = [table, Text("\n".join(lines), style="dim")]
    if speed.exposures:
        worst = _table("What compute waits for longest")
        for name in ("collective", "moves", "phase", "runs", "s", "exposed"):
            number = name in ("runs", "s", "exposed")
            worst.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
        for found in speed.exposures:
            worst.add_row(
                f"{found.kind}\nover {'+'.join(found.axes)}", found.what, found.phase, str(found.executions),
                f"{found.seconds:.3g}", f"{found.exposed:.3g}",
            )  # fmt: skip
        parts.append(worst)
    return Group(*parts)


def _bandwidth_line(plan: Plan, speed: Speed) -> str:
    if not speed.needed_bandwidth:
        return "no network between nodes is waited for"
    if math.isinf(speed.needed_bandwidth):
        return "a faster network between nodes always helps"
    here, needed = plan.links.node_bandwidth, speed.needed_bandwidth
    enough = "enough" if here >= needed else "less than that"
    return (
        f"from {needed / 1e9:.3g} GB/s into a node on, a faster network saves under 5 % "
        f"(here {here / 1e9:.3g}: {enough})"
    )


def _advice(plan: Plan) -> Text:
    lines = ["", *(t.advice for t in plan.techniques), "", plan.recommendation]
    return Text("\n".join([*lines, *([plan.lacking] if plan.lacking else [])]))


def _table(title: str, padding: int = 1) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, padding, 0, 0))


def _gb(size: float | None) -> str:
    """GB with three digits."""
    if size is None:
        return ""
    value = size / 1e9
    if value < 5e-7:
        return "0"
    return f"{value:.1f}" if value >= 100 else f"{value:.{2 - math.floor(math.log10(value))}f}"
