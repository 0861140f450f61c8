"""What the machines at hand move: bytes per second of each collective over each axis of a mesh, and to the host.

A collective is timed as the training step uses it, all groups of the axis at once: over "node" all devices of a node
share its network. Values are checked: sums of small integers are exact in float32. Every process of a job measures the
same things in the same order.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec, Sharding, SingleDeviceSharding

ROUNDS = 5
SIZES_ON_GPU = (1 << 20, 16 << 20, 256 << 20)
SIZES_ON_CPU = (1 << 14, 1 << 20)
_PERIOD = 251
"""Values repeat after this many elements: prime, so that a slice in a wrong place shows."""


@dataclasses.dataclass(frozen=True)
class Rate:
    """One collective over one axis.

    Attributes:
        kind: "all-gather", "reduce-scatter" or "all-to-all".
        axis: of the mesh.
        size: bytes of the full array on a device: what a gather gives, what the others take.
        seconds: of the fastest round.
        bytes_per_second: received by one device.
        is_right: whether every device holds the values it should.
    """

    kind: str
    axis: str
    size: int
    seconds: float
    bytes_per_second: float
    is_right: bool


def _pattern(start: jax.Array | int, length: int) -> jax.Array:
    return ((start + jnp.arange(length)) % _PERIOD).astype(jnp.float32)


def _factors(devices: int) -> jax.Array:
    """What each device's values are multiplied by: small, so that sums over thousands of devices stay exact."""
    return (jnp.arange(devices) % 7 + 1).astype(jnp.float32)


Values = Callable[[jax.Array], jax.Array]


def _moves(kind: str, axis: str, length: int, devices: int) -> tuple[Values, int, Values]:
    """The collective of ``[n]`` float32, its n, and what it should give, by the device's index along the axis."""
    part = length // devices

    def from_each(start: jax.Array | int) -> jax.Array:
        return jnp.repeat(_factors(devices), part) * jnp.tile(_pattern(start, part), devices)

    if kind == "all-gather":
        return functools.partial(lax.all_gather, axis_name=axis, tiled=True), part, lambda i: from_each(0)
    if kind == "reduce-scatter":
        scatter = functools.partial(lax.psum_scatter, axis_name=axis, tiled=True)
        return scatter, length, lambda i: _pattern(i * part, part) * _factors(devices).sum()
    exchange = functools.partial(lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0, tiled=True)
    return exchange, length, lambda i: from_each(i * part)


KINDS = ("all-gather", "reduce-scatter", "all-to-all")


def measure_collective(mesh: Mesh, axis: str, kind: str, size: int) -> Rate:
    """Times one collective over one axis and checks what it gives.

    Args:
        mesh: all of its devices take part, in groups along the axis.
        axis: with more than one device.
        kind: see `KINDS`.
        size: bytes of the full array on each device, rounded up to whole elements for each.

    >>> import jax
    >>> mesh = jax.make_mesh((2, 2), ("node", "local"), devices=jax.devices()[:4])
    >>> rate = measure_collective(mesh, "local", "reduce-scatter", 4096)
    >>> rate.is_right, rate.size
    (True, 4096)
    """
    devices = mesh.shape[axis]
    length = -(-size // (4 * devices)) * devices
    move, taken, wanted = _moves(kind, axis, length, devices)
    over = PartitionSpec(mesh.axis_names)
    mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    make = mapped(lambda: _factors(devices)[lax.axis_index(axis)] * _pattern(0, taken), in_specs=(), out_specs=over)
    differ = mapped(
        lambda got: lax.psum(jnp.sum(got != wanted(lax.axis_index(axis))), mesh.axis_names),
        in_specs=over, out_specs=PartitionSpec(),
    )  # fmt: skip
    given = jax.jit(make)()
    run = jax.jit(mapped(move, in_specs=over, out_specs=over))
    wrong = int(jax.jit(differ)(run(given)))
    seconds = min(_rounds(run, given))
    received = 4 * length * (devices - 1) / devices
    return Rate(kind, axis, 4 * length, seconds, received / seconds, wrong == 0)


def measure_host(size: int) -> dict[str, float] | None:
    """Bytes per second between the first device of this process and pinned host memory; None where there is none.

    Args:
        size: bytes of the array that is copied there and back.

    Returns:
        By direction: "to_host", "to_device".
    """
    device = jax.local_devices()[0]
    if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        return None
    here, there = (SingleDeviceSharding(device, memory_kind=kind) for kind in (None, "pinned_host"))
    x = jax.device_put(jnp.zeros(max(1, size // 4), jnp.float32), here)
    kept = jax.device_put(x, there)
    directions = {"to_host": (there, x), "to_device": (here, kept)}
    return {
        name: x.nbytes / min(_rounds(functools.partial(_put, to), given)) for name, (to, given) in directions.items()
    }


def _put(to: Sharding, x: jax.Array) -> jax.Array:
    return jax.device_put(x, to)


def _rounds(function: Callable[..., jax.Array], given: jax.Array) -> Iterator[float]:
    jax.block_until_ready(function(given))
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(function(given))
        yield time.perf_counter() - start


def measure_mesh(mesh: Mesh, sizes: Sequence[int] | None = None) -> list[Rate]:
    """Every collective of every size (bytes; None: of large messages) over every axis with more than one device."""
    sizes = sizes or (SIZES_ON_GPU if mesh.devices.flat[0].platform == "gpu" else SIZES_ON_CPU)
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    return [measure_collective(mesh, axis, kind, size) for axis in axes for kind in KINDS for size in sizes]


def best_rate(rates: Sequence[Rate], axis: str) -> float | None:
    """Bytes per second into one device over an axis: the slowest collective at its fastest size; None if none ran."""
    by_kind = [[r.bytes_per_second for r in rates if (r.axis, r.kind) == (axis, kind)] for kind in KINDS]
    return min((max(each) for each in by_kind if each), default=None)
