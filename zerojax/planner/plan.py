"""`plan`: compiles the real step for a cluster that is not at hand, and says what it holds, sends and costs.

The user's own loss and optimizer are laid out, composed into the step that would run, and compiled for GPUs known only
by their data (`zerojax.planner.gpus`); the compiled program is read and replayed, and set beside what the placements
predict.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from zerojax.config import ZeroConfig
from zerojax.optimizer.zero import ShardedTransformation
from zerojax.planner.advice import (
    NICKNAMES,
    decide_by_replays,
    decide_on_technique,
    network_advice,
    plain_config,
    recommend,
    with_technique,
)
from zerojax.planner.configs import ConfigPlanner, Progress
from zerojax.planner.gpus import GpuTarget
from zerojax.planner.records import Plan, Technique
from zerojax.planner.time import machine_links
from zerojax.planner.workload import (
    DEVICES_PER_NODE,
    NUM_NODES,
    Workload,
    lacking_compiler,
    make_cluster,
    shapes_of,
    sized_workload,
)

Tree = Any
# Share of the device memory that is planned with: the rest is CUDA's context, NCCL's buffers and fragmentation.
USABLE = 0.92


def plan(
    loss_fn: Callable[..., Any],
    params_shapes: Tree,
    batch_shapes: Tree,
    tx: optax.GradientTransformation,
    *,
    target: str | GpuTarget = "h100",
    num_nodes: int = NUM_NODES,
    devices_per_node: int = DEVICES_PER_NODE,
    config: ZeroConfig | None = None,
    configs: Sequence[ZeroConfig] | None = None,
    bandwidth: float | str | None = None,
    examples_per_device: int | None = None,
    microbatches: int = 1,
    rest: tuple[Any, ...] = (),
    has_aux: bool = False,
    weighted: bool = False,
    specs: Tree | None = None,
    trainable: Any = None,
    extra_axes: Mapping[str, int] | None = None,
    efficiency: float | None = None,
    usable: float = USABLE,
    compiles: bool | None = None,
    largest_microbatch: bool = True,
    progress: Progress | None = None,
    name: str = "model",
    fused: Mapping[str, float] | None = None,
) -> Plan:
    """Plans training steps, compiled ahead of time for a target cluster: memory, traffic, time, and what to do.

    Args:
        loss_fn: as for `zerojax.value_and_grad`.
        params_shapes: pytree of arrays or `jax.ShapeDtypeStruct`s: logical shapes of the parameters.
        batch_shapes: the same for the global batch of a step; with `examples_per_device` its leading dims do not count.
        tx: any optax transformation; not wrapped by `zerojax.zero`, since every configuration wraps it anew.
        target: a key of `zerojax.planner.gpus.TARGETS`, the path of a `.toml` file, or a `GpuTarget`.
        num_nodes: machines.
        devices_per_node: GPUs in each.
        config: what to plan; `ZeroConfig()` when None and `configs` is None too.
        configs: several, to compare.
        bandwidth: into a node, from all others together: bytes per second, or a text such as "400GB/s" or "3200Gbit/s".
            None: one 400 Gbit/s adapter per GPU.
        examples_per_device: examples in one device's microbatch. None: what `batch_shapes` says.
        microbatches: as for `zerojax.make_train_step`.
        rest: shapes of the further arguments of the loss.
        has_aux: as for `zerojax.value_and_grad`.
        weighted: as for `zerojax.value_and_grad`.
        specs: as for `zerojax.partition`, over `extra_axes`.
        trainable: as for `zerojax.partition`.
        extra_axes: names and sizes of further mesh axes inside a node, left to the compiler.
        efficiency: share of the peak FLOP/s that large matrix products are taken to reach; None: the target's.
        usable: share of the device memory that is planned with.
        compiles: False plans from placements alone, True requires the compiler; None takes it where it is installed.
        largest_microbatch: also find the largest microbatch that fits, by a second compile of each configuration.
        progress: called with (steps done, steps in all, what comes next).
        name: of the model, for people.
        fused: scopes (`jax.named_scope`) in the loss that stand for one fused kernel, and the share of their FLOP that
            it computes; None: "flash_attention", half of it, as of a causal attention.

    Raises:
        ValueError: an unknown target, shapes that cannot be traced or do not divide, a configuration that the mesh
            lacks axes for.
        PluginMissing: `compiles=True` and no CUDA plugin of jaxlib's version.

    >>> import jax.numpy as jnp
    >>> shapes = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)}
    >>> batch = jax.ShapeDtypeStruct((384, 4096), jnp.bfloat16)
    >>> found = plan(lambda p, x: jnp.mean(x @ p["w"]), shapes, batch, optax.adam(1e-3), compiles=False)
    >>> found.configs[0].memory.classes["params"]  # 2 bytes x 4096 x 4224 / 384: padded to divide
    90112
    """
    workload = Workload(
        loss_fn, shapes_of(params_shapes, "params_shapes"), shapes_of(batch_shapes, "batch_shapes"), tx,
        shapes_of(rest, "rest"), has_aux, weighted, specs, trainable, name, fused,
    )  # fmt: skip
    if isinstance(tx, ShardedTransformation):
        raise ValueError("plan(tx=...): pass the optax transformation itself; every configuration wraps it by zero")
    if config is not None and configs is not None:
        raise ValueError("plan(config=..., configs=...): give one of the two")
    wanted = list(configs) if configs is not None else [config or ZeroConfig()]
    if not wanted:
        raise ValueError("plan(configs=[]): at least one configuration is required")
    cluster = make_cluster(target, num_nodes, devices_per_node, extra_axes or {})
    links = machine_links(cluster.target, devices_per_node, bandwidth, efficiency)
    if not 0 < usable <= 1:
        raise ValueError(f"plan(usable={usable}): a share of the device memory is required, above 0 and at most 1")
    lacking = lacking_compiler(compiles)
    replicas = cluster.num_devices // math.prod(cluster.extra_axes.values())
    workload, examples = sized_workload(workload, examples_per_device, replicas, microbatches)
    planner = ConfigPlanner(
        workload, cluster, links, examples, microbatches, int(cluster.target.memory_bytes * usable),
        compiles=not lacking, largest=largest_microbatch, progress=progress,
    )  # fmt: skip
    return _plan_of(planner, wanted, lacking)


def plan_workload(workload: Workload, **options: Any) -> Plan:
    """`plan` of a `Workload`; `options` are the keywords of `plan` that say nothing of the workload."""
    parts = {field.name: getattr(workload, field.name) for field in dataclasses.fields(Workload)}
    loss_fn, params, batch, tx = (parts.pop(name) for name in ("loss_fn", "params", "batch", "tx"))
    return plan(loss_fn, params, batch, tx, **parts, **options)


def _plan_of(planner: ConfigPlanner, configs: list[ZeroConfig], lacking: str) -> Plan:
    """The plan as a record: configurations, advice, and the choice between them."""
    workload, cluster = planner.workload, planner.cluster
    found = planner.plan(configs)
    plans = tuple(one for one, _ in found)
    flops, source = next((flops for _, flops in found if flops), 0), "compiled program"
    if not flops:
        flops, source = planner.flops * planner.microbatches, "traced loss"
    chosen, why = recommend(plans, planner.capacity)
    why = "; ".join(filter(None, (why, network_advice(plans, planner.links))))
    leaves = jax.tree.leaves(workload.params)
    sizes = [math.prod(x.shape) for x in leaves]
    widths = [
        max((use.dtype.itemsize for use in of_leaf), default=x.dtype.itemsize)
        for x, of_leaf in zip(leaves, planner.uses, strict=True)
    ]
    return Plan(
        workload.name, sum(sizes), sum(map(operator.mul, sizes, widths)), planner.examples, planner.microbatches,
        cluster.target, cluster.num_nodes, cluster.devices_per_node, planner.links, flops, source, plans,
        _techniques(planner, configs[0], flops), chosen, why, lacking,
    )  # fmt: skip


def _techniques(planner: ConfigPlanner, base: ZeroConfig, flops: float) -> tuple[Technique, ...]:
    """Each technique against stage 3 without it: by replays where both are compiled, else by the placements."""
    plain = plain_config(base)
    before = planner.moves(planner.layout(plain, absent=False))
    found = []
    for name in NICKNAMES:
        if name == "secondary" and len(plain.axes) < 2:
            continue
        config = with_technique(plain, name)
        after = planner.moves(planner.layout(config, absent=False))
        useless = name == "secondary" and planner.cluster.num_nodes == 1
        if plain in planner.replays and config in planner.replays and not useless:
            saved = sum(m.node_bytes for m in before) - sum(m.node_bytes for m in after)
            replays = planner.replays[plain], planner.replays[config]
            found.append(decide_by_replays(name, *replays, saved, planner.links))
        else:
            found.append(decide_on_technique(name, before, after, flops, planner.links, planner.cluster.num_nodes))
    return tuple(found)
