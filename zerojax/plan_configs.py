"""Each configuration of a plan: laid out, compiled, read, and set beside what the placements predict.

Steps are traced one after the other and compiled two at a time: the compiler uses little more than one core, and two
programs stay below 2 GB together. The second program of a configuration is the same step with more examples, for the
largest microbatch that fits. Knows nothing of the choice between configurations.
"""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from zerojax.comms import Move, predict_traffic
from zerojax.compiled_program import CompiledProgram
from zerojax.config import ZeroConfig
from zerojax.layout import Layout
from zerojax.notices import ZeroNotice, notices
from zerojax.partition import partition
from zerojax.plan_advice import config_name, flows_of
from zerojax.plan_compile import compile_step, lower_step
from zerojax.plan_inputs import Cluster, trace_subject
from zerojax.plan_largest import SPAN, line_through
from zerojax.plan_memory import offloaded_arguments, padding_notice, plan_memory, replicated_leaves
from zerojax.plan_models import Subject
from zerojax.plan_records import ConfigPlan, Largest, Memory
from zerojax.plan_time import Flow, Links, step_time
from zerojax.plan_traffic import explain_traffic, predicted_streams, program_streams

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
        uses: how the loss uses each leaf, from `zerojax.leaf_uses`.
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

    def tell(self) -> None:
        """One step more is done."""
        self.done += 1
        self.progress(self.done, self.total, "")

    def finish(self, config: ZeroConfig, started: _Started, pool: ThreadPoolExecutor) -> tuple[ConfigPlan, int]:
        """Waits for the compiler, and reads."""
        layout, moves = started.layout, self.moves(started.layout)
        program, error, seconds, _ = _Compiled(None, "", 0.0, 0) if started.step is None else started.step.result()
        self.tell()
        memory = self.memory(layout, None if program is None else program.memory)
        largest = None
        if started.larger is not None:
            if program is not None:
                largest = self.find_largest(config, memory, started.larger, pool)
            self.tell()
        streams = predicted_streams(moves) if program is None else program_streams(program, layout)
        traced = self.flops * self.microbatches
        if program is None:
            flows, flops = flows_of(moves), traced
        else:
            flows = [Flow(s.received_bytes, s.node_bytes, s.manner == "overlapped") for s in streams]
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
