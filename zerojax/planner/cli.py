"""The command `zerojax`: `zerojax plan MODEL ...` plans training steps, compiled ahead of time for a target cluster.

MODEL is `gpt:7.5b`, `gpt:18b`, `gpt:128b`, `gpt:1t`, or `MODULE:FUNCTION`, a function without arguments that returns
the loss, the shapes and the optimizer: `(loss_fn, params_shapes, batch_shapes, tx)`, or a `Workload` of
`zerojax.planner.workload`.
Exit status: 0; 1 when nothing fits; 2 for what cannot be planned, with one line that says why.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from zerojax.config import ZeroConfig
from zerojax.planner import doctor
from zerojax.planner.advice import comparison_configs
from zerojax.planner.configs import Progress
from zerojax.planner.fastest import Candidate, find_fastest
from zerojax.planner.gpus import TARGETS, PluginMissing
from zerojax.planner.models import GPT_SHAPES, gpt
from zerojax.planner.plan import plan_workload
from zerojax.planner.records import Plan
from zerojax.planner.trace import write_trace
from zerojax.planner.user_function import user_function
from zerojax.planner.workload import DEVICES_PER_NODE, NUM_NODES, Workload

_MISSING_RICH = "tables need rich: pip install rich, or ask for --json"
_MOST_CANDIDATES = 3
_MISSING_MATPLOTLIB = "--plot needs matplotlib: pip install matplotlib"


class Command(NamedTuple):
    """A command of another folder: what `--help` says of it, and its own command line."""

    summary: str
    run: Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None, others: Mapping[str, Command] = MappingProxyType({})) -> int:
    """Runs the command line, with commands of other folders beside the planner's; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in others:
        return others[argv[0]].run(argv[1:])
    options = _parser(others).parse_args(argv)
    if options.command == "doctor":
        try:
            return doctor.run(options, _maker(options))
        except (ValueError, TypeError) as error:
            return doctor.report(error)
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")  # nothing runs: leave the GPUs of this machine alone
    try:
        return _run(options)
    except (ValueError, TypeError, PluginMissing, ModuleNotFoundError) as error:
        print(f"zerojax plan: {_one_line(error)}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.plot and not _is_installed("matplotlib"):
        raise ModuleNotFoundError(_MISSING_MATPLOTLIB)
    if not options.json and not _is_installed("rich"):
        raise ModuleNotFoundError(_MISSING_RICH)
    for option, path in (("--plot", options.plot), ("--trace", options.trace)):
        if path and not Path(path).parent.is_dir():
            raise ValueError(f"{option} {path}: the folder does not exist")
    if options.global_batch is not None and not options.fastest:
        raise ValueError("--global-batch is for --fastest; else give --examples-per-device and --microbatches")
    for option, wanted in (("--trace", options.trace), ("--fastest", options.fastest)):
        if wanted and options.no_compile:
            raise ValueError(f"{option} is of compiled programs: leave out --no-compile")
    configs = _configs(options)
    make = _maker(options)
    workload = make()
    given: dict[str, Any] = {
        "target": options.target, "num_nodes": options.nodes, "devices_per_node": options.gpus_per_node,
        "bandwidth": options.bandwidth, "efficiency": options.efficiency, "microbatches": options.microbatches,
    }  # fmt: skip
    fastest: list[Candidate] = []
    with _suppress_compiler_stderr(), _progress(quiet=options.json) as progress:
        given["progress"] = progress
        plan = plan_workload(
            workload, configs=configs, examples_per_device=options.examples_per_device,
            compiles=False if options.no_compile else options.compile or None,
            largest_microbatch=not options.no_largest_microbatch, **given,
        )  # fmt: skip
        if options.fastest:
            takes = "checkpointing" in inspect.signature(make).parameters
            makes = (lambda checkpointing: make(checkpointing=checkpointing)) if takes else workload
            fastest = find_fastest(makes, configs, global_batch=options.global_batch, **given)
    _show(plan, options, fastest)
    if not plan.fits:
        print(f"zerojax plan: {plan.recommendation}", file=sys.stderr)
        return 1
    return 0


def _parser(others: Mapping[str, Command]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zerojax", description="ZeRO for JAX")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan", help="memory, traffic and time of a training step on a target cluster", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = plan.add_argument
    add("model", help=f"{', '.join(f'gpt:{name}' for name in GPT_SHAPES)} or MODULE:FUNCTION")
    add("--target", default="h100", help=f"{', '.join(TARGETS)}, or a .toml file with the facts of a GPU")
    add("--nodes", type=int, default=NUM_NODES)
    add("--gpus-per-node", type=int, default=DEVICES_PER_NODE)
    add("--stage", type=int, default=3, choices=(0, 1, 2, 3))
    add("--zero-plus-plus", action="store_true", help="all three techniques below in their default formats")
    add("--quantize-weights", metavar="FORMAT", help="int8 or int4 (qwZ)")
    add("--secondary", action="store_true", help="node-local copy of the weights for the backward pass (hpZ)")
    add("--quantize-gradients", metavar="INSIDE[,BETWEEN]", help="int8, int4, or int8,int4 (qgZ)")
    add("--weight-deltas", metavar="FORMAT", help="int4 or int2: nodes keep a replica, changes travel")
    add("--error-feedback", action="store_true")
    add("--compare", action="store_true", help="all stages and techniques side by side")
    add("--recommend", action="store_true", help="compare, and pick the least communication that fits")
    add(
        "--fastest",
        action="store_true",
        help="try each configuration at its largest microbatch, with one and with --microbatches of them, with and "
        "without activation checkpointing (where FUNCTION takes checkpointing=True), and show the best three in tokens "
        "per second; several compiles each",
    )
    add("--global-batch", type=int, help="with --fastest: examples of a step on all devices, cut into microbatches")
    add("--bandwidth", help="into a node, from all others together: 400GB/s, 3200Gbit/s (default: 50 GB/s per GPU)")
    add("--efficiency", type=float, help="share of the peak FLOP/s that large products reach (default: the GPU's)")
    add("--examples-per-device", type=int, help="in a device's microbatch (default: the function's batch; 1 for gpt)")
    add("--microbatches", type=int, default=1)
    add("--sequence-length", type=int, help="of the built-in models (default: 2048)")
    compiles = plan.add_mutually_exclusive_group()
    compiles.add_argument("--compile", action="store_true", help="fail where XLA's CUDA plugin is missing")
    compiles.add_argument("--no-compile", action="store_true", help="from placements alone")
    add("--no-largest-microbatch", action="store_true", help="one compile per configuration instead of two")
    add("--json", action="store_true", help="the whole plan as JSON on the standard output")
    add("--plot", metavar="FILE.png", help="bars of memory and traffic, and a timeline of one layer")
    add("--trace", metavar="FILE.json", help="the replayed step as a trace for Perfetto or chrome://tracing")
    examine = commands.add_parser("doctor", help="what the machines at hand move, and which techniques pay on them")
    doctor.add_arguments(examine)
    examine.set_defaults(sequence_length=None, examples_per_device=None)
    for name, command in others.items():
        commands.add_parser(name, help=command.summary)
    return parser


def _configs(options: argparse.Namespace) -> list[ZeroConfig]:
    fields: dict[str, Any] = {"stage": options.stage}
    if options.zero_plus_plus:
        all_three = ZeroConfig.zero_plus_plus(stage=options.stage)
        fields = {field.name: getattr(all_three, field.name) for field in dataclasses.fields(ZeroConfig)}
    if options.quantize_weights:
        fields["quantize_weights"] = options.quantize_weights
    if options.secondary:
        fields["secondary"] = True
    if options.quantize_gradients:
        parts = options.quantize_gradients.split(",")
        fields["quantize_gradients"] = parts[0] if len(parts) == 1 else tuple(parts)
    if options.weight_deltas:
        fields["weight_deltas"] = options.weight_deltas
    if options.error_feedback:
        fields["error_feedback"] = True
    asked = ZeroConfig(**fields)
    if not (options.compare or options.recommend):
        return [asked]
    return list(dict.fromkeys([*comparison_configs(asked), asked]))


def _maker(options: argparse.Namespace) -> Callable[..., Workload]:
    """What makes the workload; it takes `checkpointing` where the user's function does."""
    module_name, _, function_name = options.model.partition(":")
    if module_name == "gpt":
        if function_name not in GPT_SHAPES:
            raise ValueError(f"unknown model {options.model!r}: give gpt: and one of {', '.join(GPT_SHAPES)}")
        shape = GPT_SHAPES[function_name]
        if options.sequence_length is not None:
            shape = dataclasses.replace(shape, length=options.sequence_length)
        if options.examples_per_device is None:
            options.examples_per_device = 1
        return lambda *, checkpointing=True: gpt(shape, checkpointing=checkpointing, name=options.model)
    if options.sequence_length is not None:
        raise ValueError("--sequence-length is for the built-in models; your function gives the shapes of its batch")
    if not function_name:
        raise ValueError(f"model {options.model!r}: give MODULE:FUNCTION, or gpt: and one of {', '.join(GPT_SHAPES)}")
    function = user_function(options.model)

    @functools.wraps(function)
    def make(**arguments: Any) -> Workload:
        return _as_workload(function(**arguments), options.model)

    return make


def _as_workload(found: Any, name: str) -> Workload:
    """What a user's function returned: a Workload, or loss, shapes and optimizer."""
    if isinstance(found, Workload):
        return dataclasses.replace(found, name=name) if found.name == "model" else found
    if isinstance(found, tuple) and len(found) == 4:
        return Workload(*found, name=name)
    raise ValueError(
        f"{name} must return (loss_fn, params_shapes, batch_shapes, tx) or a Workload, but returned a "
        f"{type(found).__name__}"
    )


def _show(plan: Plan, options: argparse.Namespace, fastest: Sequence[Candidate]) -> None:
    best = [str(candidate) for candidate in fastest[:_MOST_CANDIDATES]]
    shown, traced = plan.shown, ""
    if options.trace and shown is not None:
        traced = next(one.name for one in plan.configs if one.replays is shown)
    if options.json:
        found = plan.to_dict()
        if options.fastest:
            found["fastest"] = best
        if options.trace:
            found["trace"] = {"file": options.trace, "of": traced}
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        from rich.console import Console

        from zerojax.planner.report import print_plan

        print_plan(plan, Console())
        for number, text in enumerate(best, 1):
            print(f"{'The fastest' if number == 1 else f'{number}.'}: {text}")
        if traced:
            print(f"The trace of {traced}: {options.trace} (opens at ui.perfetto.dev)")
    replay = shown.recorded() if shown is not None and (options.plot or options.trace) else None
    names = shown.names if shown is not None else {}
    if options.plot:
        from zerojax.planner.picture import draw_plan

        draw_plan(plan, options.plot, replay, names)
    if options.trace:
        if replay is None:
            raise ValueError(f"--trace {options.trace}: no program was compiled: {plan.lacking or 'see the plan'}")
        write_trace(replay, options.trace, names=names, title=f"{plan.model} on {plan.num_nodes} nodes")


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Progress | None]:
    """One bar for all compiles, on the standard error."""
    if quiet or not _is_installed("rich"):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tracing", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text or "done")


@contextlib.contextmanager
def _suppress_compiler_stderr() -> Iterator[None]:
    """Drops what the compiler writes to file descriptor 2 about programs that do not fit; the plan says it better.

    Python's own standard error goes on. TF_CPP_MIN_LOG_LEVEL=0 keeps the remarks (JAX itself sets it to 1).
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0":
        yield
        return
    python_stderr = sys.stderr
    python_stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        with contextlib.suppress(OSError, ValueError):  # a standard error that is no file stays as it is
            if python_stderr.fileno() == 2:
                sys.stderr = os.fdopen(os.dup(saved), "w", buffering=1)
        yield
    finally:
        if sys.stderr is not python_stderr:
            sys.stderr.close()
        sys.stderr = python_stderr
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _one_line(error: BaseException) -> str:
    return " ".join((str(error).strip() or repr(error)).split())


if __name__ == "__main__":
    sys.exit(main())
