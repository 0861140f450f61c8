"""What the replay of a compiled step says of a configuration: its parts, what is exposed, the bandwidth it would take.

A program is replayed as often as bandwidths are asked about; each is remembered. Collectives are named by the leaves
that they move, found by the number of elements: a gather of a leaf's shards to the full leaf, or one of two hops.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from zerojax.hlo.collective import Collective
from zerojax.hlo.program import CompiledProgram
from zerojax.layout.layout import Layout
from zerojax.planner.replay import Replay, replay
from zerojax.planner.time import Links, StepTime, break_even

# The median and the largest error of 24 published runs; see the table of `zerojax.planner.replay`.
UNCERTAINTY, LARGEST_ERROR = 0.08, 0.17
_MOST_EXPOSED = 5
# A network is fast enough when a faster one saves less than this share of a step.
_ENOUGH = 0.05


@dataclasses.dataclass(frozen=True)
class Exposure:
    """What compute waits for in a step: one collective of the program, all its executions together.

    Attributes:
        what: the leaves that it moves, or where JAX's name stack places it.
        phase: "forward", "backward" or "update".
        kind: of collective.
        axes: mesh axes, outermost first.
        executions: how often it runs.
        seconds: that it is under way.
        exposed: of these, seconds in which nothing is computed.
    """

    what: str
    phase: str
    kind: str
    axes: tuple[str, ...]
    executions: int
    seconds: float
    exposed: float


@dataclasses.dataclass(frozen=True)
class Speed:
    """What the replay of a compiled step says beyond its parts.

    Attributes:
        ideal: seconds of the busiest lane: the step if all else were hidden.
        examples_per_second: of one device.
        tokens_per_second: of one device; None where the batch holds no tokens.
        utilisation: FLOP of the model (without recomputation) by the datasheet's peak.
        exposed_share: share of the communication that is not behind compute.
        exposures: the collectives that compute waits longest for.
        needed_bandwidth: bytes per second into a node from which on the step is within 5 % of what it takes with an
            endlessly fast network between nodes.
        uncertainty: relative error of the step: the median of the published runs (`zerojax.planner.replay`).
    """

    ideal: float
    examples_per_second: float
    tokens_per_second: float | None
    utilisation: float
    exposed_share: float
    exposures: tuple[Exposure, ...]
    needed_bandwidth: float
    uncertainty: float


class Replays:
    """Replays of one program at any bandwidth between nodes.

    Args:
        program: as read.
        layout: the layout of its parameters.
        links: rates of the machine.
        overlap_limit: as for `zerojax.planner.replay.replay`.
        fused: as for `zerojax.planner.replay.replay`.

    Attributes:
        names: what each collective moves, by its name.
    """

    def __init__(
        self, program: CompiledProgram, layout: Layout, links: Links, overlap_limit: int,
        fused: Mapping[str, float] | None,
    ) -> None:  # fmt: skip
        self.program, self.links, self.limit, self.fused = program, links, overlap_limit, fused
        self.names = {one.name: moved_leaves(one, layout) for one in program.collectives}
        self.found: dict[float, Replay] = {}

    def at(self, node_bandwidth: float) -> Replay:
        """The step with so many bytes per second into a node."""
        if node_bandwidth not in self.found:
            links = dataclasses.replace(self.links, node_bandwidth=node_bandwidth)
            self.found[node_bandwidth] = replay(self.program, links, overlap_limit=self.limit, fused=self.fused)
        return self.found[node_bandwidth]

    def recorded(self) -> Replay:
        """The step at the machine's bandwidth with its events."""
        return replay(self.program, self.links, overlap_limit=self.limit, fused=self.fused, record=True)

    def needed_bandwidth(self) -> float:
        """Bytes per second into a node from which on a faster network hardly helps; 0 where none is needed."""
        best = self.at(1e16).seconds

        def lost(at: Links) -> float:
            return self.at(at.node_bandwidth).seconds - (1 + _ENOUGH) * best

        return break_even(lost, self.links, halvings=10)


def replayed_time(found: Replay) -> StepTime:
    """The parts of a replayed step."""
    busy = found.busy
    hidden = sum(busy.values()) - found.seconds
    return StepTime(busy["compute"], busy["between"], busy["inside"], 0.0, hidden, found.seconds, busy["host"])


def speed_of(replays: Replays, examples: int, tokens_per_example: int | None, model_flops: float, peak: float) -> Speed:
    """What a replay says of a step.

    Args:
        replays: of its program.
        examples: of one device in a step.
        tokens_per_example: of the batch.
        model_flops: of one device in a step, without recomputation.
        peak: FLOP per second of the datasheet.
    """
    found = replays.at(replays.links.node_bandwidth)
    rate = examples / found.seconds
    worst = [one for one in found.collectives if one.exposed > 0][:_MOST_EXPOSED]
    return Speed(
        ideal=found.ideal,
        examples_per_second=rate,
        tokens_per_second=None if tokens_per_example is None else rate * tokens_per_example,
        utilisation=model_flops / (peak * found.seconds),
        exposed_share=1 - found.hidden_share,
        exposures=tuple(
            Exposure(
                replays.names[one.collective.name],
                "update" if one.collective.phase == "other" else one.collective.phase, one.collective.kind,
                one.collective.axes, one.executions, one.seconds, one.exposed,
            )
            for one in worst
        ),
        needed_bandwidth=replays.needed_bandwidth(),
        uncertainty=UNCERTAINTY,
    )  # fmt: skip


def moved_leaves(one: Collective, layout: Layout) -> str:
    """Names of the leaves that a collective moves; the end of JAX's name stack where none fits."""
    owners: dict[int, list[str]] = {}
    for p in layout.leaves:
        sizes = {math.prod(p.padded_shape)}
        if len(p.padded_shape) > 1 and p.dim != 0:
            sizes.add(math.prod(p.padded_shape[1:]))
        for size in sizes:
            owners.setdefault(size, []).append(p.path)
    names: list[str] = []
    for operand, result in zip(one.operands, one.results, strict=False):
        few, many = sorted((math.prod(operand.dims), math.prod(result.dims)))
        # Between shards and a part on the first of two hops, a part and the full leaf on the second, or both in one.
        found = owners.get(few * layout.num_shards) or owners.get(many) or []
        names += [" or ".join(found)] if found else []
    if not names:
        parts = [part for part in one.op_name.split("/") if part not in ("while", "body", "eval_jaxpr", "closed_call")]
        return "/".join(parts[-2:]) or one.name
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
