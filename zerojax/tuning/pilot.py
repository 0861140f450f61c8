"""`pilot`: which techniques of ZeRO++ pay on the machines at hand, found with the user's own loss, data and optimizer.

Measure the bottleneck first, switch on one technique at a time, watch the loss (the advice of arXiv 2306.10209, as one
call): the present configuration is timed, with and without anything on the wire; then each technique is added for a
short run. It stays if the step becomes faster by more than the clock's own spread; what it does to the gradient and to
the loss stands beside it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zerojax.config import ZeroConfig
from zerojax.hosts.agreement import agree
from zerojax.layout.facts import layout_facts
from zerojax.layout.layout import Layout
from zerojax.layout.mesh import make_mesh
from zerojax.optimizer.zero import ShardedTransformation
from zerojax.planner.advice import unquantized_config
from zerojax.planner.bandwidths import measure_mesh
from zerojax.tuning.errors import GradientError, gradient_error
from zerojax.tuning.report import PilotReport, Trial
from zerojax.tuning.trial import WARM_UP, Job, Run, mean_gradients, train, with_exposed

Tree = Any
TECHNIQUES: dict[str, dict[str, Any]] = {
    "int8 weight gathers": {"quantize_weights": "int8"},
    "secondary partition": {"secondary": True},
    "quantised gradients": {"quantize_gradients": ("int8", "int4")},
    "weight deltas": {"weight_deltas": "int4"},
}
"""In the order in which they are tried."""


def pilot(
    loss_fn: Callable[..., Any],
    params: Tree,
    tx: optax.GradientTransformation,
    batches: Iterable[Tree],
    *rest: Any,
    config: ZeroConfig | None = None,
    mesh: Mesh | None = None,
    steps: int = 20,
    gradient_batches: int = 4,
    least_gain: float = 0.02,
    techniques: Mapping[str, Mapping[str, Any]] | None = None,
    alone: bool = False,
    microbatches: int = 1,
    has_aux: bool = False,
    weighted: bool = False,
    trainable: Any = None,
    progress: Callable[[str], None] | None = None,
) -> PilotReport:
    """Tries the techniques one after the other on the machines at hand, and says which configuration to use.

    In a job of several processes all call it alike. Costs a compile and ``steps`` steps for each technique, one compile
    and a few steps more for the first and the last configuration, and beside the training state the gradients of
    ``gradient_batches`` batches twice, in shards. Nothing of the caller's is changed or donated.

    Args:
        loss_fn: as for `make_train_step`.
        params: full parameters (arrays), or a function without arguments that makes them, which is run by
            `Layout.init` so that no device holds all of them.
        tx: an optax optimizer, not wrapped by `zero`.
        batches: global batches; the first ``steps`` are taken, fewer are used in turn.
        *rest: further arguments of the loss, the same in each step.
        config: the present configuration; None: stage 3.
        mesh: None: `make_mesh()`.
        steps: of each short run; the first two are not timed.
        gradient_batches: batches on which gradients are compared, at the parameters given.
        least_gain: share of the step that a technique must save to stay.
        techniques: what to try: fields of `ZeroConfig` by a name for the table; None: those of ZeRO++.
        alone: try each on top of the present configuration and keep none: for a table of what each does.
        microbatches: as for `make_train_step`.
        has_aux: as for `make_train_step`.
        weighted: as for `make_train_step`.
        trainable: as for `partition`.
        progress: called with a line on what is done next.

    Returns:
        A report: `str()` of it is a table, ``report.config`` the configuration to use, ``report.to_dict()`` plain
        values.

    Raises:
        ValueError: no batch, too few steps, ``tx`` wrapped by `zero` already, or what `partition` and `make_train_step`
            refuse.

    >>> import jax.numpy as jnp, optax, zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> config = zerojax.ZeroConfig(min_shard_size=0, min_quantize_size=0)
    >>> loss = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
    >>> report = zerojax.pilot(loss, {"w": jnp.ones((64, 64))}, optax.sgd(0.1), [jnp.ones((8, 64))],
    ...     config=config, mesh=mesh, steps=4, techniques={"int8 gathers": {"quantize_weights": "int8"}})
    >>> [trial.name for trial in report.trials]
    ['exact', 'int8 gathers']
    """
    mesh = make_mesh() if mesh is None else mesh
    present = ZeroConfig() if config is None else config
    taken = list(itertools.islice(batches, steps))
    _check(tx, taken, steps, gradient_batches, mesh, present)
    make = params if callable(params) else None
    shapes = jax.eval_shape(params) if make else jax.eval_shape(lambda: params)

    def stored(layout: Layout) -> Tree:
        return layout.init(make) if make else layout.shard(params)

    job = Job(loss_fn, stored, shapes, tx, taken, rest, mesh, microbatches, has_aux, weighted, trainable)
    agree("the pilot", {
        **layout_facts(job.layout(present)), "steps": steps, "batches": len(taken),
        "shapes of a batch": jax.tree.map(jnp.shape, taken[0]),
    })  # fmt: skip
    tell = progress or (lambda text: None)
    tell("bandwidths of the mesh")
    rates = measure_mesh(mesh)
    exact_config = unquantized_config(present)
    tell("gradients without quantisation")
    exact_gradients = mean_gradients(job, exact_config, gradient_batches)

    def attempt(name: str, tried: ZeroConfig) -> tuple[Run, GradientError]:
        tell(name)
        run = train(job, tried, steps)
        return run, gradient_error(exact_gradients, mean_gradients(job, tried, gradient_batches))

    tell("exact")
    exact = with_exposed(train(job, exact_config, steps), job, exact_config)
    trials = [Trial("exact", exact_config, exact, None, 0.0, kept=True, why="what the others are compared with")]
    best, best_config = exact, exact_config
    if present != exact_config:
        run, error = attempt("present", present)
        best, best_config = with_exposed(run, job, present), present
        trials.append(_trial("present", present, best, error, exact, kept=True, why="the configuration given"))
    for name, fields in (TECHNIQUES if techniques is None else techniques).items():
        try:
            tried = dataclasses.replace(best_config, **_fitting(fields, present))
        except ValueError as error:  # it cannot take effect at this stage or on these axes
            trials.append(Trial(name, best_config, None, None, None, kept=False, why=str(error)))
            continue
        if reason := _no_effect(fields, best_config, tried, mesh):
            trials.append(Trial(name, tried, None, None, None, kept=False, why=reason))
            continue
        run, error = attempt(name, tried)
        kept, why = (False, "tried alone") if alone else _decide(best, run, least_gain)
        trials.append(_trial(name, tried, run, error, exact, kept=kept, why=why))
        if kept:
            best, best_config = run, tried
    if best.quiet is None:
        tell("the configuration to use, with nothing on the wire")
        best = with_exposed(best, job, best_config)
    return PilotReport(tuple(trials), tuple(rates), best_config, best, dict(mesh.shape), jax.process_count())


def _trial(name: str, config: ZeroConfig, run: Run, error: GradientError, exact: Run, *, kept: bool, why: str) -> Trial:
    """A trial with the difference of its loss to the exact run's, over the last quarter of the steps."""
    last = max(1, len(run.losses) // 4)
    mine, others = (sum(r.losses[-last:]) / last for r in (run, exact))
    return Trial(name, config, run, error, (mine - others) / abs(others) if others else None, kept=kept, why=why)


def _decide(before: Run, after: Run, least_gain: float) -> tuple[bool, str]:
    """Whether a technique stays, and why; the times are the same on every process."""
    gain = before.timing.step - after.timing.step
    noise = before.timing.spread + after.timing.spread
    share = gain / before.timing.step
    if not all(x == x and abs(x) != float("inf") for x in after.losses):
        return False, "its loss is not finite"
    if gain <= noise and gain > -noise:
        return False, f"too close to call: {share:+.1%} of the step, and the clock's spread is {noise:.2g} s"
    if share < least_gain:
        return False, f"saves {share:.1%} of the step, less than {least_gain:.0%}" if gain > 0 else (
            f"makes the step {-share:.0%} longer"
        )  # fmt: skip
    return True, f"saves {share:.0%} of the step"


def _fitting(fields: Mapping[str, Any], present: ZeroConfig) -> dict[str, Any]:
    """The fields for a configuration of one axis: one format, not a pair."""
    pair = fields.get("quantize_gradients")
    single = isinstance(pair, tuple) and len(present.axes) == 1
    return {**fields, "quantize_gradients": pair[0]} if single and pair else dict(fields)


def _no_effect(fields: Mapping[str, Any], before: ZeroConfig, tried: ZeroConfig, mesh: Mesh) -> str | None:
    """Why a technique need not be tried."""
    if tried == before:
        return "is on already"
    if ("secondary" in fields or "weight_deltas" in fields) and mesh.shape[before.axes[0]] == 1:
        return "there is one node"
    return None


def _check(tx: Any, batches: list[Tree], steps: int, gradient_batches: int, mesh: Mesh, config: ZeroConfig) -> None:
    if not batches:
        raise ValueError("pilot(batches=...): at least one batch is required, and there is none")
    if steps <= WARM_UP + 1:
        raise ValueError(
            f"pilot(steps={steps}): more than {WARM_UP + 1} are required; the first {WARM_UP} are not timed"
        )
    if gradient_batches < 1:
        raise ValueError(f"pilot(gradient_batches={gradient_batches}): at least one is required")
    if isinstance(tx, ShardedTransformation):
        raise ValueError("pilot(tx=...): pass the optax optimizer itself; pilot wraps it with zerojax.zero")
    shapes = [jax.tree.map(jnp.shape, batch) for batch in batches]
    if different := [number for number, shape in enumerate(shapes) if shape != shapes[0]]:
        raise ValueError(
            f"pilot(batches=...): batch {different[0]} has shapes {shapes[different[0]]} and batch 0 {shapes[0]}; all "
            "must be of one shape, since each step is compiled once"
        )
    if missing := [axis for axis in config.axes if axis not in mesh.shape]:
        raise ValueError(f"pilot(config, mesh): axes {missing} are not in the mesh {dict(mesh.shape)}")
