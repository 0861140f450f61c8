"""What a plan says, as records that print as JSON: memory, traffic and time of each configuration, and the advice.

Bytes are those of one device unless a name says node; seconds are of one step. Everything here is plain data: it is
filled by `zerojax.planner.plan` and shown by `zerojax.planner.report`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from zerojax.config import ZeroConfig
from zerojax.hlo.collective import Traffic
from zerojax.hlo.program import MemoryFigures
from zerojax.planner.gpus import GpuTarget
from zerojax.planner.speed import Replays, Speed
from zerojax.planner.time import Links, StepTime


@dataclasses.dataclass(frozen=True)
class Replicated:
    """Something that is replicated on every device.

    Attributes:
        what: "params", "grads", "master" or "moments".
        path: key path of the leaf.
        bytes: on each device.
        reason: why it is not split.
    """

    what: str
    path: str
    bytes: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that one device holds.

    Attributes:
        classes: by class, largest-lived first: "params", "master", "moments", "error_feedback", "replica" (of weight
            deltas), "batch", "grads", "secondary", and where a program was compiled "activations" (with temporaries and
            gathered weights) and "code". Gradients and the secondary partition are part of the program's temporaries.
        total: their sum, or the compiled program's own total, less arguments in host memory.
        capacity: what may be used of the device.
        compiled: the compiler's figures, or None.
        predicted_arguments: state and batch by the placements, to compare with `compiled.argument`.
        difference: compiled arguments in device memory less the predicted ones; 0 means that they agree.
        explanation: where the difference comes from, or what the figures leave out.
        offloaded: bytes held in host memory: temporaries of the program, and arguments whose sharding says so.
    """

    classes: dict[str, int]
    total: int
    capacity: int
    compiled: MemoryFigures | None
    predicted_arguments: int
    difference: int
    explanation: str
    offloaded: int = 0

    @property
    def fits(self) -> bool:
        """Whether the device has room."""
        return self.total <= self.capacity


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest microbatch that fits: examples per device, and how it was found."""

    examples: int
    method: str


@dataclasses.dataclass(frozen=True)
class ConfigPlan:
    """One configuration.

    Attributes:
        name: for people.
        config: the configuration.
        notice: what has no effect on this mesh, or "".
        memory: of one device.
        replicated: what is replicated, largest first.
        streams: traffic of the compiled program, or the predicted traffic.
        predicted_received: bytes into a device by the placements.
        predicted_node: bytes into a node by the placements.
        received_bytes: bytes into a device, of `streams`.
        node_bytes: bytes into a node, of `streams`.
        explanation: how far prediction and program differ, and why.
        time: of the replayed program, or by the model of `zerojax.planner.time`.
        largest: the largest microbatch that fits, or None when it was not asked for or nothing is compiled.
        compile_seconds: wall time of tracing and compiling; 0 where nothing was compiled.
        error: why it could not be compiled, or "".
        speed: what the replay says; None where nothing was compiled.
        replays: of the compiled program, at any bandwidth (not part of the JSON form).
    """

    name: str
    config: ZeroConfig
    notice: str
    memory: Memory
    replicated: tuple[Replicated, ...]
    streams: tuple[Traffic, ...]
    predicted_received: int
    predicted_node: int
    received_bytes: int
    node_bytes: int
    explanation: str
    time: StepTime
    largest: Largest | None
    compile_seconds: float
    error: str = ""
    speed: Speed | None = None
    replays: Replays | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def is_compiled(self) -> bool:
        """Whether the figures are a compiled program's."""
        return self.memory.compiled is not None


@dataclasses.dataclass(frozen=True)
class Technique:
    """Whether a technique of ZeRO++ pays here, against stage 3 without it.

    Attributes:
        name: "quantize_weights", "secondary" or "quantize_gradients".
        saved_node_bytes: bytes fewer into each node per step.
        break_even: bandwidth into a node, bytes per second, below which a step takes less time: of both programs
            replayed, or else by the placements when no communication is hidden behind compute; infinity: always, 0:
            never.
        break_even_hidden: the same when all communication is hidden that compute can cover; of replays the same.
        saved_seconds: per step at the bandwidth planned for, replayed or with nothing hidden; negative: it costs.
        saved_seconds_hidden: the same with all hidden that compute can cover.
        decision: "yes": pays (whatever the schedule hides, where nothing is replayed); "if exposed": pays only for
            communication that the schedule leaves exposed; "no".
        advice: one sentence.
        replayed: whether both programs were compiled and replayed.
    """

    name: str
    saved_node_bytes: int
    break_even: float
    break_even_hidden: float
    saved_seconds: float
    saved_seconds_hidden: float
    decision: str
    advice: str
    replayed: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `zerojax.plan` returns.

    Attributes:
        model: name of what is planned for.
        parameters: number of parameters.
        model_bytes: M, bytes of the parameters in the dtype of the computation.
        examples_per_device: of one microbatch.
        microbatches: per step.
        target: the GPU.
        num_nodes: machines.
        devices_per_node: GPUs in each.
        links: rates that the time model divides by.
        flops: of one device per step; how they were counted is in `flops_source`.
        flops_source: "compiled program" or "traced loss".
        configs: one record per configuration, in the order given.
        techniques: whether each technique pays.
        recommended: index into `configs`, or None when nothing fits.
        recommendation: why.
        lacking: what the plan lacks without a compiler and the command that adds it, or "".
    """

    model: str
    parameters: int
    model_bytes: int
    examples_per_device: int
    microbatches: int
    target: GpuTarget
    num_nodes: int
    devices_per_node: int
    links: Links
    flops: float
    flops_source: str
    configs: tuple[ConfigPlan, ...]
    techniques: tuple[Technique, ...]
    recommended: int | None
    recommendation: str
    lacking: str

    @property
    def fits(self) -> bool:
        """Whether any configuration fits."""
        return any(one.memory.fits for one in self.configs)

    @property
    def shown(self) -> Replays | None:
        """The replays of the configuration to look at: the recommended one, else the first that was compiled."""
        order = list(self.configs)
        if self.recommended is not None:
            order.insert(0, self.configs[self.recommended])
        return next((one.replays for one in order if one.replays is not None), None)

    def to_dict(self) -> dict[str, Any]:
        """The plan as dicts, lists, strings and numbers; infinite break-even bandwidths become None."""
        out = _plain(self)
        for found, one in zip(out["configs"], self.configs, strict=True):
            found["memory"]["fits"] = one.memory.fits
            found["time"]["communication"] = one.time.communication
        return out

    def to_json(self, indent: int | None = 2) -> str:
        """The plan as JSON."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def __str__(self) -> str:
        lines = [f"{self.model} on {self.num_nodes} x {self.devices_per_node} {self.target.name}"]
        for one in self.configs:
            source = "compiled" if one.is_compiled else "placements only"
            lines.append(
                f"  {one.name}: {one.memory.total / 1e9:.2f} GB per device "
                f"({'fits' if one.memory.fits else 'does not fit'}), {one.node_bytes / 1e9:.2f} GB into each node per "
                f"step ({source})"
            )
        return "\n".join([*lines, self.recommendation, *([self.lacking] if self.lacking else [])])


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return {name: _plain(found) for name in names if not isinstance(found := getattr(value, name), Replays)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
