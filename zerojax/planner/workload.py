"""What a plan is made from, checked: workload, cluster, shapes, one device's batch, and where the loss uses what.

Everything a user can get wrong is refused here, in one line, before anything is compiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType

from zerojax import _compat
from zerojax.gather.flops import traced_flops
from zerojax.gather.uses import LeafUse, leaf_uses
from zerojax.planner.gpus import GpuTarget, PluginMissing, check_plugin, load_target, target_mesh

Tree = Any


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is planned: a loss, an optimizer, and shapes.

    Attributes:
        loss_fn: as for `zerojax.value_and_grad`.
        params: pytree of `jax.ShapeDtypeStruct`: logical shapes of the parameters.
        batch: pytree of `jax.ShapeDtypeStruct`: the batch of one step, all devices and microbatches together. A
            sharding with `memory_kind="pinned_host"` says that a leaf waits in host memory; no more of it is read.
        tx: an optax transformation, not wrapped by `zerojax.zero`.
        rest: shapes of the further arguments of the loss; in host memory as in `batch`.
        has_aux: as for `zerojax.value_and_grad`.
        weighted: as for `zerojax.value_and_grad`.
        specs: as for `zerojax.partition`.
        trainable: as for `zerojax.partition`.
        name: for people.
        fused: scopes (`jax.named_scope`) in the loss that stand for one fused kernel, and the share of their FLOP that
            it computes; None: "flash_attention", half of it, as of a causal attention
            (`zerojax.planner.replay.FUSED`). What lies between their operations takes neither time nor memory; what
            the backward pass keeps of it does, unless `jax.checkpoint` is around it, as no fused kernel keeps it.
    """

    loss_fn: Callable[..., Any]
    params: Tree
    batch: Tree
    tx: optax.GradientTransformation
    rest: tuple[Any, ...] = ()
    has_aux: bool = False
    weighted: bool = False
    specs: Tree | None = None
    trainable: Any = None
    name: str = "model"
    fused: Mapping[str, float] | None = None

    @property
    def tokens_per_example(self) -> int | None:
        """Entries of the largest integer leaf of the batch per example; None where there is none of two dims."""
        leaves = [x for x in jax.tree.leaves(self.batch) if len(x.shape) > 1 and jnp.issubdtype(x.dtype, jnp.integer)]
        return max((math.prod(x.shape[1:]) for x in leaves), default=None)

    def with_examples(self, examples: int, name: str | None = None) -> Workload:
        """The same with a batch of so many examples in all (the leading dim of every leaf that has one)."""
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (examples, *x.shape[1:]) if x.shape else (), x.dtype, sharding=x.sharding if is_offloaded(x) else None
            ),
            self.batch,
        )
        return dataclasses.replace(self, batch=batch, name=name or self.name)


def is_offloaded(x: jax.ShapeDtypeStruct) -> bool:
    """Whether the sharding of an argument's shape says that it waits in pinned host memory."""
    return getattr(x.sharding, "memory_kind", None) == "pinned_host"


def without_sharding(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The shape alone."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


# What is planned for where nothing is said: 384 GPUs, as in the ZeRO++ paper (arXiv 2306.10209, section 4).
NUM_NODES, DEVICES_PER_NODE = 48, 8


class Cluster(NamedTuple):
    """What is planned for: the GPUs, and how they are joined."""

    target: GpuTarget
    num_nodes: int
    devices_per_node: int
    extra_axes: Mapping[str, int]

    @property
    def num_devices(self) -> int:
        """All GPUs."""
        return self.num_nodes * self.devices_per_node

    def mesh(self, axes: tuple[str, ...], *, absent: bool) -> Any:
        """A mesh with these data axes and the extra axes: of target GPUs to compile for, or abstract."""
        inner = math.prod(self.extra_axes.values())
        local = self.devices_per_node // inner
        data = (self.num_nodes, local) if len(axes) == 2 else (self.num_nodes * local,)
        names, sizes = (*axes, *self.extra_axes), (*data, *self.extra_axes.values())
        if absent:
            if axes[0] != "node" and "node" in names:
                raise ValueError(f"axis 'node' must be the first data axis, got axes {names}")
            return target_mesh(self.target, self.num_nodes, self.devices_per_node, names, shape=sizes)
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


class Traced(NamedTuple):
    """What the traced loss says of one device's microbatch.

    Attributes:
        uses: how the loss uses each parameter, from `zerojax.gather.uses`.
        flops: of forward and backward, recomputation too.
        model_flops: the same without recomputation.
        fused: which of the scopes that stand for a fused kernel are in it.
    """

    uses: list[tuple[LeafUse, ...]]
    flops: int
    model_flops: int
    fused: tuple[str, ...]


def trace_workload(workload: Workload, examples: int, scopes: Iterable[str] = ()) -> Traced:
    """Traces the loss on one device's microbatch.

    Args:
        workload: the loss and its shapes.
        examples: in the microbatch.
        scopes: names to look for in JAX's name stack.
    """
    shapes = (workload.params, workload.with_examples(examples).batch, workload.rest)
    shapes = jax.tree.map(without_sharding, shapes)
    try:
        jaxpr = jax.make_jaxpr(lambda p, b, r: workload.loss_fn(p, b, *r))(*shapes)
    except Exception as error:
        first = (str(error).strip() or repr(error)).splitlines()[0]
        raise ValueError(f"the loss cannot be traced with these shapes: {type(error).__name__}: {first}") from error
    uses = leaf_uses(jaxpr, len(jax.tree.leaves(workload.params)))
    stacks = set(_name_stacks(jaxpr.jaxpr))
    found = tuple(scope for scope in scopes if any(scope in stack for stack in stacks))
    return Traced(uses, traced_flops(jaxpr), traced_flops(jaxpr, recomputed=False), found)


def _name_stacks(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield str(eqn.source_info.name_stack)
        for inner in _compat.sub_jaxprs(eqn):
            yield from _name_stacks(inner)


def make_cluster(target: str | GpuTarget, num_nodes: int, devices_per_node: int, extra: Mapping[str, int]) -> Cluster:
    """The cluster, its numbers checked and its GPU found."""
    for field, value in (("num_nodes", num_nodes), ("devices_per_node", devices_per_node), *extra.items()):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"plan({field}={value!r}): a positive integer is required")
    inner = math.prod(extra.values())
    if devices_per_node % inner:
        raise ValueError(f"plan(extra_axes={dict(extra)}): {devices_per_node} devices per node must divide by {inner}")
    return Cluster(target if isinstance(target, GpuTarget) else load_target(target), num_nodes, devices_per_node, extra)


def lacking_compiler(compiles: bool | None) -> str:
    """What the plan will lack; empty when it compiles."""
    if compiles is False:
        return "planned from placements alone (compiles=False): no activations, no schedule"
    try:
        check_plugin()
    except PluginMissing as error:
        if compiles:
            raise
        return f"planned from placements alone, without activations and schedule: {error}"
    return ""


def sized_workload(workload: Workload, examples: int | None, replicas: int, microbatches: int) -> tuple[Workload, int]:
    """The workload with its global batch, and the examples of one device's microbatch."""
    count = replicas * microbatches
    for field, value in (("examples_per_device", examples), ("microbatches", microbatches)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"plan({field}={value!r}): a positive integer is required")
    if examples is None:
        leading = {x.shape[0] for x in jax.tree.leaves(workload.batch) if x.shape}
        if len(leading) != 1 or (size := leading.pop()) % count or not size:
            raise ValueError(
                f"batch_shapes: the leading dim {sorted(leading) or size} must be one positive multiple of {replicas} "
                f"data-parallel devices x {microbatches} microbatches; or pass examples_per_device"
            )
        return workload, size // count
    return workload.with_examples(examples * count), examples


def shapes_of(tree: Tree, what: str) -> Tree:
    """A pytree of arrays or shapes as shapes; the shardings of shapes, and of arrays in host memory, are kept."""

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        found = jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x), sharding=sharding)
        return found if is_offloaded(found) else without_sharding(found)

    try:
        return jax.tree.map(shape_of, tree)
    except TypeError as error:
        raise ValueError(f"plan({what}=...) must hold arrays or jax.ShapeDtypeStructs: {error}") from error
