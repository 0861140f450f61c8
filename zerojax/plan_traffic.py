"""Traffic of a plan as rows for people, and how far the compiled program and the prediction differ.

Rows of a compiled program come from `zerojax.compiled_program`, predicted ones from `zerojax.comms`; both are bytes per
step. Where the two differ by more than a percent, the explanation names the phase and kind of collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zerojax.comms import Move
from zerojax.compiled_program import CompiledProgram
from zerojax.layout import Layout
from zerojax.plan_records import Stream

_NAMES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "s8": "int8", "u8": "uint8", "u16": "uint16"}
# Differences below this share of the traffic are padding of quantisation blocks and shards, scalars and metrics.
_NOTABLE = 0.01


def program_streams(program: CompiledProgram, layout: Layout) -> tuple[Stream, ...]:
    """The rows of a compiled program; what is neither forward nor backward is the update and the metrics."""
    rows = [
        Stream(
            phase="update" if row.phase == "other" else row.phase,
            kind=row.kind,
            axes=row.axes,
            dtypes=tuple(_NAMES.get(d, d) for d in row.dtypes),
            in_loop=row.in_loop,
            manner=("overlapped" if row.overlapped else "asynchronous") if row.asynchronous else "blocking",
            executions=row.executions,
            received_bytes=row.received_bytes,
            node_bytes=row.node_bytes,
        )
        for row in program.traffic()
    ]
    return _ordered(rows)


def predicted_streams(moves: Sequence[Move]) -> tuple[Stream, ...]:
    """The rows of a prediction: moves of one sort together."""
    sorts: dict[tuple[str, str, tuple[str, ...], str, bool], list[Move]] = {}
    for move in moves:
        sorts.setdefault((move.phase, move.kind, move.axes, move.dtype, move.in_loop), []).append(move)
    return _ordered(
        Stream(
            phase, kind, axes, (dtype,), in_loop, "", sum(m.executions for m in group),
            sum(m.received_bytes for m in group), sum(m.node_bytes for m in group),
        )
        for (phase, kind, axes, dtype, in_loop), group in sorts.items()
    )  # fmt: skip


def explain_traffic(moves: Sequence[Move], streams: Sequence[Stream]) -> str:
    """Where compiled and predicted traffic differ, in bytes into a device."""
    predicted, found = _by_sort(moves), _by_sort(streams)
    total = sum(predicted.values())
    parts = []
    for sort in sorted(predicted.keys() | found.keys()):
        more = found.get(sort, 0) - predicted.get(sort, 0)
        if abs(more) > _NOTABLE * max(total, 1):
            parts.append(f"{' '.join(sort)}: {more / 1e9:+.3g} GB{_reason(sort, more)}")
    if not parts:
        return f"prediction and program agree within {_NOTABLE:.0%} in every phase"
    return "the program differs from the prediction: " + "; ".join(parts)


def _reason(sort: tuple[str, str], more: int) -> str:
    phase, kind = sort
    if phase == "update" and kind == "all-gather":
        return " (the updated parameters travel in another dtype than stored, or stay sharded)"
    if kind == "all-gather" and more > 0:
        return " (a weight is gathered once for each use, or activations are gathered)"
    if kind == "all-gather":
        return " (the compiler shares a gather between uses)"
    if kind in ("all-reduce", "reduce-scatter"):
        return " (the compiler chose another reduction, or reduces in another phase or dtype)"
    return ""


def _by_sort(rows: Iterable[Move | Stream]) -> dict[tuple[str, str], int]:
    sums: dict[tuple[str, str], int] = {}
    for row in rows:
        sums[row.phase, row.kind] = sums.get((row.phase, row.kind), 0) + row.received_bytes
    return sums


def _ordered(rows: Iterable[Stream]) -> tuple[Stream, ...]:
    phases = ("forward", "backward", "update")
    return tuple(sorted(rows, key=lambda row: (phases.index(row.phase), -row.received_bytes)))
