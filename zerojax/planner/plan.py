"""`plan`: compiles the real step for a cluster that is not at hand, and says what it holds, sends and costs.

The user's own loss and optimizer are laid out, composed into the step that would run, and compiled for GPUs known only
by their data (`zerojax.planner.gpus`); the compiled program is read, and set beside what the placements predict.
Without XLA's CUDA plugin the prediction alone is given. Nothing is allocated: shapes only. Steps are traced one after
the other and compiled two at a time: the compiler uses little more than one core, and two programs stay below 2 GB
together.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import optax

from zerojax.config import ZeroConfig
from zerojax.hlo.program import CompiledProgram
from zerojax.layout.layout import Layout
from zerojax.layout.notices import ZeroNotice, notices
from zerojax.layout.partition import partition
from zerojax.optimizer.zero import ShardedTransformation
from zerojax.planner.advice import (
    NICKNAMES,
    config_name,
    flows_of,
    judge_technique,
    plain_config,
    recommend,
    with_technique,
)
from zerojax.planner.compile import SPAN, compile_step, line_through, lower_step
from zerojax.planner.gpus import GpuTarget
from zerojax.planner.memory import offloaded_arguments, padding_notice, plan_memory, replicated_leaves
from zerojax.planner.models import Subject
from zerojax.planner.records import ConfigPlan, Largest, Memory, Plan, Technique
from zerojax.planner.time import EFFICIENCY, Flow, Links, machine_links, step_time
from zerojax.planner.traffic import Move, explain_traffic, predict_traffic, predicted_streams, program_streams
from zerojax.planner.workload import Cluster, lacking_compiler, make_cluster, shapes_of, sized_subject, trace_subject

# (steps done, steps in all, what comes next)
Progress = Callable[[int, int, str], None]
_AT_ONCE = 2
# The step of more examples is compiled for a GPU of so many times the memory: near its bound the compiler recomputes,
# and no line could be drawn.
_ROOM = 64


class _Compiled(NamedTuple):
    """A step after the compiler: the program or the reason why there is none, the seconds it took, and the bytes of its
    arguments in host memory."""

    program: CompiledProgram | None
    error: str
    seconds: float
    host: int


class _Started(NamedTuple):
    """A configuration whose steps are being compiled; the second has more examples."""

    layout: Layout
    step: Future[_Compiled] | None
    larger: Future[_Compiled] | None


class ConfigPlanner:
    """Plans configurations of one subject on one cluster.

    Args:
        subject: loss, optimizer and global shapes.
        cluster: what is planned for.
        links: rates of the time model.
        examples: of one device's microbatch.
        microbatches: as for `zerojax.make_train_step`.
        capacity: bytes that may be used of a device.
        compiles: compile the steps, or plan from placements alone.
        largest: also find the largest microbatch that fits.
        progress: told of every compile.

    Attributes:
        uses: how the loss uses each leaf, from `zerojax.gather.uses`.
        flops: FLOP of one device's microbatch in the traced loss.
    """

    def __init__(
        self, subject: Subject, cluster: Cluster, links: Links, examples: int, microbatches: int, capacity: int, *,
        compiles: bool, largest: bool, progress: Progress | None,
    ) -> None:  # fmt: skip
        self.subject, self.cluster, self.links = subject, cluster, links
        self.examples, self.microbatches, self.capacity = examples, microbatches, capacity
        self.compiles, self.largest = compiles, largest and compiles
        self.progress = progress or (lambda done, total, text: None)
        self.done = self.total = 0
        self.uses, self.flops = trace_subject(subject, examples)

    def plan(self, configs: list[ZeroConfig]) -> list[tuple[ConfigPlan, int]]:
        """The configurations in their order, each with the FLOP counted in its program (0: none was compiled)."""
        self.done, self.total = 0, len(configs) * (2 if self.largest else 1)
        pool = ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1))
        try:
            started = []
            for config in configs:
                self.progress(0, self.total, config_name(config))
                started.append(self.start(config, pool))
            found = []
            for config, one in zip(configs, started, strict=True):
                self.progress(self.done, self.total, config_name(config))
                found.append(self.finish(config, one, pool))
            self.progress(self.total, self.total, "")
            return found
        finally:
            pool.shutdown(cancel_futures=True)

    def start(self, config: ZeroConfig, pool: ThreadPoolExecutor) -> _Started:
        """Traces the steps of a configuration and hands them to the compiler."""
        layout = self.layout(config, absent=self.compiles)
        if not self.compiles:
            return _Started(layout, None, None)
        step = self.submit(layout, self.subject, pool)
        larger = self.submit(*self.larger(config, max(SPAN, 2 * self.examples)), pool) if self.largest else None
        return _Started(layout, step, larger)

    def submit(self, layout: Layout, subject: Subject, pool: ThreadPoolExecutor) -> Future[_Compiled]:
        """Traces a step here and has it compiled in the pool."""
        start = time.perf_counter()
        lowered = lower_step(subject, layout, microbatches=self.microbatches)
        traced = time.perf_counter() - start
        host = offloaded_arguments(layout, subject.batch, subject.rest)

        def work() -> _Compiled:
            start = time.perf_counter()
            program, error = compile_step(lowered, layout, num_nodes=self.cluster.num_nodes)
            return _Compiled(program, error, traced + time.perf_counter() - start, host)

        return pool.submit(work)

    def larger(self, config: ZeroConfig, examples: int) -> tuple[Layout, Subject]:
        """The step with more examples in a microbatch, for a GPU with room for it."""
        target = self.cluster.target
        roomy = dataclasses.replace(target, memory_bytes=_ROOM * target.memory_bytes)
        layout = self.layout(config, absent=True, cluster=self.cluster._replace(target=roomy))
        return layout, self.subject.with_examples(examples * layout.num_shards * self.microbatches)

    def report_progress(self) -> None:
        """One step more is done."""
        self.done += 1
        self.progress(self.done, self.total, "")

    def finish(self, config: ZeroConfig, started: _Started, pool: ThreadPoolExecutor) -> tuple[ConfigPlan, int]:
        """Waits for the compiler, and reads."""
        layout, moves = started.layout, self.moves(started.layout)
        program, error, seconds, _ = _Compiled(None, "", 0.0, 0) if started.step is None else started.step.result()
        self.report_progress()
        memory = self.memory(layout, None if program is None else program.memory)
        largest = None
        if started.larger is not None:
            if program is not None:
                largest = self.find_largest(config, memory, started.larger, pool)
            self.report_progress()
        streams = predicted_streams(moves) if program is None else program_streams(program, layout)
        traced = self.flops * self.microbatches
        if program is None:
            flows, flops = flows_of(moves), traced
        else:
            flows = [Flow(s.received_bytes, s.node_bytes, s.mode == "overlapped") for s in streams]
            flops = program.matmul_flops or traced
        received, entering = (sum(getattr(m, k) for m in moves) for k in ("received_bytes", "node_bytes"))
        return ConfigPlan(
            name=config_name(config), config=config, memory=memory,
            notice="; ".join([*notices(layout.mesh, config, layout.leaves), *padding_notice(layout)]),
            replicated=replicated_leaves(layout, self.subject.tx), streams=streams,
            predicted_received=received, predicted_node=entering,
            received_bytes=sum(s.received_bytes for s in streams), node_bytes=sum(s.node_bytes for s in streams),
            explanation=explain_traffic(moves, streams) if program else "predicted from placements",
            time=step_time(flops, flows, sum(m.pass_bytes for m in moves), self.links),
            largest=largest, compile_seconds=seconds, error=error,
        ), (0 if program is None else flops)  # fmt: skip

    def find_largest(
        self, config: ZeroConfig, memory: Memory, larger: Future[_Compiled], pool: ThreadPoolExecutor
    ) -> Largest | None:
        """A line through the totals of two compiled steps; where it leads far beyond them, of a third too."""
        sizes, examples = [(self.examples, memory.total)], max(SPAN, 2 * self.examples)
        while True:
            program, error, _, host = larger.result()
            if program is None:
                method = f"the step of {examples} examples was not compiled: {error}"
                return Largest(self.examples if memory.fits else 0, method)
            if program.memory is None:
                return None
            sizes.append((examples, program.memory.total - host))
            found, following = line_through(sizes, self.capacity)
            if following is None:
                return found
            examples, larger = following, self.submit(*self.larger(config, following), pool)

    def layout(self, config: ZeroConfig, *, absent: bool, cluster: Cluster | None = None) -> Layout:
        """The parameters laid out on the cluster, on absent GPUs or an abstract mesh."""
        mesh = (cluster or self.cluster).mesh(config.axes, absent=absent)
        subject = self.subject
        with warnings.catch_warnings():  # notices are in the plan
            warnings.simplefilter("ignore", ZeroNotice)
            return partition(subject.params, mesh, config, specs=subject.specs, trainable=subject.trainable)

    def moves(self, layout: Layout) -> tuple[Move, ...]:
        """Predicted traffic of a layout."""
        return predict_traffic(layout, self.uses, microbatches=self.microbatches, num_nodes=self.cluster.num_nodes)

    def memory(self, layout: Layout, figures: Any) -> Memory:
        """Memory of a layout, with the compiler's figures or without."""
        subject = self.subject
        return plan_memory(layout, subject.tx, subject.batch, subject.rest, self.uses, figures, self.capacity)


Tree = Any
# Share of the device memory that is planned with: the rest is CUDA's context, NCCL's buffers and fragmentation.
USABLE = 0.92


def plan(
    loss_fn: Callable[..., Any],
    params_shapes: Tree,
    batch_shapes: Tree,
    tx: optax.GradientTransformation,
    *,
    target: str | GpuTarget = "h100",
    num_nodes: int = 48,
    devices_per_node: int = 8,
    config: ZeroConfig | None = None,
    configs: Sequence[ZeroConfig] | None = None,
    bandwidth: float | str | None = None,
    examples_per_device: int | None = None,
    microbatches: int = 1,
    rest: tuple[Any, ...] = (),
    has_aux: bool = False,
    weighted: bool = False,
    specs: Tree | None = None,
    trainable: Any = None,
    extra_axes: Mapping[str, int] | None = None,
    efficiency: float = EFFICIENCY,
    usable: float = USABLE,
    compiles: bool | None = None,
    largest_microbatch: bool = True,
    progress: Progress | None = None,
    name: str = "model",
) -> Plan:
    """Plans training steps for a cluster that is not there: memory, traffic, time, and what to do about them.

    Args:
        loss_fn: as for `zerojax.value_and_grad`.
        params_shapes: pytree of arrays or `jax.ShapeDtypeStruct`s: logical shapes of the parameters.
        batch_shapes: the same for the global batch of a step; with `examples_per_device` its leading dims do not count.
        tx: any optax transformation; not wrapped by `zerojax.zero`, since every configuration wraps it anew.
        target: a key of `zerojax.planner.gpus.TARGETS`, the path of a `.toml` file, or a `GpuTarget`.
        num_nodes: machines.
        devices_per_node: GPUs in each.
        config: what to plan; `ZeroConfig()` when None and `configs` is None too.
        configs: several, to compare.
        bandwidth: into a node, from all others together: bytes per second, or a text such as "400GB/s" or "3200Gbit/s".
            None: one 400 Gbit/s adapter per GPU.
        examples_per_device: examples in one device's microbatch. None: what `batch_shapes` says.
        microbatches: as for `zerojax.make_train_step`.
        rest: shapes of the further arguments of the loss.
        has_aux: as for `zerojax.value_and_grad`.
        weighted: as for `zerojax.value_and_grad`.
        specs: as for `zerojax.partition`, over `extra_axes`.
        trainable: as for `zerojax.partition`.
        extra_axes: names and sizes of further mesh axes inside a node, left to the compiler.
        efficiency: share of the peak FLOP/s that matrix products are taken to reach.
        usable: share of the device memory that is planned with.
        compiles: False plans from placements alone, True requires the compiler; None takes it where it is installed.
        largest_microbatch: also find the largest microbatch that fits, by a second compile of each configuration.
        progress: called with (steps done, steps in all, what comes next).
        name: of the model, for people.

    Raises:
        ValueError: an unknown target, shapes that cannot be traced or do not divide, a configuration that the mesh
            lacks axes for.
        PluginMissing: `compiles=True` and no CUDA plugin of jaxlib's version.

    >>> import jax.numpy as jnp
    >>> shapes = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)}
    >>> batch = jax.ShapeDtypeStruct((384, 4096), jnp.bfloat16)
    >>> found = plan(lambda p, x: jnp.mean(x @ p["w"]), shapes, batch, optax.adam(1e-3), compiles=False)
    >>> found.configs[0].memory.classes["params"]  # 2 bytes x 4096 x 4224 / 384: padded to divide
    90112
    """
    subject = Subject(
        loss_fn, shapes_of(params_shapes, "params_shapes"), shapes_of(batch_shapes, "batch_shapes"), tx,
        shapes_of(rest, "rest"), has_aux, weighted, specs, trainable, name,
    )  # fmt: skip
    if isinstance(tx, ShardedTransformation):
        raise ValueError("plan(tx=...): pass the optax transformation itself; every configuration wraps it by zero")
    if config is not None and configs is not None:
        raise ValueError("plan(config=..., configs=...): give one of the two")
    wanted = list(configs) if configs is not None else [config or ZeroConfig()]
    if not wanted:
        raise ValueError("plan(configs=[]): at least one configuration is required")
    cluster = make_cluster(target, num_nodes, devices_per_node, extra_axes or {})
    links = machine_links(cluster.target, devices_per_node, bandwidth, efficiency)
    if not 0 < usable <= 1:
        raise ValueError(f"plan(usable={usable}): a share of the device memory is required, above 0 and at most 1")
    lacking = lacking_compiler(compiles)
    replicas = cluster.num_devices // math.prod(cluster.extra_axes.values())
    subject, examples = sized_subject(subject, examples_per_device, replicas, microbatches)
    planner = ConfigPlanner(
        subject, cluster, links, examples, microbatches, int(cluster.target.memory_bytes * usable),
        compiles=not lacking, largest=largest_microbatch, progress=progress,
    )  # fmt: skip
    return _plan_of(planner, wanted, lacking)


def _plan_of(planner: ConfigPlanner, configs: list[ZeroConfig], lacking: str) -> Plan:
    """The plan as a record: configurations, advice, and the choice between them."""
    subject, cluster = planner.subject, planner.cluster
    found = planner.plan(configs)
    plans = tuple(one for one, _ in found)
    flops, source = next((flops for _, flops in found if flops), 0), "compiled program"
    if not flops:
        flops, source = planner.flops * planner.microbatches, "traced loss"
    chosen, why = recommend(plans, planner.capacity)
    leaves = jax.tree.leaves(subject.params)
    sizes = [math.prod(x.shape) for x in leaves]
    widths = [
        max((use.dtype.itemsize for use in of_leaf), default=x.dtype.itemsize)
        for x, of_leaf in zip(leaves, planner.uses, strict=True)
    ]
    return Plan(
        subject.name, sum(sizes), sum(map(operator.mul, sizes, widths)), planner.examples, planner.microbatches,
        cluster.target, cluster.num_nodes, cluster.devices_per_node, planner.links, flops, source, plans,
        _techniques(planner, configs[0], flops), chosen, why, lacking,
    )  # fmt: skip


def _techniques(planner: ConfigPlanner, base: ZeroConfig, flops: float) -> tuple[Technique, ...]:
    """Each technique against stage 3 without it, by the placements."""
    plain = plain_config(base)
    before = planner.moves(planner.layout(plain, absent=False))
    found = []
    for name in NICKNAMES:
        if name == "secondary" and len(plain.axes) < 2:
            continue
        after = planner.moves(planner.layout(with_technique(plain, name), absent=False))
        found.append(judge_technique(name, before, after, flops, planner.links, planner.cluster.num_nodes))
    return tuple(found)


def subject_plan(subject: Subject, **options: Any) -> Plan:
    """`plan` of a `Subject`; `options` are those of `plan`."""
    fields = {f.name: getattr(subject, f.name) for f in dataclasses.fields(subject)}
    renamed = {"params": "params_shapes", "batch": "batch_shapes"}
    return plan(**{**{renamed.get(k, k): v for k, v in fields.items()}, **options})
