"""Arrays of this process, and arrays of the whole job: from one to the other without sending what is already there.

`jax.device_put` of a host array to a sharding over several processes sends the full array to every one of them, to
compare it, and on some versions returns a malformed array where each process has one device. Every process holds the
value here: each device takes its part of it, and nothing is sent but a checksum.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax.hosts.agreement import agree
from zerojax.layout.placement import zero_padded

Tree = Any
_agreed: set[str] = set()


@functools.lru_cache(maxsize=64)
def is_of_several_processes(mesh: Any) -> bool:
    """Whether the mesh spans several processes of this job (not devices that are only described)."""
    if not isinstance(mesh, Mesh) or jax.process_count() == 1:
        return False
    return len({d.process_index for d in mesh.devices.flat}) > 1 and mesh.devices.flat[0] in jax.devices()


def place_in_full(x: Any, sharding: NamedSharding | None) -> jax.Array:
    """Places a value that every process holds in full (host array, or array on its own devices).

    Args:
        x: the value, or an array of the whole job, which is moved.
        sharding: where it goes; None leaves it where JAX puts it.

    >>> import zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> place_in_full(np.arange(8), NamedSharding(mesh, PartitionSpec("local"))).shape
    (8,)
    """
    if sharding is None or sharding.is_fully_addressable or _compat.is_traced(x):
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.jit(lambda x: x, out_shardings=sharding)(x)
    if _compat.is_prng_key(x):
        return jax.random.wrap_key_data(place_in_full(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    host = np.asarray(x)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def place_slices(source: np.ndarray, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.Array:
    """An array of which every device reads its slice of a source (a mapped file) alone; longer is filled with zeros."""

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "a device of this process has a part"
        part = np.asarray(source[index]).astype(dtype)
        wanted = [len(range(n)[i]) for n, i in zip(shape, index, strict=True)]
        missing = [(0, n - m) for n, m in zip(wanted, part.shape, strict=True)]
        return zero_padded(part, missing) if any(after for _, after in missing) else part

    return jax.make_array_from_callback(shape, sharding, read)


def check_same_values(what: str, tree: Tree) -> None:
    """In a job of several processes, refuses values of this process that are others on another one.

    Arrays of the whole job are left out: they are one value by construction.

    Raises:
        ValueError: they differ; the leaf is named.
    """
    if jax.process_count() == 1:
        return
    facts = {}
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            continue
        host = np.asarray(jax.random.key_data(x) if _compat.is_prng_key(x) else x)
        facts[f"{jax.tree_util.keystr(path) or 'value'} (another seed?)"] = f"{host.shape} {_sum(host)}"
    agree(what, facts)


def _sum(x: np.ndarray) -> str:
    """A checksum at the speed of memory: the sum of the bytes as 64-bit words, and how many there are."""
    raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    whole = raw.size // 8 * 8
    total = int(np.sum(raw[:whole].view(np.uint64), dtype=np.uint64)) + int.from_bytes(raw[whole:].tobytes(), "little")
    return f"checksum {total % 2**64:x}"


def spread_batch(local: Tree, mesh: Mesh, axes: tuple[str, ...]) -> Tree:
    """This process's rows of a batch as arrays of the whole job, sharded on their leading dim over the data axes.

    Raises:
        ValueError: the rows do not divide over this process's devices, or other processes have other numbers of them.
    """
    spec = NamedSharding(mesh, PartitionSpec(axes))
    count = math.prod(mesh.shape[axis] for axis in axes)
    if is_of_several_processes(mesh):
        owners = mesh.devices.transpose([mesh.axis_names.index(a) for a in (*axes, *_others(mesh, axes))])
        rows = owners.reshape(count, -1)
        mine = jax.process_index()
        parts = sum(any(d.process_index == mine for d in row) for row in rows)
    else:
        parts = count
    shapes = {}
    for path, x in jax.tree_util.tree_flatten_with_path(local)[0]:
        name, shape = f"batch{jax.tree_util.keystr(path)}", tuple(jnp.shape(x))
        shapes[name] = f"{shape} {getattr(x, 'dtype', type(x).__name__)}"
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            raise ValueError(f"layout.batch: {name} is an array of the whole job already; pass it to the step as it is")
        if shape and (shape[0] % parts or not shape[0]):
            raise ValueError(
                f"layout.batch: {name} has shape {shape}: this process's {shape[0]} rows must be a positive multiple "
                f"of its {parts} parts of the data axes {axes}"
            )
    if (seen := f"{shapes} {dict(mesh.shape)}") not in _agreed:
        agree("layout.batch", shapes)
        _agreed.add(seen)

    def place(x: Any) -> jax.Array:
        if not jnp.shape(x):
            return place_in_full(x, NamedSharding(mesh, PartitionSpec()))
        if _compat.is_prng_key(x):
            return jax.random.wrap_key_data(place(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        if parts == count:
            return jax.device_put(x, spec)
        host = np.asarray(x)
        host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
        shape = (host.shape[0] // parts * count, *host.shape[1:])
        return jax.make_array_from_process_local_data(spec, host, shape)

    return jax.tree.map(place, local)


def check_of_the_job(name: str, x: Any, mesh: Mesh) -> None:
    """Refuses a leaf of a batch that each process holds for itself: all but a part of it would be dropped unseen.

    Raises:
        ValueError: it is a host array, an array of this process's devices, or (under `jit`) made from such.
    """
    if not is_of_several_processes(mesh) or not jnp.shape(x):
        return
    if _compat.is_traced(x):
        local = jax.typeof(x).sharding.mesh.empty
    elif isinstance(x, jax.ShapeDtypeStruct):
        local = False
    else:
        local = not isinstance(x, jax.Array) or x.is_fully_addressable
    if local:
        raise ValueError(
            f"{name} {jnp.shape(x)} is an array of this process in a job of {jax.process_count()}, of which only the "
            "part of its own devices would be used: pass each process its own rows, as layout.batch(rows). For a batch "
            "made inside jit: jax.lax.with_sharding_constraint(batch, NamedSharding(layout.mesh, PartitionSpec()))"
        )


def _others(mesh: Mesh, axes: tuple[str, ...]) -> list[str]:
    return [name for name in mesh.axis_names if name not in axes]
