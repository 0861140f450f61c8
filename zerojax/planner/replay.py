"""How long a compiled step takes: its schedule replayed with lanes for compute, each network, and the host.

Kernels run one after the other in the order in which they are issued. A collective runs on the lane between nodes, the
lane inside the node, or both at once, as soon as each is free and fewer than `overlap_limit` others are under way; it
takes its latency and the larger of its bytes into a node / network and its bytes into a device / link. A blocking
collective stops compute; an asynchronous one runs from its start, and its done waits. A kernel takes the larger of its
FLOP / rate (`Links.product_seconds`), its bytes / memory bandwidth, and what launching it costs. Copies to and from
host memory take their bytes / the bandwidth of that link, one after the other; started ones run beside compute. Kernels
whose JAX name stack holds a scope named in `fused` stand for one fused kernel, as of attention: they take so large a
share of their FLOP, and move nothing between them.

Checked against throughput that others published: PyTorch FSDP with flash attention in bfloat16 on nodes of 8 GPUs
(mosaicml/llm-foundry, scripts/train/benchmarking/README.md). Their models (`examples/published_runs.py`, which repeats
this table) are planned with stage 3, nothing set per row; H100 with one 400 Gbit/s adapter per GPU, A100 with the 1600
Gbit/s stated; attention in the scope "flash_attention". Fitted: one product efficiency for each GPU, 0.60 of the peak
on H100 and 0.76 on A100. Latencies of 30 us and 15 us, a launch of 3 us and 0.9 of the memory bandwidth stand as they
were taken. Tokens per second and GPU, JAX 0.12.0.1; the last two columns are shares of the step, on A100 as replayed
with an efficiency of 0.80:

    model gpu gpus microbatch recomp. measured replayed error compute waits
    1b   h100    8    14 x 1     no   45455   42710   -6.0%   100%    0%
    1b   h100   16    20 x 1     no   46037   43069   -6.4%   100%    0%
    1b   h100   32    20 x 1     no   45130   43075   -4.6%   100%    0%
    1b   h100   64    20 x 1     no   44402   43079   -3.0%   100%    0%
    3b   h100   16    10 x 3     no   24142   21502  -10.9%   100%    0%
    3b   h100   32     6 x 3     no   23021   21103   -8.3%    99%    1%
    3b   h100   64     6 x 3     no   22525   21055   -6.5%    99%    1%
    7b   h100    8     6 x 1     no   10643   10448   -1.8%   100%    0%
    13b  h100    8     2 x 1     no    4792    5428  +13.3%    99%    1%
    13b  h100   16     2 x 1     no    4767    5439  +14.1%    97%    3%
    13b  h100   32     2 x 1     no    4811    5284   +9.8%    94%    6%
    13b  h100   64     2 x 1     no    4800    5245   +9.3%    93%    7%
    30b  h100    8     3 x 21   yes    2002    2285  +14.1%   100%    0%
    30b  h100   16    10 x 3    yes    2263    2401   +6.1%   100%    0%
    30b  h100   32    14 x 3    yes    2308    2393   +3.7%   100%    0%
    70b  h100   32     2 x 16   yes     882    1008  +14.2%    93%    7%
    70b  h100   64     8 x 4    yes    1039    1108   +6.6%    99%    1%
    1b   a100    8    14 x 4     no   20513   18154  -11.5%    99%    1%
    3b   a100    8    10 x 2     no   10811    9675  -10.5%    99%    1%
    7b   a100    8     6 x 2     no    4641    4341   -6.5%    98%    2%
    13b  a100    8     2 x 3     no    2262    2240   -1.0%    96%    4%
    30b  a100    8     3 x 21   yes     916     919   +0.4%    97%    3%
    70b  a100   32     2 x 16   yes     373     436  +16.9%    97%    3%
    70b  a100   64     8 x 4    yes     410     456  +11.1%    99%    1%

The median of the absolute errors is 7.5 %, the largest 16.9 % (2026-12-01). Our schedule hides what these runs had to
wait for: with microbatches of two examples, where gathers are long beside compute, most predictions are 9 to 17 % above
what FSDP reached; with small models, where much time is in kernels other than products, up to 12 % below. What the two
stacks do otherwise is in the errors too: kernels that XLA fuses and the other stack does not, and stragglers, of which
no replay knows.

Left out: NCCL's kernels take multiprocessors from products beside them, how many depends on its version and on the
network. With 16 of 132 (`GpuTarget.collective_cores`) the step of 7b on 8 H100 is 0.3 % longer, of 13b on 64 0.8 %.
Arguments in host memory are the device's to the compiler, which knows one memory of absent devices: what it would copy
of them is not in the step; activations that are offloaded are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from zerojax.hlo.collective import Collective
from zerojax.hlo.program import CompiledProgram, read_program
from zerojax.hlo.steps import Await, Choice, Issue, Kernel, Repeat, Step, all_collectives
from zerojax.planner.gpus import GpuTarget
from zerojax.planner.time import EFFICIENCY, Links, plain_links

LANES: tuple[str, ...] = ("compute", "inside", "between", "host")
# What flash attention (arXiv 2307.08691) computes of a causal attention's products.
FUSED: Mapping[str, float] = {"flash_attention": 0.5}
_SAME = 1e-9
# Loops are cut short in a recording of more events than this.
_MOST_EVENTS = 200_000


class Event(NamedTuple):
    """Something on a lane from `begin` to `end`, in seconds.

    Beside `LANES` there are "waits", what compute waits for, and "loop", iterations of loops. `detail` says how large
    matrix products are.
    """

    lane: str
    name: str
    op_name: str
    begin: float
    end: float
    num_bytes: int = 0
    flops: int = 0
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Exposed:
    """What one collective costs in a step: executions, seconds on its lanes, and seconds compute waits for it."""

    collective: Collective
    executions: int
    seconds: float
    exposed: float


@dataclasses.dataclass(frozen=True)
class Replay:
    """A replayed step, in seconds.

    Attributes:
        seconds: of the step.
        busy: seconds each lane works: "compute", "inside" a node, "between" nodes, to and from the "host".
        communication: of all collectives, each counted alone.
        collectives: what each costs, the most exposed first.
        events: what happens when, where it was recorded.
    """

    seconds: float
    busy: Mapping[str, float]
    communication: float
    collectives: tuple[Exposed, ...]
    events: tuple[Event, ...] = dataclasses.field(default=(), repr=False)

    @property
    def ideal(self) -> float:
        """The step if everything but the busiest lane were hidden."""
        return max(self.busy.values())

    @property
    def exposed(self) -> float:
        """Seconds in which compute waits."""
        return self.seconds - self.busy["compute"]

    @property
    def hidden_share(self) -> float:
        """Share of the communication behind compute."""
        exposed = sum(one.exposed for one in self.collectives)
        return 1 - exposed / self.communication if self.communication else 1.0

    def __str__(self) -> str:
        lanes = ", ".join(f"{name} {value:.3f}" for name, value in self.busy.items() if value or name != "host")
        lines = [
            f"step {self.seconds:.3f} s, ideal {self.ideal:.3f} ({self.seconds / self.ideal:.2f}x); busy: {lanes}; "
            f"{self.hidden_share:.0%} of {self.communication:.3f} s of communication hidden"
        ]
        for one in self.collectives[:8]:
            lines.append(
                f"  {one.exposed:.4f} s exposed of {one.seconds:.4f} in {one.executions}: {one.collective.kind} over "
                f"{'+'.join(one.collective.axes)} {one.collective.name} ({one.collective.phase})"
            )
        return "\n".join(lines)


def replay_text(
    program: jax.stages.Compiled | str,
    mesh: jax.sharding.Mesh | Mapping[str, int],
    target: GpuTarget,
    *,
    bandwidth: float | str | None = None,
    node_axes: Sequence[str] = ("node",),
    efficiency: float = EFFICIENCY,
    overlap_limit: int = 1,
) -> Replay:
    """Replays a compiled program, or its text, by the simple rules of `plain_links`, in one line.

    Args:
        program: `jax.jit(f).lower(*args).compile()`, or its `as_text()`.
        mesh: the mesh it was compiled for, or its axis names and sizes.
        target: the GPU.
        bandwidth: into a node, as `zerojax.plan` takes it.
        node_axes: mesh axes along which the node changes.
        efficiency: share of the peak that matrix products reach.
        overlap_limit: as for `replay`.
    """
    read = read_program(program, mesh, node_axes=node_axes)
    per_node = read.num_devices
    for axis in read.node_axes:
        per_node //= read.mesh_shape[axis]
    links = plain_links(target, per_node, bandwidth, efficiency)
    return replay(read, links, overlap_limit=overlap_limit, fused={})


def replay(
    program: CompiledProgram,
    links: Links,
    *,
    overlap_limit: int = 1,
    fused: Mapping[str, float] | None = None,
    record: bool = False,
) -> Replay:
    """Replays a program on a machine of given rates.

    Args:
        program: from `read_program`, with its mesh.
        links: rates of the machine.
        overlap_limit: collectives that may be under way at once
            (`xla_gpu_experimental_parallel_collective_overlap_limit`).
        fused: scopes (`jax.named_scope`) that stand for a fused kernel, and the share of their FLOP that it computes;
            `FUSED` when None.
        record: keep the events.
    """
    clock = _Clock(program, links, overlap_limit, FUSED if fused is None else fused, record)
    clock.run(program.steps)
    end = max(clock.now, *clock.free.values())
    found = [
        Exposed(clock.known[name], round(runs), seconds, exposed)
        for name, (runs, seconds, exposed) in clock.of_collective.items()
    ]
    return Replay(
        end, dict(clock.busy), sum(one.seconds for one in found),
        tuple(sorted(found, key=lambda one: -one.exposed)), tuple(clock.events),
    )  # fmt: skip


class _Clock:
    """The state of a replay."""

    def __init__(
        self, program: CompiledProgram, links: Links, overlap_limit: int, fused: Mapping[str, float], record: bool
    ) -> None:
        self.links, self.limit, self.fused = links, overlap_limit, fused
        self.recording, self.events = record, list[Event]()
        self.node_axes = frozenset(program.node_axes)
        self.now = 0.0
        self.free = {"inside": 0.0, "between": 0.0, "host": 0.0}
        self.under_way: list[float] = []  # ends of the collectives issued last
        self.started: dict[str, tuple[float, str]] = {}  # end, and the name of the collective or copy
        self.busy: dict[str, float] = dict.fromkeys(LANES, 0.0)
        self.of_collective: dict[str, list[float]] = {}  # executions, seconds, exposed
        self.known: dict[str, Collective] = {}
        self.op_names: dict[str, str] = {}  # of what was started and is no collective

    def run(self, steps: Sequence[Step]) -> None:
        """Goes through steps in their order."""
        for step in steps:
            match step:
                case Kernel():
                    self.kernel(step)
                case Issue():
                    self.issue(step)
                case Await():
                    end, name = self.started.pop(step.start, (0.0, ""))
                    self.wait(end, name)
                case Repeat():
                    self.repeat(step)
                case Choice():
                    self.choose(step)

    def kernel(self, step: Kernel) -> None:
        """A kernel runs now; one that was started runs beside."""
        products = sum(map(self.links.product_seconds, step.products))
        share = next((share for scope, share in self.fused.items() if scope in step.op_name), None)
        if share is not None:
            seconds = share * products
        else:
            seconds = max(products, step.num_bytes / self.links.memory_bandwidth, self.links.launch_seconds)
        if step.host_bytes:
            self.copy(step, max(seconds, step.host_bytes / self.links.host_bandwidth))
            return
        if step.asynchronous:
            self.started[step.name] = (self.now + seconds, step.name)
            self.op_names[step.name] = step.op_name
            return
        if step.products and self.links.collective_cores:
            seconds = self.beside_collectives(seconds)
        if self.recording and seconds:
            end = self.now + seconds
            detail = ", ".join(map(str, step.products))
            self.events.append(
                Event("compute", step.name, step.op_name, self.now, end, step.num_bytes, step.flops, detail)
            )
        self.now += seconds
        self.busy["compute"] += seconds

    def beside_collectives(self, seconds: float) -> float:
        """How long products take while collectives keep multiprocessors from them."""
        links = self.links
        slower = links.core_count / (links.core_count - links.collective_cores)
        window = max([0.0, *(end - self.now for end in self.under_way)])  # until the last of them is done
        return min(seconds * slower, window + max(0.0, seconds - window / slower))

    def copy(self, step: Kernel, seconds: float) -> None:
        """A copy to or from host memory, on the lane of that link."""
        begin = max(self.now, self.free["host"])
        end = self.free["host"] = begin + seconds
        self.busy["host"] += seconds
        if self.recording:
            self.events.append(Event("host", step.name, step.op_name, begin, end, step.host_bytes))
        self.op_names[step.name] = step.op_name
        if step.asynchronous:
            self.started[step.name] = (end, step.name)
        else:
            self.wait(end, step.name)

    def issue(self, step: Issue) -> None:
        """A collective is put on its lanes."""
        one, links = step.collective, self.links
        between = one.node_bytes / links.node_bandwidth
        inside = one.received_bytes / links.link_bandwidth if set(one.axes) - self.node_axes or not between else 0.0
        latency = links.node_latency if between else links.link_latency
        begin = self.now
        self.under_way = sorted(end for end in self.under_way if end > begin)
        if len(self.under_way) >= self.limit:
            begin = self.under_way[-self.limit]
        lanes = [("between", between)] * (between > 0) + [("inside", inside)] * (inside > 0 or not between)
        begin = max(begin, *(self.free[lane] for lane, _ in lanes))
        for lane, seconds in lanes:
            self.free[lane] = begin + latency + seconds
            self.busy[lane] += latency + seconds
            if self.recording:
                size = one.node_bytes if lane == "between" else one.received_bytes
                self.events.append(Event(lane, one.name, one.op_name, begin, begin + latency + seconds, size))
        duration = latency + max(between, inside)
        self.under_way.append(begin + duration)
        self.known[one.name] = one
        totals = self.of_collective.setdefault(one.name, [0, 0.0, 0.0])
        totals[0] += 1
        totals[1] += duration
        if step.start:
            self.started[step.start] = (begin + duration, one.name)
        else:
            self.wait(begin + duration, one.name)

    def wait(self, end: float, name: str) -> None:
        """Compute waits until `end`, for a collective or a started kernel."""
        if end > self.now:
            if name in self.of_collective:
                self.of_collective[name][2] += end - self.now
            if self.recording and name:
                op_name = self.known[name].op_name if name in self.known else self.op_names[name]
                self.events.append(Event("waits", name, op_name, self.now, end))
            self.now = end

    def repeat(self, step: Repeat) -> None:
        """Iterations until one is like the one before; the others are counted."""
        before = None
        for done in range(step.count):
            totals, start = self.totals(), self.now
            self.run(step.body)
            if self.recording:
                self.events.append(Event("loop", f"{step.name} {done + 1}/{step.count}", step.op_name, start, self.now))
                if len(self.events) < _MOST_EVENTS:
                    continue
            after = self.relative()
            if before is not None and self.same(before, after):
                self.skip(step.count - done - 1, totals, self.now - start)
                return
            before = after

    def relative(self) -> dict[str, float]:
        """What is under way, by the seconds it will take from now on."""
        state = {lane: max(0.0, end - self.now) for lane, end in self.free.items()}
        state |= {f"started {name}": max(0.0, end - self.now) for name, (end, _) in self.started.items()}
        state |= {f"end {i}": end - self.now for i, end in enumerate(sorted(self.under_way)) if end > self.now}
        return state

    @staticmethod
    def same(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
        """Whether two states differ by rounding alone."""
        return one.keys() == other.keys() and all(abs(one[key] - other[key]) < _SAME for key in one)

    def totals(self) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Copies of what is added up."""
        return dict(self.busy), {name: list(values) for name, values in self.of_collective.items()}

    def skip(self, times: int, before: tuple[dict[str, float], dict[str, list[float]]], seconds: float) -> None:
        """Adds iterations like the last one."""
        busy, of_collective = before
        for lane, value in self.busy.items():
            self.busy[lane] += times * (value - busy[lane])
        for name, values in self.of_collective.items():
            old = of_collective.get(name, [0, 0.0, 0.0])
            self.of_collective[name] = [value + times * (value - was) for value, was in zip(values, old, strict=True)]
        shift = times * seconds
        self.now += shift
        self.free = {lane: end + shift for lane, end in self.free.items()}
        self.under_way = [end + shift for end in self.under_way]
        self.started = {key: (end + shift, name) for key, (end, name) in self.started.items()}

    def choose(self, step: Choice) -> None:
        """The slowest of the branches that a usual step takes."""
        found = []
        usual = [one for one in step.branches if not any(c.is_seldom for c in all_collectives(one))]
        for branch in usual or step.branches:
            one = copy.copy(self)
            one.free, one.busy, one.started = dict(self.free), dict(self.busy), dict(self.started)
            one.of_collective = {name: list(values) for name, values in self.of_collective.items()}
            one.under_way = list(self.under_way)
            one.run(branch)
            found.append(one)
        if found:
            vars(self).update(vars(max(found, key=lambda one: one.now)))
