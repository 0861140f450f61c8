"""The fastest ways to run a workload on a cluster: configuration, examples per device, activation checkpointing.

ZeRO's speedup is superlinear (arXiv 1910.02054, section 10.3): more devices leave more memory for each, hence a larger
microbatch, hence more arithmetic for each byte sent. So each configuration is tried at the largest microbatch that
fits, and the steps, compiled there and replayed, are ranked by what a device gets done in a second.

`gpt:18b` with activation checkpointing on H100, stage 3, 400 GB/s into a node, JAX 0.12 (attention as XLA compiles it,
its scores in memory); "network" is the bandwidth into a node from which on a faster one saves under 5 %:

    GPUs  examples  GB/GPU  of it state  tokens/s/GPU  of the peak  network, GB/s
      64         1     8.9         4.04          1983         23 %           1739
      64         4    21.5         4.04          2716         32 %            528
      64        17    75.8         4.04          2681         32 %            105
     128        18    77.5         2.02          2679         32 %             93
     256        18    70.4         1.01          2576         30 %            105
     512        18    69.8         0.50          2575         30 %            107

The larger microbatch pays (37 % from 1 to 4 examples) and needs a sixteenth of the network. But from 64 GPUs on the
state is 5 % of the memory or less, so that more of them add no examples: the speedup is linear there, not superlinear.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from zerojax.config import ZeroConfig
from zerojax.planner.plan import plan_workload
from zerojax.planner.records import ConfigPlan
from zerojax.planner.workload import Workload

# What fits by a line through two compiles may be a little more than what fits: so much less is tried next.
_LESS = 0.93
_TRIES = 3


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to run a step, compiled and replayed.

    Attributes:
        checkpointing: whether layers are recomputed in the backward pass; None: the workload does not say.
        examples: of one device's microbatch.
        plan: of the step.
    """

    checkpointing: bool | None
    examples: int
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
        return (
            f"{self.plan.name}, {self.examples} examples per device{recomputed[self.checkpointing]}: {done} per second "
            f"and GPU, step {time.step:.3g} s, {speed.utilisation:.0%} of the peak, "
            f"{self.plan.memory.total / 1e9:.1f} GB"
        )


def find_fastest(
    make: Workload | Callable[[bool], Workload], configs: Sequence[ZeroConfig], **options: Any
) -> list[Candidate]:
    """Tries configurations at the largest microbatch that fits each, with and without activation checkpointing.

    Args:
        make: the workload; or a function that makes it with activation checkpointing (True) or without.
        configs: to try.
        **options: of `zerojax.plan`: the cluster, bandwidth, microbatches, ..

    Returns:
        What fits and compiles, the fastest first.

    Raises:
        ValueError: as `zerojax.plan`; or XLA's CUDA plugin is missing (`PluginMissing`).
    """
    options = {**options, "compiles": True}
    found = []
    for checkpointing in (None,) if isinstance(make, Workload) else (True, False):
        workload = make if isinstance(make, Workload) else make(bool(checkpointing))
        first = plan_workload(workload, **{**options, "configs": configs, "examples_per_device": 1})
        for config, one in zip(configs, first.configs, strict=True):
            if one.largest is None or not one.largest.examples:
                continue
            found += _at_largest(workload, config, one, checkpointing, options)
    return sorted(found, key=lambda candidate: -candidate.rate)


def _at_largest(
    workload: Workload, config: ZeroConfig, small: ConfigPlan, checkpointing: bool | None, options: dict[str, Any]
) -> list[Candidate]:
    """The step with the most examples that fit; that of one example where no other does."""
    assert small.largest is not None
    examples = small.largest.examples
    for _ in range(_TRIES):
        if examples <= 1:
            break
        wanted = {"configs": [config], "examples_per_device": examples, "largest_microbatch": False}
        (one,) = plan_workload(workload, **{**options, **wanted}).configs
        if one.memory.fits and one.speed is not None:
            return [Candidate(checkpointing, examples, one)]
        examples = min(examples - 1, int(examples * _LESS))
    return [Candidate(checkpointing, 1, small)] if small.memory.fits and small.speed is not None else []
