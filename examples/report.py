"""What a training run leaves behind: the bytes one device holds, two tables, a picture and a file of numbers."""

import collections
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


@dataclasses.dataclass
class Run:
    """One way of training the model: the loss of every step, and bytes per device by class of training state."""

    name: str
    bytes: dict[str, int]
    losses: list[float] = dataclasses.field(default_factory=list)
    validation_loss: float = float("nan")
    seconds_per_step: float = float("nan")


def bytes_per_device(tree: Any) -> int:
    """The most bytes of these arrays that any one device of this process holds, counted on the arrays themselves."""
    held: collections.Counter[Any] = collections.Counter()
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values())


def make_progress(*, enabled: bool) -> Progress:
    """A progress bar with a ``loss`` field."""
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True))
    return Progress(TextColumn("{task.description}"), *columns, TextColumn("{task.fields[loss]}"), disable=not enabled)


def print_losses(run: Run, plain: Run | None, rows: int = 10) -> None:
    """Print both losses side by side, at evenly spaced steps, then on validation files."""
    table = Table("step", title="Loss (nats per byte)")
    for each in filter(None, (plain, run)):
        table.add_column(each.name, justify="right")
    if plain:
        table.add_column("difference", justify="right")

    def add_row(label: str, ours: float, theirs: float | None) -> None:
        beside = [] if theirs is None else [f"{theirs:.5f}"]
        table.add_row(label, *beside, f"{ours:.5f}", *([] if theirs is None else [f"{ours - theirs:+.1e}"]))

    steps = len(run.losses)
    for step in sorted({round(i * (steps - 1) / (rows - 1)) for i in range(rows)}):
        add_row(str(step + 1), run.losses[step], plain.losses[step] if plain else None)
    table.add_section()
    add_row("validation", run.validation_loss, plain.validation_loss if plain else None)
    for each in filter(None, (plain, run)):
        table.caption = f"{table.caption or ''}{each.name}: {each.seconds_per_step * 1e3:.0f} ms a step\n"
    Console().print(table)


def print_memory(run: Run, plain: Run | None) -> None:
    """Print bytes per device by class beside what the other run (plain data parallelism, most often) holds."""
    table = Table("training state", title="Bytes on one device")
    if plain:
        name = "plain data parallelism" if plain.name.startswith("plain") else plain.name
        table.add_column(name, justify="right")
    table.add_column(run.name, justify="right")
    if plain:
        table.add_column("part", justify="right")
    for label in (*run.bytes, "total"):
        ours, theirs = _held(run, label), _held(plain, label) if plain else None
        if label == "total":
            table.add_section()
        beside = [] if theirs is None else [f"{theirs:,}"]
        table.add_row(label, *beside, f"{ours:,}", *([] if theirs is None else [f"{ours / theirs:.3f}"]))
    Console().print(table)


def save_results(folder: Path, run: Run, plain: Run | None, config: Any, mesh_shape: dict[str, int]) -> str:
    """Write ``losses_and_memory.png`` and ``results.json``; returns a line that says where."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = [each for each in (plain, run) if each]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2), layout="constrained")
    for each, style in zip(runs, ("-", "--")[-len(runs) :], strict=True):
        left.plot(range(1, len(each.losses) + 1), each.losses, style, label=each.name, linewidth=1.6)
    left.set(xlabel="step", ylabel="training loss (nats per byte)")
    left.legend(frameon=False)
    bottoms = [0.0] * len(runs)
    names = [each.name.replace(", ", "\n") for each in runs]
    for label in run.bytes:
        heights = [each.bytes[label] / 2**20 for each in runs]
        right.bar(names, heights, bottom=bottoms, label=label, width=0.55)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for name, total in zip(names, bottoms, strict=True):
        right.annotate(f"{total:.1f}", (name, total), ha="center", va="bottom")
    right.set(ylabel="MiB on one device")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    picture, numbers = folder / "losses_and_memory.png", folder / "results.json"
    figure.savefig(picture, dpi=150)
    plt.close(figure)
    record = {
        "jax": jax.__version__,
        "platform": jax.default_backend(),
        "mesh": mesh_shape,
        "model": {field: str(value) for field, value in dataclasses.asdict(config).items()},
        "runs": [dataclasses.asdict(each) for each in runs],
    }
    numbers.write_text(json.dumps(record, indent=1))
    return f"wrote {picture} and {numbers}"


def _held(run: Run, label: str) -> int:
    return sum(run.bytes.values()) if label == "total" else run.bytes[label]
