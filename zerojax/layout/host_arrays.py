"""Arrays of this process, and arrays of the whole job: from one to the other without sending what is already there.

`jax.device_put` of a host array to a sharding over several processes sends the whole array to every one of them, to
compare it, and on some versions returns a malformed array where each process has one device. Every process holds the
value here: each device takes its part of it, and nothing is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from zerojax import _compat
from zerojax.hosts.agreement import digest

if TYPE_CHECKING:
    from zerojax.layout.layout import Layout


def place_whole(x: Any, sharding: NamedSharding | None) -> jax.Array:
    """Places a value that every process holds whole (host array, or array on its own devices).

    Args:
        x: the value, or an array of the whole job, which is moved.
        sharding: where it goes; None leaves it where JAX puts it.

    >>> import jax.numpy as jnp, zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> place_whole(np.arange(8), NamedSharding(mesh, jax.sharding.PartitionSpec("local"))).shape
    (8,)
    """
    spread = sharding is not None and not sharding.is_fully_addressable
    if not spread or _compat.is_traced(x):
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.jit(lambda x: x, out_shardings=sharding)(x)
    if _compat.is_prng_key(x):
        return jax.random.wrap_key_data(place_whole(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    host = np.asarray(x)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def layout_facts(layout: Layout) -> dict[str, Any]:
    """What must be equal in all processes that work under a layout, by name."""
    return {
        "library versions": _compat.versions(),
        "ZeroConfig": layout.config,
        "mesh": dict(layout.mesh.shape),
        "devices of the mesh": digest([d.id for d in layout.mesh.devices.flat]),
        "parameters": digest([(p.path, p.shape, p.dtype.name, p.dim, p.padding, p.spec, p.trainable)
                              for p in layout.leaves]),
    }  # fmt: skip
