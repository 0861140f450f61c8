"""A layout in words: its first line, what is sharded and why, and the table that a notebook shows.

Reads placements and changes nothing.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from jax.sharding import Mesh

from zerojax.config import ZeroConfig
from zerojax.layout.mesh import gathers_in_one_hop, nontrivial_axes
from zerojax.layout.notices import notices
from zerojax.layout.placement import Placement


def first_line(mesh: Mesh, config: ZeroConfig, num_shards: int) -> str:
    """Stage, mesh and number of shards."""
    sizes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"stage {config.stage} on mesh {sizes}: {num_shards} shards over {config.axes}"


def describe(
    mesh: Mesh, config: ZeroConfig, leaves: Sequence[Placement], num_shards: int, *, every_leaf: bool = False
) -> str:
    """See `Layout.describe`."""
    sharded = [p for p in leaves if p.is_sharded]
    replicated = [p for p in leaves if not p.is_sharded]
    lines = [first_line(mesh, config, num_shards)]
    for name, group in (("sharded", sharded), ("replicated", replicated)):
        total, each = sum(p.full_bytes for p in group), sum(p.shard_bytes for p in group)
        lines.append(f"{name:<10} {len(group):>2} leaves {total:>14,} bytes, {each:>14,} on each device")
    for p in replicated:
        lines.append(f"  {p.path} {p.shape} {p.dtype.name}: replicated, {p.full_bytes:,} bytes: {p.reason}")
    for p in sharded:
        if p.padding:
            waste = p.shard_bytes * p.num_shards - p.full_bytes
            lines.append(f"  {p.path} {p.shape} {p.dtype.name}: {p.reason}, {waste:,} bytes in all")
        elif every_leaf:
            lines.append(f"  {p.path} {p.shape} {p.dtype.name}: {p.shard_bytes:,} bytes on each device: {p.reason}")
    if config.stage >= 3 and len(axes := nontrivial_axes(mesh, config.axes)) == 2 and sharded:
        in_one = gathers_in_one_hop(mesh, config)
        how = "in one message over both axes" if in_one else f"over {axes[0]}, then {axes[1]}"
        quantized = " (quantised ones axis by axis)" if config.quantize_weights and in_one else ""
        lines.append(f"weights are gathered {how}{quantized}; gradients are reduced over {axes[1]}, then {axes[0]}")
    if config.weight_deltas is not None:
        kept = [(math.prod(p.padded_shape), dtype) for p in leaves if (dtype := p.replica_dtype) is not None]
        held = sum(size * dtype.itemsize for size, dtype in kept) // mesh.shape[config.axes[-1]]
        lines.append(f"replicas   {len(kept):>2} leaves {config.weight_deltas} changes, {held:>14,} on each device")
    frozen = [p.path for p in leaves if not p.trainable]
    if frozen:
        lines.append(f"  not trained: {', '.join(frozen)}")
    lines += [f"  notice: {text}" for text in notices(mesh, config, leaves)]
    return "\n".join(lines)


def html_table(mesh: Mesh, config: ZeroConfig, leaves: Sequence[Placement], num_shards: int) -> str:
    """One row for each leaf: key path, shape, dtype, what a device holds, its bytes there, and why."""

    def row(cells: Sequence[object], tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(x))}</{tag}>" for x in cells) + "</tr>"

    rows = [row(["leaf", "shape", "dtype", "on each device", "bytes there", "trained", "why"], "th")]
    rows += [
        row([p.path, p.shape, p.dtype.name, p.shard_shape, f"{p.shard_bytes:,}", "yes" if p.trainable else "no",
             p.reason if p.is_sharded else f"replicated: {p.reason}"])
        for p in leaves
    ]  # fmt: skip
    remarks = "".join(f"<p>notice: {html.escape(text)}</p>" for text in notices(mesh, config, leaves))
    caption = html.escape(first_line(mesh, config, num_shards))
    return f"<table><caption>{caption}</caption>{''.join(rows)}</table>{remarks}"
