"""What all processes of a job must have in common before they train under a layout.

Each fact is a short text or a digest; `zerojax.hosts.agreement` compares them. Another seed on one host trains to
nonsense with equal losses, since every replica of a parameter must be the same: so values are compared too, by a
checksum of what each process holds of the leaves that are replicated.
"""

from __future__ import annotations

from typing import Any

import jax

from zerojax import _compat
from zerojax.hosts.agreement import agree, digest
from zerojax.layout.checksums import checksums
from zerojax.layout.host_arrays import is_of_several_processes
from zerojax.layout.layout import Layout

Tree = Any


def layout_facts(layout: Layout) -> dict[str, Any]:
    """What must be equal in all processes that work under a layout, by name.

    >>> import jax.numpy as jnp, zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> layout_facts(zerojax.partition({"w": jnp.ones((16, 4))}, mesh))["mesh"]
    {'node': 2, 'local': 4}
    """
    return {
        "library versions": _compat.versions(),
        "ZeroConfig": layout.config,
        "mesh": dict(layout.mesh.shape),
        "devices of the mesh": digest([d.id for d in layout.mesh.devices.flat]),
        "parameters": digest([(p.path, p.shape, p.dtype.name, p.dim, p.padding, p.spec, p.trainable)
                              for p in layout.leaves]),
    }  # fmt: skip


def check_replicas(params: Tree, layout: Layout, what: str) -> None:
    """In a job of several processes, compares layout and replicated values; with traced values nothing is done.

    Raises:
        ValueError: the processes differ; the first leaf that does is named.
    """
    leaves = jax.tree.leaves(params)
    if not is_of_several_processes(layout.mesh) or not all(isinstance(x, jax.Array) for x in leaves):
        return
    if any(_compat.is_traced(x) for x in leaves):
        return
    held = {
        p.path: x.addressable_data(0)
        for x, p in zip(leaves, layout.leaves, strict=True)
        if x.is_fully_replicated and x.size
    }
    sums = dict(zip(held, checksums(list(held.values())), strict=True))
    agree(what, layout_facts(layout) | {"the values of replicated parameters (another seed?)": digest(sums)})
