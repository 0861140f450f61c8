"""Predicted traffic of a step, from placements alone, and how far a compiled program differs from it.

The costs are those that stand beside each collective in `zerojax.collectives`, summed over the leaves: at stage 3 a
gather in the forward and one in the backward pass and a reduction; at stages 1 and 2 a reduction and a gather of the
updated parameters; at stage 0 an all-reduce. M being the bytes of the parameters, the ZeRO paper counts 2M, 2M, 2M, 3M
into a device (arXiv 1910.02054, section 7), ZeRO++ 3M -> 0.75M into a node (arXiv 2306.10209, section 3). What the
compiled program sends is read by `zerojax.hlo.program`; where the two differ by more than a percent, the explanation
names the phase and kind of collective. Bytes are per step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from zerojax.collectives.deltas import weight_deltas
from zerojax.collectives.plain import gather_bytes
from zerojax.collectives.select import has_secondary, layout_collectives
from zerojax.config import QuantFormat, ZeroConfig
from zerojax.gather.uses import LeafUse
from zerojax.gradients.replicas import can_change_by_layer, travels_by_deltas
from zerojax.hlo.collective import Traffic, node_share
from zerojax.hlo.program import CompiledProgram
from zerojax.layout.layout import Layout
from zerojax.layout.placement import Placement


def predict_traffic(
    layout: Layout,
    uses: Sequence[tuple[LeafUse, ...]] | None = None,
    *,
    microbatches: int = 1,
    num_nodes: int | None = None,
) -> tuple[Traffic, ...]:
    """Predicts what one step moves: a row for each leaf (all its layers), phase, collective and axis.

    Args:
        layout: the layout; its mesh may be a `jax.sharding.AbstractMesh`.
        uses: how the loss uses each leaf, from `zerojax.gather.uses`. None: once, in the dtype in which it is stored.
        microbatches: gradient accumulation. Gathers, and the reductions of stages 2 and 3, are repeated in each.
        num_nodes: machines. None: the size of the first of two data axes; one for a single axis.

    >>> import jax, zerojax
    >>> mesh = jax.sharding.AbstractMesh((48, 8), ("node", "local"))
    >>> model = {"w": jax.ShapeDtypeStruct((6144, 24576), jnp.bfloat16)}
    >>> layout = zerojax.partition(model, mesh, zerojax.ZeroConfig(stage=3))
    >>> M = 2 * 6144 * 24576
    >>> round(sum(move.node_bytes for move in predict_traffic(layout)) / M, 2)  # 3 (n - 1) / n
    2.94
    """
    if uses is None:
        uses = [(LeafUse(p.dtype),) for p in layout.leaves]
    nodes = num_nodes or (layout.mesh.shape[layout.config.axes[0]] if len(layout.config.axes) == 2 else 1)
    moves: list[Traffic] = []
    for placement, of_leaf in zip(layout.leaves, uses, strict=True):
        moves += _LeafTraffic(layout, _own_part(placement, layout), microbatches, nodes).moves(of_leaf)
    return tuple(moves)


def paper_volume(config: ZeroConfig, *, two_level: bool) -> float:
    """The papers' volume of a step, in units of M = bytes of the parameters in 2-byte floats; scales not counted.

    Args:
        config: stage and techniques.
        two_level: bytes into each node of many (arXiv 2306.10209, section 3); otherwise into each device of many
            (arXiv 1910.02054, section 7).

    >>> [paper_volume(ZeroConfig(stage=s), two_level=False) for s in (0, 1, 2, 3)]
    [2.0, 2.0, 2.0, 3.0]
    >>> paper_volume(ZeroConfig.zero_plus_plus(), two_level=True)
    0.75
    """
    weights, pair = config.quantize_weights, config.quantize_gradients
    gather = weights.bits / 16 if isinstance(weights, QuantFormat) else 1.0
    reduce = pair[1].bits / 16 if isinstance(pair, tuple) and isinstance(pair[1], QuantFormat) else 1.0
    if config.stage < 3:
        return 1.0 + reduce
    if isinstance(config.weight_deltas, QuantFormat) and two_level:
        return config.weight_deltas.bits / 16 + reduce
    backward = 0.0 if config.secondary and two_level else gather
    return gather + backward + reduce


def secondary_bytes(layout: Layout, uses: Sequence[tuple[LeafUse, ...]] | None = None) -> int:
    """Bytes of the node-local secondary partition that each device keeps from forward to backward (hpZ).

    Args:
        layout: the layout.
        uses: as for `predict_traffic`.
    """
    if layout.stage < 3 or not has_secondary(layout):
        return 0
    if uses is None:
        uses = [(LeafUse(p.dtype),) for p in layout.leaves]
    sizes, gather_bytes = layout.mesh.shape, layout_collectives(layout).gather_bytes
    total = 0
    for placement, of_leaf in zip(layout.leaves, uses, strict=True):
        for use in () if travels_by_deltas(placement, of_leaf, layout) else of_leaf:
            part, layers = _layer(_own_part(placement, layout).with_dtype(use.dtype), use, layout)
            if part.is_sharded:
                # Over the last axis a gather receives (size - 1) times what is held, and that is the secondary.
                last = part.axes[-1:]
                total += layers * gather_bytes(part, sizes)[last] // (sizes[last[0]] - 1)
    return total


class _LeafTraffic:
    """The moves of one leaf."""

    def __init__(self, layout: Layout, placement: Placement, microbatches: int, num_nodes: int) -> None:
        self.layout, self.placement, self.microbatches = layout, placement, microbatches
        self.sizes = dict(layout.mesh.shape)
        self.num_nodes = num_nodes
        self.collectives = layout_collectives(layout)

    def moves(self, uses: Sequence[LeafUse]) -> list[Traffic]:
        p, stage = self.placement, self.layout.stage
        found: list[Traffic] = []
        if not p.axes:  # one device
            return found
        by_deltas = travels_by_deltas(p, uses, self.layout)
        if by_deltas and p.trainable:
            found += self._changes(uses)
        for use in uses:
            if stage >= 3 and p.is_sharded:
                found += [move for move in self._gathers(use) if not by_deltas or move.axes == p.axes[-1:]]
            if p.trainable and stage >= 2 and p.is_sharded:
                found += self._reductions(use, p.with_dtype(use.dtype), self.microbatches)
        if not p.trainable:
            return found
        once = LeafUse(p.dtype)
        if stage == 0 or not p.is_sharded:
            # Full gradients, summed over microbatches first.
            found += self._reductions(once, dataclasses.replace(p, dim=None, padding=0), 1)
        else:
            if stage == 1:
                found += self._reductions(once, p, 1)
            if stage < 3:
                for axes, received in gather_bytes(p, self.sizes).items():
                    found.append(self._move("update", "all-gather", axes, p.dtype.name, False, received, 1))
        return found

    def _changes(self, uses: Sequence[LeafUse]) -> list[Traffic]:
        """The change of a replica, once a step: read and written where it is quantised and where it is added.

        In a loop over layers that of the last one travels twice.
        """
        p, fmt, times = self.placement, self.layout.config.weight_deltas, 1
        if by_layer := self.microbatches == 1 and can_change_by_layer(p, uses, self.layout):
            p, times = p.without_leading_dim(), p.shape[0] + 1
        received = weight_deltas(self.layout).update_bytes(p, self.sizes)
        return [
            self._move("forward", "all-gather", axes, _wire_name(fmt, p.dtype), by_layer, times * size, times,
                       2 * times * size)
            for axes, size in received.items()
        ]  # fmt: skip

    def _gathers(self, use: LeafUse) -> list[Traffic]:
        part, layers = _layer(self.placement.with_dtype(use.dtype), use, self.layout)
        config = self.layout.config
        by_axes = self.collectives.gather_bytes(part, self.sizes)
        quantized = config.quantize_weights if part.is_quantized else None
        name = _wire_name(quantized, use.dtype)
        has_held = has_secondary(self.layout)
        # Levels are read and floats written for the full leaf, the reverse for the shard.
        first = next(iter(by_axes))
        message = by_axes[first] // (math.prod(self.sizes[axis] for axis in first) - 1)
        passes = (part.shard_bytes + message) * (part.num_shards + 1) if quantized else 0
        found, in_loop = [], layers * use.repeats > 1
        for phase in ("forward", "backward") if use.in_backward else ("forward",):
            for axes, received in by_axes.items():
                last = axes[-1] == part.axes[-1]
                if has_held and phase == "backward" and not last:
                    continue
                # A secondary partition is made once, for all microbatches.
                times = layers * use.repeats * (1 if has_held and not last else self.microbatches)
                spent = passes * layers * use.repeats * self.microbatches if last else 0
                found.append(self._move(phase, "all-gather", axes, name, in_loop, received * times, times, spent))
        return found

    def _reductions(self, use: LeafUse, placement: Placement, times: int) -> list[Traffic]:
        part, layers = _layer(placement, use, self.layout)
        config = self.layout.config
        pair = config.quantize_gradients if part.is_quantized else None
        plain = jnp.dtype(config.grad_dtype) if config.grad_dtype else part.dtype
        by_axes = self.collectives.reduce_bytes(part, self.sizes)
        # Reduced where it arises, or full gradients after the backward pass.
        phase = "backward" if self.layout.stage >= 2 and part.is_sharded else "update"
        kind = "all-to-all" if pair else "reduce-scatter" if part.is_sharded else "all-reduce"
        found = []
        for axes, received in by_axes.items():
            fmt = None if not isinstance(pair, tuple) else pair[1] if axes == config.axes[:1] else pair[0]
            passes = 0
            if isinstance(fmt, QuantFormat):
                (axis,) = axes
                sent = received * self.sizes[axis] // (self.sizes[axis] - 1)
                first_hop = axes == part.axes[-1:]
                # Written, sent, read again; the gradient is read before the first hop, the shard written at the end.
                shard = 4 * math.prod(part.shard_shape)
                passes = 2 * sent + (part.shard_bytes * part.num_shards if first_hop else shard)
            count = layers * times * use.repeats
            found.append(
                self._move(phase, kind, axes, _wire_name(fmt, plain), count > 1, received * count, count,
                           passes * count)
            )  # fmt: skip
        return found

    def _move(
        self, phase: str, kind: str, axes: tuple[str, ...], dtype: str, in_loop: bool, received: int, executions: int,
        passes: int = 0,
    ) -> Traffic:  # fmt: skip
        entering = round(received * node_share(kind, axes, tuple(self.sizes.items()), self.num_nodes))
        return Traffic(
            phase, kind, axes, (dtype,), in_loop, "", executions, received, entering, pass_bytes=passes,
            path=self.placement.path,
        )  # fmt: skip


def _layer(placement: Placement, use: LeafUse, layout: Layout) -> tuple[Placement, int]:
    """What moves at once, and how many times: a layer of a scanned stack; small stacks move in full, unquantised."""
    if use.layers == 1 or not placement.shape or placement.shape[0] != use.layers or placement.dim == 0:
        return placement, 1
    if math.prod(placement.shape[1:]) < layout.config.min_shard_size:
        return placement.unquantized(), 1
    return placement.without_leading_dim(), use.layers


def _own_part(placement: Placement, layout: Layout) -> Placement:
    """The leaf cut down to one device's part along the mesh axes that are not data axes."""

    def part(extent: int, entry: str | tuple[str, ...] | None) -> int:
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        return extent // math.prod(layout.mesh.shape[name] for name in names)

    shape = tuple(map(part, placement.shape, placement.spec))
    return dataclasses.replace(placement, shape=shape)


def _wire_name(fmt: object, dtype: np.dtype) -> str:
    if isinstance(fmt, QuantFormat):
        return fmt.element
    return dtype.name


_NAMES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "s8": "int8", "u8": "uint8", "u16": "uint16"}
# Differences below this share of the traffic are padding of quantisation blocks and shards, scalars and metrics.
_NOTABLE = 0.01


def program_streams(program: CompiledProgram) -> tuple[Traffic, ...]:
    """The rows of a compiled program; what is neither forward nor backward is the update and the metrics."""
    return _ordered(
        dataclasses.replace(
            row,
            phase="update" if row.phase == "other" else row.phase,
            dtypes=tuple(_NAMES.get(d, d) for d in row.dtypes),
        )
        for row in program.traffic()
    )


def predicted_streams(moves: Sequence[Traffic]) -> tuple[Traffic, ...]:
    """The rows of a prediction: those of one sort together."""
    sorts: dict[tuple[str, str, tuple[str, ...], tuple[str, ...], bool, str], list[Traffic]] = {}
    for move in moves:
        sort = (move.phase, move.kind, move.axes, move.dtypes, move.in_loop, move.mode)
        sorts.setdefault(sort, []).append(move)
    return _ordered(
        Traffic(
            *sort, sum(m.executions for m in group), sum(m.received_bytes for m in group),
            sum(m.node_bytes for m in group), pass_bytes=sum(m.pass_bytes for m in group),
        )
        for sort, group in sorts.items()
    )  # fmt: skip


def explain_traffic(moves: Sequence[Traffic], streams: Sequence[Traffic]) -> str:
    """Where compiled and predicted traffic differ, in bytes into a device."""
    predicted, found = _by_sort(moves), _by_sort(streams)
    total = sum(predicted.values())
    parts = []
    for sort in sorted(predicted.keys() | found.keys()):
        more = found.get(sort, 0) - predicted.get(sort, 0)
        if abs(more) > _NOTABLE * max(total, 1):
            parts.append(f"{' '.join(sort)}: {more / 1e9:+.3g} GB{_reason(sort, more)}")
    if not parts:
        return f"prediction and program agree within {_NOTABLE:.0%} in every phase"
    return "the program differs from the prediction: " + "; ".join(parts)


def _reason(sort: tuple[str, str], more: int) -> str:
    phase, kind = sort
    if phase == "update" and kind == "all-gather":
        return " (the updated parameters travel in another dtype than stored, or stay sharded)"
    if kind == "all-gather" and more > 0:
        return " (a weight is gathered once for each use, or activations are gathered)"
    if kind == "all-gather":
        return " (the compiler shares a gather between uses)"
    if kind in ("all-reduce", "reduce-scatter"):
        return " (the compiler chose another reduction, or reduces in another phase or dtype)"
    return ""


def _by_sort(rows: Iterable[Traffic]) -> dict[tuple[str, str], int]:
    sums: dict[tuple[str, str], int] = {}
    for row in rows:
        sums[row.phase, row.kind] = sums.get((row.phase, row.kind), 0) + row.received_bytes
    return sums


def _ordered(rows: Iterable[Traffic]) -> tuple[Traffic, ...]:
    phases = ("forward", "backward", "update")
    return tuple(sorted(rows, key=lambda row: (phases.index(row.phase), -row.received_bytes)))
