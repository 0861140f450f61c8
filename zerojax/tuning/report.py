"""What a pilot found: one row for each configuration tried, as text for people and as plain values."""

from __future__ import annotations

import dataclasses
from typing import Any

from zerojax.config import GRADIENT_FORMATS, WEIGHT_FORMATS, QuantFormat, ZeroConfig
from zerojax.planner.bandwidths import Rate, best_rate
from zerojax.tuning.errors import GradientError
from zerojax.tuning.trial import Run


@dataclasses.dataclass(frozen=True)
class Trial:
    """One configuration.

    Attributes:
        name: "exact" (nothing quantised), "present", or the technique added.
        config: what was tried.
        run: its short training run; None: not tried.
        error: what it does to the gradient; None: not tried, or exact.
        loss_difference: relative, of the mean loss over the last quarter of the steps, to the exact run with the same
            parameters and batches.
        kept: whether it is part of the configuration to use.
        why: in words.
    """

    name: str
    config: ZeroConfig
    run: Run | None
    error: GradientError | None
    loss_difference: float | None
    kept: bool
    why: str


@dataclasses.dataclass(frozen=True)
class PilotReport:
    """All trials, and the configuration to use.

    Attributes:
        trials: in the order in which they ran.
        rates: bandwidths of the mesh by collective, axis and size.
        config: the configuration to use.
        final: the run of that configuration, with its exposed communication.
        mesh_shape: axis names and sizes.
        processes: of the job.

    >>> from zerojax.tuning.trial import Timing
    >>> run = Run(Timing(0.2, 0.01), 0.15, (3.0, 2.5, 2.0, 1.9), 1_000_000, None)
    >>> exact = Trial("exact", ZeroConfig(), run, None, 0.0, kept=True, why="what the others are compared with")
    >>> print(PilotReport((exact,), (), ZeroConfig(), run, {"node": 2, "local": 4}, 1))  # doctest: +ELLIPSIS
    Mesh node 2 x local 4, 1 process
    <BLANKLINE>
    configuration             step (s)  spread  on wire (MB)  gradient error  preconditioned       loss  difference
    exact                       0.2000  0.0100         1.000               -               -        1.9      +0.00%  ...
    <BLANKLINE>
    Of a step of 0.2000 s, 0.0500 s wait for communication.
    Use ZeroConfig(stage=3)
    """

    trials: tuple[Trial, ...]
    rates: tuple[Rate, ...]
    config: ZeroConfig
    final: Run
    mesh_shape: dict[str, int]
    processes: int

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh_shape.items())
        lines = [f"Mesh {axes}, {self.processes} process{'es' if self.processes > 1 else ''}"]
        for axis in self.mesh_shape:
            if (rate := best_rate(self.rates, axis)) is not None:
                lines.append(f"Into a device over {axis!r}: {rate / 1e9:.3g} GB/s (the slowest collective)")
        header = (
            f"{'configuration':24}{'step (s)':>10}{'spread':>8}{'on wire (MB)':>14}{'gradient error':>16}"
            f"{'preconditioned':>16}{'loss':>11}{'difference':>12}"
        )
        lines += ["", header, *map(_row, self.trials), "", _exposed(self.trials[0].run, self.final)]
        lines.append(f"Use {in_code(self.config)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = dataclasses.asdict(self)
        found["config"] = in_code(self.config)
        for trial, record in zip(self.trials, found["trials"], strict=True):
            record["config"] = in_code(trial.config)
            record["error"] = None if trial.error is None else trial.error._asdict()
        return found


def in_code(config: ZeroConfig) -> str:
    """The call that makes a configuration, with the fields that are not the defaults.

    >>> in_code(ZeroConfig(stage=3, quantize_weights="int8"))
    "ZeroConfig(stage=3, quantize_weights='int8')"
    >>> in_code(ZeroConfig(quantize_gradients=QuantFormat(4, 128)))
    'ZeroConfig(stage=3, quantize_gradients=(QuantFormat(bits=4), QuantFormat(bits=4)))'
    """
    default = ZeroConfig(stage=config.stage)
    given = {
        field.name: _value_in_code(field.name, getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name != "stage" and getattr(config, field.name) != getattr(default, field.name)
    }
    return f"ZeroConfig({', '.join(f'{name}={value}' for name, value in {'stage': config.stage, **given}.items())})"


def _value_in_code(field: str, value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_value_in_code(field, part) for part in value)}{',' if len(value) == 1 else ''})"
    if not isinstance(value, QuantFormat):
        return repr(value)
    known = {"quantize_weights": WEIGHT_FORMATS, "quantize_gradients": GRADIENT_FORMATS}.get(field, {})
    if names := [name for name, fmt in known.items() if fmt == value]:
        return repr(names[0])
    defaults = {f.name: f.default for f in dataclasses.fields(value)}
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return f"QuantFormat({', '.join(f'{name}={x!r}' for name, x in fields.items() if x != defaults[name])})"


def _row(trial: Trial) -> str:
    run, error = trial.run, trial.error
    if run is None:
        return f"{trial.name:24}  not tried: {trial.why}"
    errors = ("-", "-") if error is None else (f"{error.raw:.4f}", f"{error.preconditioned:.4f}")
    difference = "-" if trial.loss_difference is None else f"{trial.loss_difference:+.2%}"
    return (
        f"{trial.name:24}{run.timing.step:>10.4f}{run.timing.spread:>8.4f}{run.node_bytes / 1e6:>14.3f}{errors[0]:>16}"
        f"{errors[1]:>16}{run.losses[-1]:>11.5g}{difference:>12}  {'kept' if trial.kept else 'left'}: {trial.why}"
    )


def _exposed(first: Run | None, final: Run) -> str:
    def said(run: Run) -> str:
        return f"Of a step of {run.timing.step:.4f} s, {run.exposed:.4f} s wait for communication"

    if first is None or first is final:
        return f"{said(final)}."
    return f"{said(first)}; with the configuration below, {final.exposed:.4f} s of {final.timing.step:.4f} s."
