"""What a configuration cannot do on the mesh and leaves at hand, in words: no technique is ignored in silence.

A combination that can never take effect is refused by `ZeroConfig` itself. What depends on the mesh (a single node, one
device a node) or on the shapes must not stop a script that also runs elsewhere: it becomes a `ZeroNotice`, warned once
by `partition` and listed by `Layout.describe`. Reads a layout and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.sharding import Mesh

from zerojax.config import QuantFormat, ZeroConfig
from zerojax.layout.placement import Placement


class ZeroNotice(UserWarning):
    """A technique of the configuration has no or less effect on this mesh or model; the message says which and why.

    >>> import warnings
    >>> warnings.simplefilter("error", ZeroNotice)  # for a job that must run as it is configured or not at all
    """


def notices(mesh: Mesh, config: ZeroConfig, leaves: Sequence[Placement]) -> list[str]:
    """One sentence for each thing that the configuration asks for and this mesh or model cannot give.

    >>> import jax
    >>> mesh = Mesh([[d] for d in jax.devices()[:2]], ("node", "local"))
    >>> notices(mesh, ZeroConfig(secondary=True), [])[0]
    "secondary has no effect: axis 'local' has one device, and a secondary partition would be the full weight"
    """
    out: list[str] = []
    if leaves and not any(p.trainable for p in leaves):
        out.append("no leaf is trained: `trainable` chose none of the key paths, such as " + leaves[0].path)
    narrow = [axis for axis in config.axes if mesh.shape[axis] == 1]
    if math.prod(mesh.shape[axis] for axis in config.axes) == 1:
        if config.stage:
            out.append(
                f"stage {config.stage} has no effect: the data axes {config.axes} have one device; to try it without "
                "more of them, call zerojax.simulate_devices(8) first"
            )
        return out
    if config.secondary and narrow:
        why = (
            "there is one node, and the shards are inside it already"
            if narrow[0] == config.axes[0]
            else "and a secondary partition would be the full weight"
        )
        out.append(f"secondary has no effect: axis {narrow[0]!r} has one device, {why}")
    if config.weight_deltas is not None and narrow:
        out.append(f"weight_deltas has no effect: axis {narrow[0]!r} has one device, so there is nothing to remember")
    if config.quantize_gradients and (narrow or len(config.axes) == 1):
        wide = next(axis for axis in config.axes if mesh.shape[axis] > 1)
        kind = "between nodes" if wide == config.axes[0] else "inside the node"
        out.append(f"quantize_gradients reduces in a single hop over {wide!r}, in the format for {kind}")
    if config.error_feedback and narrow:
        out.append(f"error_feedback has no effect: axis {narrow[0]!r} has one device, so there is no hop between nodes")
    for field, formats in (("quantize_weights", [config.quantize_weights]),
                           ("weight_deltas", [config.weight_deltas]),
                           ("quantize_gradients", list(config.quantize_gradients or ()))):  # type: ignore[arg-type]  # fmt: skip
        largest = max((f.block_size for f in formats if isinstance(f, QuantFormat)), default=0)
        small = [p for p in leaves if p.is_quantized and math.prod(p.shard_shape) < largest]
        if small:
            out.append(
                f"{field} has blocks of {largest} elements, more than the shard of {len(small)} leaves "
                f"({small[0].path} has {math.prod(small[0].shard_shape)}): padding is sent; raise min_quantize_size"
            )
    asked = config.quantize_weights or config.quantize_gradients or config.weight_deltas
    if asked and leaves and not any(p.is_quantized for p in leaves):
        out.append(
            f"no leaf is quantised: none has two dims, is sharded and has min_quantize_size {config.min_quantize_size} "
            "elements"
        )
    return out
