"""Rates of a machine, and how long a step takes where nothing is compiled.

With a compiled program the step is replayed (`zerojax.planner.replay`). Without one, from placements alone:

    compute     FLOP / (peak FLOP/s x efficiency)
    collective  the larger of  bytes into a node / bandwidth between nodes  and  bytes into a device / link in the node
    passes      bytes read and written to quantise and dequantise / memory bandwidth
    step        compute + passes + blocking collectives + what of the asynchronous ones compute does not cover

Latency and kernels that are no products are not in it. A technique that saves D bytes into each node and costs t
seconds elsewhere pays below the bandwidth D / t; what compute hides anyway cannot be saved.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence

from zerojax.hlo.collective import Traffic
from zerojax.hlo.steps import Product
from zerojax.planner.gpus import GpuTarget

# Of the datasheet's dense bf16 peak, for rules that know of no size: what large matrix products reach.
EFFICIENCY = 0.5
# One 400 Gbit/s adapter per GPU, as in the vendors' reference systems.
NIC_BYTES_PER_SECOND = 50e9
# Rates of tensor cores for other element types, by the rate for bfloat16 (datasheets of A100, H100 and B200; float32
# products run as TF32, the default of JAX on GPUs).
_RATES = {"f32": 0.5, "f64": 0.0625, "s8": 2.0, "u8": 2.0, "f8": 2.0}
# Tiles of the result that one multiprocessor works on at a time, and the depth from which on a product is split along
# k to keep all of them busy: the sizes of the libraries' kernels.
_TILE = (128, 256)
_SPLIT_DEPTH = 1024


@dataclasses.dataclass(frozen=True)
class Links:
    """Rates of the machine that the model divides by.

    Attributes:
        node_bandwidth: bytes per second into one node, from all others together.
        link_bandwidth: bytes per second into one device from its neighbours in the node.
        memory_bandwidth: bytes per second of the device memory, as reached.
        flops: FLOP per second of one device in bfloat16, peak times efficiency.
        node_latency: seconds a collective between nodes takes beyond its bytes.
        link_latency: the same of one inside a node.
        launch_seconds: the least a kernel takes.
        core_count: multiprocessors that the tiles of a product are spread over; 0: products of all sizes are as fast.
        host_bandwidth: bytes per second between the device and host memory.
        collective_cores: of `core_count`, multiprocessors that a collective keeps from kernels beside it.
    """

    node_bandwidth: float
    link_bandwidth: float
    memory_bandwidth: float
    flops: float
    node_latency: float = 30e-6
    link_latency: float = 15e-6
    launch_seconds: float = 0.0
    core_count: int = 0
    host_bandwidth: float = 25e9
    collective_cores: int = 0

    def product_seconds(self, product: Product) -> float:
        """Seconds of a matrix product whose operands are at hand.

        The result is cut into tiles, one at a time for each multiprocessor: the last round of tiles is as long as the
        others however few they are.
        """
        rate = self.flops * next((r for name, r in _RATES.items() if product.dtype.startswith(name)), 1.0)
        if not self.core_count or not product.flops:
            return product.flops / rate
        tiles = product.batch * math.ceil(product.m / _TILE[0]) * math.ceil(product.n / _TILE[1])
        parts = min(max(1, product.k // _SPLIT_DEPTH), math.ceil(self.core_count / tiles))
        rounds = math.ceil(tiles * parts / self.core_count)
        full = product.batch * product.m * product.n * parts / (_TILE[0] * _TILE[1])
        return product.flops / rate * max(1.0, rounds * self.core_count / full)


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one step: of a replayed program, or by the model of the module's docstring.

    Attributes:
        compute: kernels, those that quantise too; without a program matrix products alone.
        between_nodes: collectives between nodes; without a program those that are bound by the network between them.
        inside_node: collectives inside nodes.
        passes: quantising and dequantising, where no program was compiled.
        hidden: what of the collectives and of copies to and from the host is behind compute, or beside each other.
        step: the step as scheduled.
        host: copies between the device and host memory; none without a program.
    """

    compute: float
    between_nodes: float
    inside_node: float
    passes: float
    hidden: float
    step: float
    host: float = 0.0

    @property
    def communication(self) -> float:
        """All collectives and the passes they need, none hidden."""
        return self.between_nodes + self.inside_node + self.passes

    @property
    def exposed(self) -> float:
        """What the step takes beyond its compute."""
        return self.step - self.compute


def machine_links(
    target: GpuTarget, devices_per_node: int, bandwidth: float | str | None, efficiency: float | None = None
) -> Links:
    """The rates for a target.

    Args:
        target: the GPU.
        devices_per_node: GPUs that share the network into a node.
        bandwidth: into a node, in bytes per second or as `parse_bandwidth` reads it; None: one adapter per GPU.
        efficiency: share of the peak that large products reach; None: the target's.
    """
    efficiency = target.product_efficiency if efficiency is None else efficiency
    if not 0 < efficiency <= 1:
        raise ValueError(f"efficiency={efficiency}: a fraction of the peak is required, above 0 and at most 1")
    node = NIC_BYTES_PER_SECOND * devices_per_node if bandwidth is None else parse_bandwidth(bandwidth)
    return Links(
        node, target.link_bandwidth, target.memory_bandwidth * target.memory_efficiency,
        target.peak_bf16_flops * efficiency, target.node_latency, target.link_latency, target.launch_seconds,
        target.core_count, target.host_bandwidth, target.collective_cores,
    )  # fmt: skip


def plain_links(
    target: GpuTarget, devices_per_node: int, bandwidth: float | str | None, efficiency: float = EFFICIENCY
) -> Links:
    """The datasheet's rates, products of every size at one share of the peak, nothing for launching a kernel.

    Simple rules by which the schedules of two programs compare; arguments as for `machine_links`.
    """
    links = machine_links(target, devices_per_node, bandwidth, efficiency)
    return dataclasses.replace(
        links, memory_bandwidth=float(target.memory_bandwidth), node_latency=30e-6, link_latency=15e-6,
        launch_seconds=0.0, core_count=0, collective_cores=0,
    )  # fmt: skip


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


def traffic_seconds(row: Traffic, links: Links) -> float:
    """Seconds of some collectives alone on the network."""
    return max(row.node_bytes / links.node_bandwidth, row.received_bytes / links.link_bandwidth)


def step_time(flops: float, rows: Iterable[Traffic], links: Links) -> StepTime:
    """The model of the module's docstring.

    Args:
        flops: of one device.
        rows: what is sent, and read and written to quantise it.
        links: rates of the machine.

    >>> links = Links(node_bandwidth=4e11, link_bandwidth=4.5e11, memory_bandwidth=3.35e12, flops=5e14)
    >>> gathers = Traffic("forward", "all-gather", ("node",), ("bf16",), True, "", 40, 10**9, 4 * 10**11)
    >>> step_time(1e15, [gathers], links).step
    3.0
    """
    compute, passes = flops / links.flops, 0.0
    seconds = {True: 0.0, False: 0.0}
    between = inside = 0.0
    for row in rows:
        spent = traffic_seconds(row, links)
        passes += row.pass_bytes / links.memory_bandwidth
        seconds[row.mode == "overlapped"] += spent
        if row.node_bytes / links.node_bandwidth >= spent > 0:
            between += spent
        else:
            inside += spent
    hidden = min(compute, seconds[True])
    return StepTime(compute, between, inside, passes, hidden, compute + passes + between + inside - hidden)


def step_overlapped(flops: float, rows: Sequence[Traffic], links: Links) -> float:
    """Seconds of a step whose schedule hides all communication that compute and passes can cover."""
    busy = flops / links.flops + sum(row.pass_bytes for row in rows) / links.memory_bandwidth
    return max(busy, sum(traffic_seconds(row, links) for row in rows))


def break_even(gain: Callable[[Links], float], links: Links, halvings: int = 60) -> float:
    """The bandwidth into a node, in bytes per second, below which something gains time.

    Args:
        gain: seconds gained at given rates; falls with the bandwidth.
        links: rates; the bandwidth between nodes is not read.
        halvings: of the interval from a megabyte to ten petabytes per second, in its logarithm.

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
    for _ in range(halvings):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if at(middle) > 0 else (low, middle)
    return low
