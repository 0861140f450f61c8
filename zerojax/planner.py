"""`plan`: compiles the real step for a cluster that is not there, and says what it holds, sends and costs.

The user's own loss and optimizer are laid out, composed into the step that would run, and compiled for GPUs known only
by their data (`zerojax.gpu_targets`); the compiled program is read, and set beside what the placements predict. Without
XLA's CUDA plugin the prediction alone is given. Nothing is allocated: shapes only.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from zerojax.comms import Move, predict_traffic
from zerojax.compiled_program import CompiledProgram
from zerojax.config import ZeroConfig
from zerojax.gpu_targets import GpuTarget
from zerojax.layout import Layout
from zerojax.notices import ZeroNotice, notices
from zerojax.optimizer import ShardedTransformation
from zerojax.partition import partition
from zerojax.plan_advice import (
    NICKNAMES,
    config_name,
    flows_of,
    judge_technique,
    plain_config,
    recommend,
    with_technique,
)
from zerojax.plan_compile import compile_step
from zerojax.plan_inputs import Cluster, lacking_compiler, make_cluster, shapes_of, sized_subject, trace_subject
from zerojax.plan_memory import padding_notice, plan_memory, replicated_leaves
from zerojax.plan_models import Subject
from zerojax.plan_records import ConfigPlan, Largest, Plan, Technique
from zerojax.plan_time import EFFICIENCY, Flow, Links, machine_links, step_time
from zerojax.plan_traffic import explain_traffic, predicted_streams, program_streams

Tree = Any
# (steps done, steps in all, what comes next)
Progress = Callable[[int, int, str], None]
# Share of the device memory that is planned with: the rest is CUDA's context, NCCL's buffers and fragmentation.
USABLE = 0.92
# A line is trusted up to so many times the microbatch that it was drawn through.
_FAR = 4


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
        target: a key of `zerojax.gpu_targets.TARGETS`, the path of a `.toml` file, or a `GpuTarget`.
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
    planner = _Planner(subject, cluster, links, examples, microbatches, int(cluster.target.memory_bytes * usable),
                       compiles=not lacking, largest=largest_microbatch, progress=progress)  # fmt: skip
    return planner.run(wanted, lacking)


class _Planner:
    """One plan being made."""

    def __init__(
        self, subject: Subject, cluster: Cluster, links: Links, examples: int, microbatches: int, capacity: int, *,
        compiles: bool, largest: bool, progress: Progress | None,
    ) -> None:  # fmt: skip
        self.subject, self.cluster, self.links = subject, cluster, links
        self.examples, self.microbatches, self.capacity = examples, microbatches, capacity
        self.compiles, self.largest = compiles, largest and compiles
        self.progress = progress or (lambda done, total, text: None)
        self.uses, self.traced = trace_subject(subject, examples)

    def run(self, configs: list[ZeroConfig], lacking: str) -> Plan:
        steps = len(configs) * (2 if self.largest else 1)
        plans: list[ConfigPlan] = []
        flops, source = 0, "compiled program"
        for index, config in enumerate(configs):
            text = config_name(config)
            self.progress(index * steps // len(configs), steps, text)
            one, counted = self.plan_config(config, lambda n, i=index, t=text: self.progress(2 * i + n, steps, t))
            plans.append(one)
            flops = flops or counted
        self.progress(steps, steps, "")
        if not flops:
            flops, source = self.traced * self.microbatches, "traced loss"
        chosen, why = recommend(plans, self.capacity)
        leaves = jax.tree.leaves(self.subject.params)
        sizes = [math.prod(x.shape) for x in leaves]
        widths = [
            max((use.dtype.itemsize for use in of_leaf), default=x.dtype.itemsize)
            for x, of_leaf in zip(leaves, self.uses, strict=True)
        ]
        return Plan(
            self.subject.name, sum(sizes), sum(map(operator.mul, sizes, widths)), self.examples, self.microbatches,
            self.cluster.target, self.cluster.num_nodes, self.cluster.devices_per_node, self.links, flops, source,
            tuple(plans), self.techniques(configs[0], flops), chosen, why, lacking,
        )  # fmt: skip

    def plan_config(self, config: ZeroConfig, tell: Callable[[int], None]) -> tuple[ConfigPlan, int]:
        """One configuration, and the FLOP counted in its program (0: none was compiled)."""
        layout = self.layout(config, absent=self.compiles)
        moves = self.moves(layout)
        start, program, error = time.perf_counter(), None, ""
        if self.compiles:
            program, error = self.compile(layout, self.subject)
        spent = time.perf_counter() - start
        figures = None if program is None else program.memory
        memory = self.memory(layout, self.subject, figures)
        largest = None
        if program is not None and self.largest:
            tell(1)
            largest = self.find_largest(layout, memory.total)
        streams = predicted_streams(moves) if program is None else program_streams(program, layout)
        if program is None:
            flows, flops = flows_of(moves), self.traced * self.microbatches
        else:
            flows = [Flow(s.received_bytes, s.node_bytes, s.manner == "overlapped") for s in streams]
            flops = program.matmul_flops or self.traced * self.microbatches
        received, entering = (sum(getattr(m, k) for m in moves) for k in ("received_bytes", "node_bytes"))
        return ConfigPlan(
            name=config_name(config), config=config, memory=memory,
            notice="; ".join([*notices(layout.mesh, config, layout.leaves), *padding_notice(layout)]),
            replicated=replicated_leaves(layout, self.subject.tx), streams=streams,
            predicted_received=received, predicted_node=entering,
            received_bytes=sum(s.received_bytes for s in streams), node_bytes=sum(s.node_bytes for s in streams),
            explanation=explain_traffic(moves, streams) if program else "predicted from placements",
            time=step_time(flops, flows, sum(m.pass_bytes for m in moves), self.links),
            largest=largest, compile_seconds=spent if self.compiles else 0.0, error=error,
        ), (0 if program is None else flops)  # fmt: skip

    def layout(self, config: ZeroConfig, *, absent: bool) -> Layout:
        mesh = self.cluster.mesh(config.axes, absent=absent)
        subject = self.subject
        with warnings.catch_warnings():  # notices are in the plan
            warnings.simplefilter("ignore", ZeroNotice)
            return partition(subject.params, mesh, config, specs=subject.specs, trainable=subject.trainable)

    def moves(self, layout: Layout) -> tuple[Move, ...]:
        return predict_traffic(layout, self.uses, microbatches=self.microbatches, num_nodes=self.cluster.num_nodes)

    def memory(self, layout: Layout, subject: Subject, figures: Any) -> Any:
        return plan_memory(layout, subject.tx, subject.batch, subject.rest, self.uses, figures, self.capacity)

    def compile(self, layout: Layout, subject: Subject) -> tuple[CompiledProgram | None, str]:
        return compile_step(subject, layout, microbatches=self.microbatches, num_nodes=self.cluster.num_nodes)

    def find_largest(self, layout: Layout, total: int) -> Largest | None:
        """A line through the totals of two compiled steps: at the microbatch given, and at twice that.

        Where it leads far beyond them, a third step is compiled there and the line drawn anew.
        """
        sizes = [(self.examples, total)]
        examples = 2 * self.examples
        while True:
            larger = self.subject.with_examples(examples * layout.num_shards * self.microbatches)
            program, error = self.compile(layout, larger)
            if program is None or program.memory is None:
                return Largest(0, error) if error and len(sizes) == 1 else None
            sizes.append((examples, program.memory.total))
            (few, least), (many, most) = sizes[-2:]
            per_example = (most - least) / (many - few)
            compiled = ", ".join(str(size) for size, _ in sizes)
            method = f"line through compiles at {compiled} examples: {per_example / 1e9:.3g} GB per example"
            if per_example <= 0:
                fitting = max((size for size, held in sizes if held <= self.capacity), default=0)
                return Largest(fitting, method + ", no bound found")
            examples = max(0, math.floor(many + (self.capacity - most) / per_example))
            if len(sizes) == 3 or examples <= _FAR * many:
                return Largest(examples, method)

    def techniques(self, base: ZeroConfig, flops: float) -> tuple[Technique, ...]:
        """Each technique against stage 3 without it, by the placements."""
        plain = plain_config(base)
        before = self.moves(self.layout(plain, absent=False))
        found = []
        for name in NICKNAMES:
            if name == "secondary" and len(plain.axes) < 2:
                continue
            after = self.moves(self.layout(with_technique(plain, name), absent=False))
            found.append(judge_technique(name, before, after, flops, self.links, self.cluster.num_nodes))
        return tuple(found)


def subject_plan(subject: Subject, **options: Any) -> Plan:
    """`plan` of a `Subject`; `options` are those of `plan`."""
    fields = {f.name: getattr(subject, f.name) for f in dataclasses.fields(subject)}
    renamed = {"params": "params_shapes", "batch": "batch_shapes"}
    return plan(**{**{renamed.get(k, k): v for k, v in fields.items()}, **options})
