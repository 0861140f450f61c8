"""How long a step takes, by a simple model that is stated in full, and from which bandwidth on a technique pays.

    compute     FLOP / (peak FLOP/s x efficiency)
    collective  the larger of  bytes into a node / bandwidth between nodes  and  bytes into a device / link in the node
    passes      bytes read and written to quantise and dequantise / memory bandwidth
    step        compute + passes + blocking collectives + what of the asynchronous ones compute does not cover

Latency, stragglers and contention are not in it. A technique that saves D bytes into each node and costs t seconds
elsewhere pays below the bandwidth D / t; what compute hides anyway cannot be saved. Knows nothing of programs.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable

from zerojax.planner.gpus import GpuTarget

# Of the datasheet's dense bf16 peak: what large matrix products reach in well-tuned training runs.
EFFICIENCY = 0.5
# One 400 Gbit/s adapter per GPU, as in the vendors' reference systems.
NIC_BYTES_PER_SECOND = 50e9


@dataclasses.dataclass(frozen=True)
class Links:
    """Rates of the machine that the model divides by.

    Attributes:
        node_bandwidth: bytes per second into one node, from all others together.
        link_bandwidth: bytes per second into one device from its neighbours in the node.
        memory_bandwidth: bytes per second of the device memory.
        flops: FLOP per second of one device, peak times efficiency.
      node_latency: seconds a collective between nodes takes beyond its bytes.
      link_latency: the same of one inside a node.
    """

    node_bandwidth: float
    link_bandwidth: float
    memory_bandwidth: float
    flops: float
    node_latency: float = 30e-6
    link_latency: float = 15e-6


@dataclasses.dataclass(frozen=True)
class Flow:
    """Bytes per step into a device and into a node, by collectives over the same axes and of one mode."""

    received_bytes: int
    node_bytes: int
    asynchronous: bool = False


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by the model.

    Attributes:
        compute: matrix products.
        between_nodes: collectives that are bound by the network between nodes.
        inside_node: collectives that are bound by the links in a node.
        passes: quantising and dequantising.
        hidden: what of the asynchronous collectives fits behind compute.
        step: the step as scheduled.
    """

    compute: float
    between_nodes: float
    inside_node: float
    passes: float
    hidden: float
    step: float

    @property
    def communication(self) -> float:
        """All collectives and the passes they need, none hidden."""
        return self.between_nodes + self.inside_node + self.passes

    @property
    def exposed(self) -> float:
        """What the step takes beyond its compute."""
        return self.step - self.compute


def machine_links(
    target: GpuTarget, devices_per_node: int, bandwidth: float | str | None, efficiency: float = EFFICIENCY
) -> Links:
    """The rates for a target; `bandwidth` into a node, in bytes per second or as `parse_bandwidth` reads it."""
    if not 0 < efficiency <= 1:
        raise ValueError(f"efficiency={efficiency}: a fraction of the peak is required, above 0 and at most 1")
    node = NIC_BYTES_PER_SECOND * devices_per_node if bandwidth is None else parse_bandwidth(bandwidth)
    return Links(node, target.link_bandwidth, target.memory_bandwidth, target.peak_bf16_flops * efficiency)


def parse_bandwidth(value: float | str) -> float:
    """Bytes per second from a number (of bytes per second) or a text with its unit.

    >>> parse_bandwidth("400GB/s"), parse_bandwidth("100 Gbit/s"), parse_bandwidth(5e10)
    (400000000000.0, 12500000000.0, 50000000000.0)
    """
    units = {"b/s": 1 / 8, "bit/s": 1 / 8, "bps": 1 / 8, "B/s": 1.0, "byte/s": 1.0}
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        found = float(value)
    else:
        match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([kMGT]?)(\S+)\s*", str(value))
        if not match or match[3] not in units:
            raise ValueError(f"bandwidth {value!r}: give bytes or bits per second, as 400GB/s or 3200Gbit/s")
        scale = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[match[2]]
        found = float(match[1]) * scale * units[match[3]]
    if not (found > 0 and math.isfinite(found)):
        raise ValueError(f"bandwidth {value!r}: a positive number is required")
    return found


def flow_seconds(flow: Flow, links: Links) -> float:
    """Seconds of some collectives alone on the network."""
    return max(flow.node_bytes / links.node_bandwidth, flow.received_bytes / links.link_bandwidth)


def step_time(flops: float, flows: Iterable[Flow], pass_bytes: int, links: Links) -> StepTime:
    """The model of the module's docstring.

    >>> links = Links(node_bandwidth=4e11, link_bandwidth=4.5e11, memory_bandwidth=3.35e12, flops=5e14)
    >>> step_time(1e15, [Flow(10**9, 4 * 10**11)], 0, links).step
    3.0
    """
    compute, passes = flops / links.flops, pass_bytes / links.memory_bandwidth
    seconds = {True: 0.0, False: 0.0}
    between = inside = 0.0
    for flow in flows:
        spent = flow_seconds(flow, links)
        seconds[flow.asynchronous] += spent
        if flow.node_bytes / links.node_bandwidth >= spent > 0:
            between += spent
        else:
            inside += spent
    hidden = min(compute, seconds[True])
    return StepTime(compute, between, inside, passes, hidden, compute + passes + between + inside - hidden)


def step_overlapped(flops: float, flows: Iterable[Flow], pass_bytes: int, links: Links) -> float:
    """Seconds of a step whose schedule hides all communication that compute and passes can cover."""
    busy = flops / links.flops + pass_bytes / links.memory_bandwidth
    return max(busy, sum(flow_seconds(flow, links) for flow in flows))


def break_even(gain: Callable[[Links], float], links: Links) -> float:
    """The bandwidth into a node, in bytes per second, below which something gains time.

    Args:
        gain: seconds gained at given rates; falls with the bandwidth.
        links: rates; the bandwidth between nodes is not read.

    Returns:
        Infinity when it always gains, 0 when it never does.

    >>> links = Links(node_bandwidth=4e11, link_bandwidth=4.5e11, memory_bandwidth=3.35e12, flops=5e14)
    >>> round(break_even(lambda at: 1e9 / at.node_bandwidth - 0.5, links))  # saves 1 GB, costs half a second
    2000000000
    """

    def at(bandwidth: float) -> float:
        return gain(dataclasses.replace(links, node_bandwidth=bandwidth))

    low, high = 1e6, 1e16
    if at(high) > 0:
        return math.inf
    if at(low) <= 0:
        return 0.0
    for _ in range(60):  # Halves the interval, in the logarithm.
        middle = math.sqrt(low * high)
        low, high = (middle, high) if at(middle) > 0 else (low, middle)
    return low
