"""Which technique pays on a given network, and which configuration to take: the advice of a plan, "don't" included.

Each technique of ZeRO++ (arXiv 2306.10209, section 3) is set against stage 3 without it: where both programs are
compiled, by their replays at several bandwidths; else by the placements, once with nothing hidden behind compute and
once with all that compute can cover, between which the truth of a schedule lies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from zerojax.config import QuantFormat, ZeroConfig
from zerojax.hlo.collective import Traffic
from zerojax.planner.records import ConfigPlan, Technique
from zerojax.planner.speed import Replays
from zerojax.planner.time import Links, break_even, step_overlapped, step_time

# Gains below these shares of a step are not worth another technique.
WORTH_A_TECHNIQUE = 0.02
WORTH_A_STAGE = 0.02
# Validation loss of all three techniques to stage 3: mean of five seeds and its standard error.
LOSS_GAP = "-0.05 % ± 0.13 %"
# Of the interval in which a replay looks for the bandwidth where two programs break even: 3 % of it are left.
_HALVINGS = 10

NICKNAMES = {"quantize_weights": "qwZ", "secondary": "hpZ", "quantize_gradients": "qgZ"}


def comparison_configs(base: ZeroConfig | None = None) -> list[ZeroConfig]:
    """All stages, and stage 3 with each technique and with all three; other fields are those of `base`.

    >>> [config_name(config) for config in comparison_configs()][-2:]
    ['stage 3 + qgZ int8/int4', 'stage 3 + qwZ int8 + hpZ + qgZ int8/int4']
    """
    plain = plain_config(base or ZeroConfig())
    stages = [dataclasses.replace(plain, stage=stage) for stage in (0, 1, 2, 3)]
    techniques = [with_technique(plain, name) for name in NICKNAMES if name != "secondary" or len(plain.axes) == 2]
    everything = plain
    for name in NICKNAMES:
        if name != "secondary" or len(plain.axes) == 2:
            everything = with_technique(everything, name)
    return [*stages, *techniques, everything]


def plain_config(config: ZeroConfig) -> ZeroConfig:
    """Stage 3 without techniques; other fields as they are."""
    return dataclasses.replace(unquantized_config(config), stage=3, secondary=False)


def unquantized_config(config: ZeroConfig) -> ZeroConfig:
    """The same without what rounds on its way; other fields as they are."""
    return dataclasses.replace(
        config, quantize_weights=None, weight_deltas=None, quantize_gradients=None, rounding="nearest",
        error_feedback=False,
    )  # fmt: skip


def with_technique(config: ZeroConfig, name: str) -> ZeroConfig:
    """The configuration with one technique in its default format."""
    default = getattr(ZeroConfig.zero_plus_plus(), name)
    return dataclasses.replace(config, **{name: default})


def config_name(config: ZeroConfig) -> str:
    """What people call a configuration.

    >>> config_name(ZeroConfig(stage=3, secondary=True))
    'stage 3 + hpZ'
    """
    parts = [f"stage {config.stage}"]
    if isinstance(config.quantize_weights, QuantFormat):
        parts.append(f"qwZ {_format_name(config.quantize_weights)}")
    if config.secondary:
        parts.append("hpZ")
    if isinstance(config.quantize_gradients, tuple):
        names = [_format_name(f) for f in config.quantize_gradients]
        parts.append("qgZ " + (names[0] if len(set(names)) == 1 else "/".join(names)))
    if config.weight_deltas is not None:
        parts.append(f"weight deltas {config.weight_deltas.element}")  # type: ignore[union-attr]
    if config.error_feedback:
        parts.append("error feedback")
    return " + ".join(parts)


def _format_name(fmt: object) -> str:
    assert isinstance(fmt, QuantFormat)
    return fmt.element


def decide_on_technique(
    name: str, base: Sequence[Traffic], changed: Sequence[Traffic], flops: float, links: Links, num_nodes: int
) -> Technique:
    """Whether a technique pays.

    Args:
        name: field of `ZeroConfig`.
        base: traffic of stage 3 without it.
        changed: traffic with it.
        flops: of one device per step.
        links: rates, the bandwidth between nodes among them.
        num_nodes: machines.
    """
    nick = NICKNAMES[name]
    if name == "secondary" and num_nodes == 1:
        text = f"{nick}: don't: on one node there is no gather between nodes to save"
        return Technique(name, 0, 0.0, 0.0, 0.0, 0.0, "no", text)

    def gain(at: Links) -> float:
        before, after = (step_time(flops, rows, at).step for rows in (base, changed))
        return before - after

    def gain_hidden(at: Links) -> float:
        before, after = (step_overlapped(flops, rows, at) for rows in (base, changed))
        return before - after

    saved, saved_hidden = gain(links), gain_hidden(links)
    limit, limit_hidden = break_even(gain, links), break_even(gain_hidden, links)
    before = step_time(flops, base, links).step
    if saved_hidden > WORTH_A_TECHNIQUE * before:
        decision = "yes"
    else:
        decision = "if exposed" if saved > WORTH_A_TECHNIQUE * before else "no"
    here = f"here {links.node_bandwidth / 1e9:.3g} GB/s"
    bounds = (
        f"pays {_below(limit_hidden)} whatever the schedule hides, {_below(limit)} where nothing is hidden ({here})"
    )
    effect = (
        f"{_effect(saved)} of a step of {before:.3g} s with nothing hidden, "
        f"{_effect(saved_hidden)} with perfect overlap"
    )
    text = f"{nick}: {_DECISIONS[decision]}: {bounds}: {effect}"
    if name == "quantize_gradients" and decision != "no":
        text += "; it changes the gradients, so check convergence"
    saved_bytes = sum(m.node_bytes for m in base) - sum(m.node_bytes for m in changed)
    return Technique(name, saved_bytes, limit, limit_hidden, saved, saved_hidden, decision, text)


def decide_by_replays(name: str, base: Replays, changed: Replays, saved_node_bytes: int, links: Links) -> Technique:
    """Whether a technique pays, by replays of the two programs at several bandwidths.

    Args:
        name: field of `ZeroConfig`.
        base: stage 3 without it.
        changed: stage 3 with it.
        saved_node_bytes: bytes fewer into each node per step.
        links: rates of the machine.
    """

    def gain(at: Links) -> float:
        return base.at(at.node_bandwidth).seconds - changed.at(at.node_bandwidth).seconds

    saved, before = gain(links), base.at(links.node_bandwidth).seconds
    limit = break_even(gain, links, halvings=_HALVINGS)
    decision = "yes" if saved > WORTH_A_TECHNIQUE * before else "no"
    text = (
        f"{NICKNAMES[name]}: {_DECISIONS[decision]}: pays {_below(limit)} "
        f"(here {links.node_bandwidth / 1e9:.3g} GB/s): {_effect(saved)} of a step of {before:.3g} s, both replayed"
    )
    if name == "quantize_gradients" and decision != "no":
        text += "; it changes the gradients, so check convergence"
    return Technique(name, saved_node_bytes, limit, limit, saved, saved, decision, text, replayed=True)


_DECISIONS = {"yes": "do", "if exposed": "only if the schedule leaves communication exposed", "no": "don't"}


def _below(limit: float) -> str:
    if limit == 0:
        return "never"
    return "at any bandwidth" if math.isinf(limit) else f"below {limit / 1e9:.3g} GB/s into a node"


def _effect(saved: float) -> str:
    return f"{'saves' if saved >= 0 else 'costs'} {abs(saved):.3g} s"


def recommend(plans: Sequence[ConfigPlan], capacity: int) -> tuple[int | None, str]:
    """The configuration with the shortest step that fits, the simplest of those that are about as good.

    Args:
        plans: the configurations.
        capacity: bytes that may be used of a device.

    Returns:
        Its index and the reason; None when nothing fits.
    """
    fitting = [i for i, one in enumerate(plans) if one.memory.fits]
    if not fitting:
        least = min(plans, key=lambda one: one.memory.total)
        largest = max(least.memory.classes, key=lambda name: least.memory.classes[name])
        return None, (
            f"nothing fits: the least is {least.name} with {least.memory.total / 1e9:.1f} GB per device, most of it "
            f"{largest}, where {capacity / 1e9:.1f} GB can be used; take more nodes, fewer examples per device, or "
            "activation checkpointing"
        )
    best = min(fitting, key=lambda i: plans[i].time.step)
    slack = WORTH_A_STAGE * plans[best].time.step
    near = [i for i in fitting if plans[i].time.step <= plans[best].time.step + slack]
    chosen = min(near, key=lambda i: (_complexity(plans[i].config), plans[i].time.step))
    one = plans[chosen]
    measure = "least exposed communication" if one.speed is None else "shortest step"
    reasons = [
        f"{one.name}: the {measure} that fits, {one.time.exposed:.3g} s per step beyond {one.time.compute:.3g} s of "
        f"compute, in {one.memory.total / 1e9:.1f} of {capacity / 1e9:.1f} GB"
    ]
    if chosen != best:
        gain = one.time.step - plans[best].time.step
        reasons.append(f"{plans[best].name} would save {gain:.2g} s, under {WORTH_A_STAGE:.0%} of a step")
    if misfits := [p.name for p in plans if not p.memory.fits]:
        reasons.append(f"does not fit: {', '.join(misfits)}")
    return chosen, "; ".join(reasons)


def network_advice(plans: Sequence[ConfigPlan], links: Links) -> str:
    """What the techniques do for a step on this network, by replays; empty where they do not pay or are not compared.

    Args:
        plans: the configurations.
        links: rates of the machine.
    """
    fitting = [one for one in plans if one.speed is not None and one.memory.fits and one.config.stage == 3]
    plain = next((one for one in fitting if not _complexity(one.config)[0]), None)
    best = min(fitting, key=lambda one: one.time.step, default=None)
    if plain is None or best is None or best.time.step > (1 - WORTH_A_TECHNIQUE) * plain.time.step:
        return ""
    text = (
        f"at {links.node_bandwidth / 1e9:.3g} GB/s into a node a step of {plain.name} takes {plain.time.step:.3g} s, "
        f"of {best.name} {best.time.step:.3g} s"
    )
    if best.config.quantize_weights or best.config.quantize_gradients:
        text += f"; the loss of a small model differed by {LOSS_GAP} (examples/convergence_study.py)"
    return f"{text}; --trace step.json writes what waits for what in the recommended step"


def _complexity(config: ZeroConfig) -> tuple[int, int]:
    techniques = sum(bool(getattr(config, name)) for name in NICKNAMES)
    return techniques, config.stage
