"""One configuration tried on the user's own step: built, compiled, trained for a few steps, timed.

A trial starts from the same parameters and sees the same batches as every other, so that losses differ by what travels
and by nothing else. It holds one training state at a time, in the shards of its layout.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from zerojax.config import ZeroConfig
from zerojax.gradients.transform import value_and_grad
from zerojax.gradients.wire import init_wire_state
from zerojax.hlo.program import read_program
from zerojax.hosts.agreement import exchange
from zerojax.layout.layout import Layout
from zerojax.layout.partition import partition
from zerojax.optimizer.zero import zero
from zerojax.training.compiler_options import compiler_options
from zerojax.training.state import TrainState
from zerojax.training.step import make_train_step
from zerojax.tuning.stand_ins import without_sending

Tree = Any
WARM_UP = 2
"""Steps that are trained but not timed: the first ones load programs and fill caches."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What is tried: the user's own training job.

    Attributes:
        loss_fn: as for `make_train_step`.
        make_params: gives the parameters in stored form under a layout, the same ones each time.
        shapes: of the parameters, `jax.ShapeDtypeStruct`s.
        tx: the optax optimizer, not yet wrapped by `zero`.
        batches: global batches, used in turn.
        rest: further arguments of the loss.
        mesh: of the machines at hand.
        microbatches: as for `make_train_step`.
        has_aux: as for `make_train_step`.
        weighted: as for `make_train_step`.
        trainable: as for `partition`.
    """

    loss_fn: Callable[..., Any]
    make_params: Callable[[Layout], Tree]
    shapes: Tree
    tx: optax.GradientTransformation
    batches: Sequence[Tree]
    rest: tuple[Any, ...]
    mesh: Mesh
    microbatches: int = 1
    has_aux: bool = False
    weighted: bool = False
    trainable: Any = None

    def layout(self, config: ZeroConfig) -> Layout:
        """The layout of the parameters under a configuration."""
        return partition(self.shapes, self.mesh, config, trainable=self.trainable)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of a step on the slowest process.

    Attributes:
        step: the median.
        spread: half of the distance between the quartiles, in seconds: what the clock cannot tell apart.
    """

    step: float
    spread: float


@dataclasses.dataclass(frozen=True)
class Run:
    """What a short training run showed.

    Attributes:
        timing: of its steps.
        quiet: seconds of the same step with nothing on the wire (`stand_ins`); None: not measured.
        losses: of every step.
        node_bytes: sent into each node in a step, from the compiled program; with one node: into each device.
        memory: bytes that a device needs, from the compiled program.
    """

    timing: Timing
    quiet: float | None
    losses: tuple[float, ...]
    node_bytes: int
    memory: int | None

    @property
    def exposed(self) -> float | None:
        """Seconds of a step in which compute waits for communication; None: not measured."""
        return None if self.quiet is None else max(0.0, self.timing.step - self.quiet)


def train(job: Job, config: ZeroConfig, steps: int) -> Run:
    """Trains a few steps from the job's parameters and measures.

    Args:
        job: what is trained.
        config: the configuration.
        steps: number of steps, more than `WARM_UP`.
    """
    layout, step, state = _start(job, config)
    compiled = step.trace(state, job.batches[0], *job.rest).lower().compile()
    seconds, losses = [], []
    for number in range(steps):
        start = time.perf_counter()
        state, metrics = compiled(state, job.batches[number % len(job.batches)], *job.rest)
        losses.append(float(metrics["loss"]))  # waits for the step
        seconds.append(time.perf_counter() - start)
    program = read_program(compiled, layout.mesh, node_axes=config.axes[:-1])
    received = program.node_bytes() if has_nodes(config, layout.mesh) else program.received_bytes()
    memory = None if program.memory is None else program.memory.total
    return Run(_on_slowest(seconds[WARM_UP:]), None, tuple(losses), received, memory)


def with_exposed(run: Run, job: Job, config: ZeroConfig) -> Run:
    """A run of a configuration, with the time of its step with nothing on the wire: a compile and a few steps more."""
    layout, step, state = _start(job, config)
    traced = step.trace(state, job.batches[0], *job.rest)
    leaves, others = jax.tree.leaves(state), jax.tree.leaves((job.batches[0], *job.rest))
    del state  # donated below, as in training
    donated, options = tuple(range(len(leaves))), dict(compiler_options(layout))
    quiet = jax.jit(without_sending(traced, layout.config.axes), donate_argnums=donated, compiler_options=options)
    seconds = []
    for _ in range(WARM_UP + 5):
        start = time.perf_counter()
        leaves = jax.block_until_ready(quiet(*leaves, *others))[: len(donated)]
        seconds.append(time.perf_counter() - start)
    return dataclasses.replace(run, quiet=_on_slowest(seconds[WARM_UP:]).step)


def _start(job: Job, config: ZeroConfig) -> tuple[Layout, Any, TrainState]:
    """The layout, the step and the first state of a configuration."""
    layout = job.layout(config)
    tx = zero(job.tx, layout)
    step = make_train_step(
        job.loss_fn, tx, layout, microbatches=job.microbatches, has_aux=job.has_aux, weighted=job.weighted,
        on_nonfinite="ignore",
    )  # fmt: skip
    return layout, step, TrainState.create(job.make_params(layout), tx, layout)


def has_nodes(config: ZeroConfig, mesh: Mesh) -> bool:
    """Whether the data axes cross nodes."""
    return len(config.axes) == 2 and mesh.shape[config.axes[0]] > 1


def mean_gradients(job: Job, config: ZeroConfig, count: int) -> list[Tree]:
    """The mean gradient over all devices of each of the first batches, at the job's parameters, in shards."""
    layout = job.layout(config)
    params = job.make_params(layout)
    grad_fn = jax.jit(value_and_grad(
        job.loss_fn, layout, has_aux=job.has_aux, weighted=job.weighted, microbatches=job.microbatches
    ))  # fmt: skip
    wire, found = init_wire_state(layout), []
    for batch in job.batches[:count]:
        _, grads, *remembered = grad_fn(params, batch, *job.rest, **({} if wire is None else {"wire": wire}))
        wire = remembered[0] if remembered else None
        found.append(grads)
    return found


def _on_slowest(seconds: Sequence[float]) -> Timing:
    """The same figure on every process, so that all decide alike."""
    low, middle, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (seconds[0],) * 3
    answer = exchange("the times of a trial", f"{middle!r} {high - low!r}", _slowest)
    step, spread = map(float, answer.split())
    return Timing(step, spread / 2)


def _slowest(said: list[str]) -> str:
    return max(said, key=lambda text: float(text.split()[0]))
