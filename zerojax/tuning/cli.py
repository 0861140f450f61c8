"""`zerojax pilot MODULE:FUNCTION`: the pilot of a user's own training job, on one node or under the job's launcher.

FUNCTION takes no arguments and returns the arguments of `zerojax.pilot` as a dict: "loss_fn", "params" (or a function
that makes them), "tx", "batches", and any of its keywords; "rest" holds further arguments of the loss.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from zerojax.hosts.start import add_job_arguments, distributed
from zerojax.planner.gpus import choose_platform
from zerojax.planner.user_function import user_function
from zerojax.tuning.pilot import pilot


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, or 2 for what cannot be tried, with one line that says why."""
    options = _parser().parse_args(argv)
    choose_platform()
    try:
        distributed(options.coordinator, options.num_processes, options.process_id)
        given = _arguments(options.job)
        rest = given.pop("rest", ())
        positional = [given.pop(name) for name in ("loss_fn", "params", "tx", "batches")]
        first = jax.process_index() == 0
        told = {"progress": lambda text: print(f"zerojax pilot: {text}", file=sys.stderr) if first else None}
        if options.steps is not None:
            given["steps"] = options.steps
        report = pilot(*positional, *rest, **{**told, **given})
    except (ValueError, TypeError) as error:
        print(f"zerojax pilot: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if first:
        print(json.dumps(report.to_dict(), indent=2) if options.json else report)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zerojax pilot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("job", help="MODULE:FUNCTION")
    add("--steps", type=int, help="of each short run (default: the function's, or 20)")
    add("--json", action="store_true", help="the whole report as JSON on the standard output")
    add_job_arguments(parser)
    return parser


def _arguments(job: str) -> dict[str, Any]:
    """What the user's function returned, checked."""
    if not job.partition(":")[2]:
        raise ValueError(f"job {job!r}: give MODULE:FUNCTION, a function that returns the arguments of zerojax.pilot")
    found = user_function(job)()
    if not isinstance(found, Mapping):
        kind = type(found).__name__
        raise ValueError(f"{job} must return a dict of the arguments of zerojax.pilot, but returned {kind}")
    if missing := [name for name in ("loss_fn", "params", "tx", "batches") if name not in found]:
        raise ValueError(f"{job}: the dict that it returned lacks {', '.join(map(repr, missing))}")
    return dict(found)
