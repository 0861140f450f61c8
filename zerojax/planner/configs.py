"""Plans each configuration of a workload: lays it out, compiles the step, reads and replays the program.

Without XLA's CUDA plugin the prediction from placements alone is given. Nothing is allocated: shapes only. Steps are
traced one after the other and compiled two at a time: the compiler uses little more than one core, and two programs
stay below 2 GB together.
"""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from zerojax.config import ZeroConfig
from zerojax.hlo.collective import Traffic
from zerojax.hlo.liveness import memory_within
from zerojax.hlo.program import CompiledProgram
from zerojax.layout.layout import Layout
from zerojax.layout.notices import ZeroNotice, notices
from zerojax.layout.partition import partition
from zerojax.planner.advice import config_name
from zerojax.planner.compile import SPAN, compile_step, line_through, lower_step, overlap_limit
from zerojax.planner.memory import offloaded_arguments, padding_notice, plan_memory, replicated_leaves
from zerojax.planner.records import ConfigPlan, Largest, Memory
from zerojax.planner.replay import FUSED
from zerojax.planner.speed import Replays, replayed_time, speed_of
from zerojax.planner.time import Links, step_time
from zerojax.planner.traffic import explain_traffic, predict_traffic, predicted_streams, program_streams
from zerojax.planner.workload import Cluster, Workload, trace_workload

# (steps done, steps in all, what comes next)
Progress = Callable[[int, int, str], None]
_AT_ONCE = 2
# The step of more examples is compiled for a GPU of so many times the memory: near its bound the compiler recomputes,
# and no line could be drawn.
_ROOM = 64


class _Compiled(NamedTuple):
    """A step after the compiler.

    Attributes:
        program: None where the compiler refused it.
        error: why.
        seconds: of tracing and compiling.
        host: bytes of its arguments in host memory.
        within: bytes of temporaries that only the operations of a fused kernel write and read.
    """

    program: CompiledProgram | None
    error: str
    seconds: float
    host: int
    within: int = 0


class _Started(NamedTuple):
    """A configuration whose steps are being compiled; the second has more examples."""

    layout: Layout
    step: Future[_Compiled] | None
    larger: Future[_Compiled] | None


class ConfigPlanner:
    """Plans configurations of one workload on one cluster.

    Args:
        workload: loss, optimizer and global shapes.
        cluster: what is planned for.
        links: rates of the time model.
        examples: of one device's microbatch.
        microbatches: as for `zerojax.make_train_step`.
        capacity: bytes that may be used of a device.
        compiles: compile the steps, or plan from placements alone.
        largest: also find the largest microbatch that fits.
        progress: called before every compile.

    Attributes:
        uses: how the loss uses each leaf, from `zerojax.gather.uses`.
        flops: FLOP of one device's microbatch in the traced loss, recomputation too.
        model_flops: the same without recomputation.
        fused: scopes of the loss that stand for a fused kernel.
        replays: of the compiled configurations.
    """

    def __init__(
        self, workload: Workload, cluster: Cluster, links: Links, examples: int, microbatches: int, capacity: int, *,
        compiles: bool, largest: bool, progress: Progress | None,
    ) -> None:  # fmt: skip
        self.workload, self.cluster, self.links = workload, cluster, links
        self.examples, self.microbatches, self.capacity = examples, microbatches, capacity
        self.compiles, self.largest = compiles, largest and compiles
        self.progress = progress or (lambda done, total, text: None)
        self.done = self.total = 0
        self.replays: dict[ZeroConfig, Replays] = {}
        scopes = FUSED if workload.fused is None else workload.fused
        self.uses, self.flops, self.model_flops, self.fused = trace_workload(workload, examples, scopes)

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
        # What a fused kernel keeps on the chip is in the memory of the program: near the bound it would be recomputed.
        layout = self.roomy(config) if self.compiles and self.fused else self.layout(config, absent=self.compiles)
        if not self.compiles:
            return _Started(layout, None, None)
        step = self.submit(layout, self.workload, pool)
        larger = self.submit(*self.larger(config, max(SPAN, 2 * self.examples)), pool) if self.largest else None
        return _Started(layout, step, larger)

    def submit(self, layout: Layout, workload: Workload, pool: ThreadPoolExecutor) -> Future[_Compiled]:
        """Traces a step here and has it compiled in the pool."""
        start = time.perf_counter()
        lowered = lower_step(workload, layout, microbatches=self.microbatches)
        traced = time.perf_counter() - start
        host = offloaded_arguments(layout, workload.batch, workload.rest)

        def work() -> _Compiled:
            start = time.perf_counter()
            program, error = compile_step(lowered, layout, num_nodes=self.cluster.num_nodes)
            within = memory_within(program.module, self.fused) if program is not None and self.fused else 0
            return _Compiled(program, error, traced + time.perf_counter() - start, host, within)

        return pool.submit(work)

    def larger(self, config: ZeroConfig, examples: int) -> tuple[Layout, Workload]:
        """The step with more examples in a microbatch, for a GPU with room for it."""
        layout = self.roomy(config)
        return layout, self.workload.with_examples(examples * layout.num_shards * self.microbatches)

    def roomy(self, config: ZeroConfig) -> Layout:
        """The layout on GPUs of so much memory that the compiler never recomputes to save some."""
        target = self.cluster.target
        target = dataclasses.replace(target, memory_bytes=_ROOM * target.memory_bytes)
        return self.layout(config, absent=True, cluster=self.cluster._replace(target=target))

    def report_progress(self) -> None:
        """One step more is done."""
        self.done += 1
        self.progress(self.done, self.total, "")

    def finish(self, config: ZeroConfig, started: _Started, pool: ThreadPoolExecutor) -> tuple[ConfigPlan, int]:
        """Waits for the compiler, and reads."""
        layout, moves = started.layout, self.moves(started.layout)
        step = _Compiled(None, "", 0.0, 0) if started.step is None else started.step.result()
        program, error, seconds = step.program, step.error, step.seconds
        self.report_progress()
        memory = self.memory(layout, None if program is None else program.memory, step.within)
        largest = None
        if started.larger is not None:
            if program is not None:
                largest = self.find_largest(config, memory, started.larger, pool)
            self.report_progress()
        traced = self.flops * self.microbatches
        speed, flops = None, traced
        if program is None:
            streams = predicted_streams(moves)
            seconds_of = step_time(traced, streams, self.links)
        else:
            streams, flops = program_streams(program), program.matmul_flops or traced
            replays = Replays(program, layout, self.links, overlap_limit(layout), self.workload.fused)
            self.replays[config] = replays
            seconds_of = replayed_time(replays.at(self.links.node_bandwidth))
            speed = speed_of(
                replays, self.examples * self.microbatches, self.workload.tokens_per_example,
                self.model_flops * self.microbatches, self.cluster.target.peak_bf16_flops,
            )  # fmt: skip
        received, entering = (sum(getattr(m, k) for m in moves) for k in ("received_bytes", "node_bytes"))
        return ConfigPlan(
            name=config_name(config), config=config, memory=memory,
            notice="; ".join([*notices(layout.mesh, config, layout.leaves), *padding_notice(layout)]),
            replicated=replicated_leaves(layout, self.workload.tx), streams=streams,
            predicted_received=received, predicted_node=entering,
            received_bytes=sum(s.received_bytes for s in streams), node_bytes=sum(s.node_bytes for s in streams),
            explanation=explain_traffic(moves, streams) if program else "predicted from placements",
            time=seconds_of, largest=largest, compile_seconds=seconds, error=error, speed=speed,
            replays=self.replays.get(config),
        ), (0 if program is None else flops)  # fmt: skip

    def find_largest(
        self, config: ZeroConfig, memory: Memory, larger: Future[_Compiled], pool: ThreadPoolExecutor
    ) -> Largest | None:
        """A line through the totals of two compiled steps; where it leads far beyond them, of a third too."""
        sizes, examples = [(self.examples, memory.total)], max(SPAN, 2 * self.examples)
        while True:
            step = larger.result()
            program = step.program
            if program is None:
                method = f"the step of {examples} examples was not compiled: {step.error}"
                return Largest(self.examples if memory.fits else 0, method)
            if program.memory is None:
                return None
            sizes.append((examples, program.memory.total - step.host - step.within))
            found, following = line_through(sizes, self.capacity)
            if following is None:
                return found
            examples, larger = following, self.submit(*self.larger(config, following), pool)

    def layout(self, config: ZeroConfig, *, absent: bool, cluster: Cluster | None = None) -> Layout:
        """The parameters laid out on the cluster, on target GPUs or an abstract mesh."""
        mesh = (cluster or self.cluster).mesh(config.axes, absent=absent)
        workload = self.workload
        with warnings.catch_warnings():  # notices are in the plan
            warnings.simplefilter("ignore", ZeroNotice)
            return partition(workload.params, mesh, config, specs=workload.specs, trainable=workload.trainable)

    def moves(self, layout: Layout) -> tuple[Traffic, ...]:
        """Predicted traffic of a layout."""
        return predict_traffic(layout, self.uses, microbatches=self.microbatches, num_nodes=self.cluster.num_nodes)

    def memory(self, layout: Layout, figures: Any, within: int) -> Memory:
        """Memory of a layout, with the compiler's figures or without, less what lies within fused kernels."""
        workload = self.workload
        given = (layout, workload.tx, workload.batch, workload.rest, self.uses, figures, self.capacity)
        return plan_memory(*given, within=within, scopes=self.fused)
