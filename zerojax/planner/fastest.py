"""The fastest ways to run a workload on a cluster: configuration, microbatches, their size, activation checkpointing.

ZeRO's speedup is superlinear (arXiv 1910.02054, section 10.3): more devices leave more memory for each, hence a larger
microbatch, hence more arithmetic for each byte sent. So each configuration is tried at the largest microbatch that
fits, and the steps, compiled there and replayed, are ranked by what a device gets done in a second.

Two GPTs with activation checkpointing on H100, stage 3, JAX 0.12 (attention as XLA compiles it, its scores in memory):
tokens per second and GPU at several bandwidths into a node, in GB/s; "needed" is the one from which on a faster one
saves under 5 %:

    model GPUs  examples  GB/GPU  of it state    400     50     25   12.5   needed
    18b     64         1     8.9         4.04   1983                          1739
    18b     64         4    21.5         4.04   2716                           528
    18b     64        17    75.8         4.04   2681                           105
    18b    128        18    77.5         2.02   2679                            93
    18b    256        18    70.4         1.01   2576                           105
    18b    512        18    69.8         0.50   2575                           107
    128b    64         1    45.2        27.89    309    115     66     35     1946
    128b    64         4    73.6        27.89    400    263    185    116      591
    128b   512         7    75.5         3.49    448    323    243    161      422

The superlinear speedup needs two things. The state must be a large part of the memory at the smaller number: of 128B it
is a third, so that 512 GPUs run 7 examples where 64 run 4, and 8 times the GPUs do 9.0 times the work at 400 GB/s, 9.8
times at 50 and 11.1 times at 12.5. And the larger microbatch must pay: where the network is waited for (below
"needed"), up to the ratio of the examples, here 1.75. 18B shows none from 64 to 512 GPUs, since its state is 5 % of the
memory already: 17 examples become 18, so that no network however slow could show more than 6 %, and from 105 GB/s on
that network is not waited for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from zerojax.config import ZeroConfig
from zerojax.planner.plan import plan_workload
from zerojax.planner.records import ConfigPlan
from zerojax.planner.workload import DEVICES_PER_NODE, NUM_NODES, Workload

# What fits by a line through two compiles may be a little more than what fits: so much less is tried next.
_LESS = 0.93
_TRIES = 3
# Of a batch of given size: so many ways to cut it, from the largest microbatch that fits downwards.
_CUTS = 2


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to run a step, compiled and replayed.

    Attributes:
        checkpointing: whether layers are recomputed in the backward pass; None: the workload does not say.
        examples: of one device's microbatch.
        microbatches: of a step.
        plan: of the step.
    """

    checkpointing: bool | None
    examples: int
    microbatches: int
    plan: ConfigPlan

    @property
    def rate(self) -> float:
        """Examples per second of one device."""
        return self.plan.speed.examples_per_second if self.plan.speed is not None else 0.0

    def __str__(self) -> str:
        speed, time = self.plan.speed, self.plan.time
        assert speed is not None
        rate = speed.tokens_per_second
        done = f"{speed.examples_per_second:,.4g} examples" if rate is None else f"{rate:,.4g} tokens"
        recomputed = {None: "", True: ", activation checkpointing", False: ", no activation checkpointing"}
        accumulated = f" x {self.microbatches} microbatches" if self.microbatches > 1 else ""
        return (
            f"{self.plan.name}, {self.examples} examples per device{accumulated}{recomputed[self.checkpointing]}: "
            f"{done} per second and GPU, step {time.step:.3g} s, {speed.utilisation:.0%} of the peak, "
            f"{self.plan.memory.total / 1e9:.1f} GB"
        )


def find_fastest(
    make: Workload | Callable[[bool], Workload],
    configs: Sequence[ZeroConfig],
    *,
    microbatches: int = 1,
    global_batch: int | None = None,
    **options: Any,
) -> list[Candidate]:
    """Tries configurations at the largest microbatch that fits each, with and without activation checkpointing.

    More microbatches in a step share an update, and with hpZ the gathers between nodes, but their gradients have to be
    summed: of a free batch one, and the most that are allowed, are tried. Of a batch of given size the largest
    microbatches that divide it are tried, and as many of them as it holds.

    Args:
        make: the workload; or a function that makes it with activation checkpointing (True) or without.
        configs: to try.
        microbatches: the most in a step, where the batch is free.
        global_batch: examples of a step, all devices and microbatches together; None: as many as there is room for.
        **options: of `zerojax.plan`: the cluster, bandwidth, ..

    Returns:
        What fits and compiles, the fastest first.

    Raises:
        ValueError: as `zerojax.plan`; a batch that does not divide by the devices; or XLA's CUDA plugin is missing
            (`PluginMissing`).
    """
    options = {**options, "compiles": True}
    cut = None if global_batch is None else _of_each_device(global_batch, options)
    counts = sorted({1, microbatches}) if cut is None else [cut]
    found = []
    for checkpointing in (None,) if isinstance(make, Workload) else (True, False):
        workload = make if isinstance(make, Workload) else make(bool(checkpointing))
        for count in counts:
            small = {**options, "configs": configs, "examples_per_device": 1, "microbatches": count}
            for config, one in zip(configs, plan_workload(workload, **small).configs, strict=True):
                if one.largest is None or not one.largest.examples:
                    continue
                found += _Search(workload, config, checkpointing, options).run(one, count, fixed=cut is not None)
    return sorted(found, key=lambda candidate: -candidate.rate)


def _of_each_device(global_batch: int, options: dict[str, Any]) -> int:
    """Examples that a device has of a batch."""
    cluster = {"num_nodes": NUM_NODES, "devices_per_node": DEVICES_PER_NODE, **options}
    replicas = cluster["num_nodes"] * cluster["devices_per_node"]
    replicas //= math.prod((options.get("extra_axes") or {}).values())
    if global_batch < 1 or global_batch % replicas:
        raise ValueError(f"global_batch={global_batch}: a positive multiple of {replicas} data-parallel devices")
    return global_batch // replicas


@dataclasses.dataclass(frozen=True)
class _Search:
    """The steps of one configuration with many examples."""

    workload: Workload
    config: ZeroConfig
    checkpointing: bool | None
    options: dict[str, Any]

    def run(self, small: ConfigPlan, count: int, *, fixed: bool) -> list[Candidate]:
        """What fits.

        Args:
            small: the step of one example in each of its microbatches.
            count: its microbatches.
            fixed: whether the batch stays, so that larger microbatches are fewer.
        """
        assert small.largest is not None
        least = [Candidate(self.checkpointing, 1, count, small)] if small.memory.fits and small.speed else []
        found = self.cuts(small.largest.examples, count) if fixed else self.largest(small.largest.examples, count)
        return found or least

    def largest(self, examples: int, count: int) -> list[Candidate]:
        """The step with the most examples that fit, of so many microbatches."""
        for _ in range(_TRIES):
            if examples <= 1:
                break
            if found := self.step(examples, count):
                return [found]
            examples = min(examples - 1, int(examples * _LESS))
        return []

    def cuts(self, most: int, batch: int) -> list[Candidate]:
        """Steps of a device's batch in microbatches that divide it."""
        sizes = [size for size in range(min(most, batch), 1, -1) if batch % size == 0]
        found: list[Candidate] = []
        for size in sizes[: _CUTS + 1]:
            one = self.step(size, batch // size)
            found += [one] if one is not None else []
            if len(found) == _CUTS:
                break
        return found

    def step(self, examples: int, count: int) -> Candidate | None:
        """The step if it compiles and fits."""
        wanted = {"configs": [self.config], "examples_per_device": examples, "microbatches": count}
        (one,) = plan_workload(self.workload, **{**self.options, **wanted, "largest_microbatch": False}).configs
        fits = one.memory.fits and one.speed is not None
        return Candidate(self.checkpointing, examples, count, one) if fits else None
