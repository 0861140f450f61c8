"""The main job: a byte-level transformer trained on the Python standard library, by plain optax and by a ZeRO stage.

    python examples/train_gpt.py --stage 3

trains the same model twice from the same seed, on one device and on all of them, and reports the losses side by side
and the bytes that one device holds. Without accelerators it simulates 2 nodes x 4 devices on the CPU. On GPUs it uses
what is there, and under Slurm, Open MPI or a Kubernetes job it joins the other processes (or with --distributed).
"""

import argparse
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpt import GPTConfig, init_params, make_loss
from jax.sharding import NamedSharding, PartitionSpec
from report import Run, bytes_per_device, make_progress, print_losses, print_memory, save_results
from stdlib_text import Text, read_stdlib, sample_batch

import zerojax

# What is stored, and what the matrix products run in.
PRECISIONS = {
    "mixed": (jnp.float32, jnp.bfloat16),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),  # with float32 master weights in the optimizer state
    "float32": (jnp.float32, jnp.float32),
}
LAUNCHERS = ("SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")


def parse_flags(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--stage", type=int, default=3, help="0 plain data parallelism, 1 optimizer state, 2 gradients, 3 parameters")
    add("--nodes", type=int, help="nodes of the mesh (default: 2 when simulated, else one per host)")
    add("--devices-per-node", type=int, help="devices in each node (default: 4 when simulated, else all of a host)")
    add("--layers", type=int, default=4)
    add("--d-model", type=int, default=144)
    add("--heads", type=int, default=4)
    add("--seq", type=int, default=64, help="bytes in a training window")
    add("--batch", type=int, default=8, help="windows in a step, over all devices")
    add("--steps", type=int, default=300)
    add("--learning-rate", type=float, default=1e-3)
    add("--precision", choices=PRECISIONS, default="mixed", help="mixed: float32 parameters, bfloat16 compute")
    add("--dropout", type=float, default=0.0, help="masks differ per device, so the two runs then differ too")
    add("--remat", action="store_true", help="recompute each block's activations in the backward pass")
    add("--seed", type=int, default=0)
    add("--skip-plain", action="store_true", help="do not train on one device (the model may not fit)")
    add("--distributed", action="store_true", help="call jax.distributed.initialize() even where no launcher is seen")
    add("--out", type=Path, default=Path("out"), help="folder of the picture and the numbers")
    return parser.parse_args(args)


def start_jax(flags: argparse.Namespace) -> None:
    """Join the job's other processes; without accelerators, simulate the mesh's devices on the CPU."""
    distributed = flags.distributed or any(name in os.environ for name in LAUNCHERS)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        nodes_here = 1 if distributed else flags.nodes or 2
        jax.config.update("jax_num_cpu_devices", nodes_here * (flags.devices_per_node or 4))
    if distributed:
        jax.distributed.initialize()
    if jax.default_backend() == "cpu" and not distributed:
        flags.nodes, flags.devices_per_node = flags.nodes or 2, flags.devices_per_node or 4


class Setup(NamedTuple):
    """All that differs between the two ways to train."""

    name: str
    params: Any
    opt_state: Any
    tx: optax.GradientTransformation
    grad_fn: Callable[..., tuple[jax.Array, Any]]  # (params, batch, *key) -> loss, grads
    evaluate: Callable[..., jax.Array]  # (params, batch) -> loss
    put: Callable[[np.ndarray], jax.Array]  # a host's batch to the devices


def set_up_plain(config: GPTConfig, tx: optax.GradientTransformation, key: jax.Array) -> Setup:
    """Plain JAX and optax on one device."""
    loss_fn = make_loss(config)
    device = jax.local_devices()[0]
    params = jax.jit(functools.partial(init_params, config))(jax.device_put(key, device))
    if config.param_dtype != jnp.float32:
        tx = with_master_weights(tx)
    return Setup(
        name="plain optax, 1 device",
        params=params,
        opt_state=jax.device_put(tx.init(params), device),
        tx=tx,
        grad_fn=jax.value_and_grad(loss_fn),
        evaluate=jax.jit(loss_fn),
        put=functools.partial(jax.device_put, device=device),
    )


def set_up_zero(
    config: GPTConfig, tx: optax.GradientTransformation, key: jax.Array, mesh: jax.sharding.Mesh, stage: Any
) -> Setup:
    """The same with zerojax: parameters are born sharded and gathered one layer at a time."""
    loss_fn = make_loss(config)
    init = functools.partial(init_params, config)
    layout = zerojax.partition(jax.eval_shape(init, key), mesh, zerojax.ZeroConfig(stage=stage))
    if jax.process_index() == 0:
        print(layout.describe())
    params, tx = layout.init(init, key), zerojax.zero(tx, layout)
    batch_sharding = NamedSharding(mesh, PartitionSpec(layout.config.axes))
    return Setup(
        name=f"ZeRO stage {stage}, {mesh.devices.size} devices",
        params=params,
        opt_state=tx.init(params),
        tx=tx,
        grad_fn=zerojax.value_and_grad(loss_fn, layout),
        evaluate=jax.jit(zerojax.apply(loss_fn, layout)),
        put=lambda batch: jax.make_array_from_callback(batch.shape, batch_sharding, lambda index: batch[index]),
    )


def with_master_weights(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Let ``tx`` work on a float32 copy of narrower parameters, as ``zerojax.zero`` does by itself."""

    def widen(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params: Any) -> Any:
        return widen(params), tx.init(widen(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, inner = tx.update(widen(updates), state[1], state[0])
        master = jax.tree.map(jnp.add, state[0], updates)
        # float32 holds the difference of two narrower numbers, so that applying it gives the rounded master weight.
        change = jax.tree.map(
            lambda m, p: m.astype(p.dtype).astype(jnp.float32) - p.astype(jnp.float32), master, params
        )
        return change, (master, inner)

    return optax.GradientTransformation(init, update)


def train(setup: Setup, text: Text, flags: argparse.Namespace, other: Run | None = None) -> Run:
    """The training loop, the same for both; ``other`` is a finished run to show beside this one."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, batch: jax.Array, *key: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = setup.grad_fn(params, batch, *key)
        updates, opt_state = setup.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    rng = np.random.default_rng(flags.seed)
    held_out = [setup.put(sample_batch(text.validation, rng, flags.batch, flags.seq)) for _ in range(8)]
    params, opt_state = setup.params, setup.opt_state
    first = setup.put(sample_batch(text.train, rng, flags.batch, flags.seq))
    keys = [(jax.random.fold_in(jax.random.key(flags.seed), i),) if flags.dropout else () for i in range(flags.steps)]
    grads = jax.jit(setup.grad_fn)(params, first, *keys[0])[1]
    run = Run(
        name=setup.name,
        bytes={
            "parameters": bytes_per_device(params),
            "gradients": bytes_per_device(grads),
            "optimizer state": bytes_per_device(opt_state),
        },
    )
    del grads
    with make_progress(enabled=jax.process_index() == 0) as progress:
        task = progress.add_task(setup.name, total=flags.steps, loss="")
        for step in range(flags.steps):
            batch = setup.put(sample_batch(text.train, rng, flags.batch, flags.seq))
            params, opt_state, loss = train_step(params, opt_state, batch, *keys[step])
            run.losses.append(float(loss))
            if step == 0:
                start = time.perf_counter()  # the first step compiles
            beside = f" (plain {other.losses[step]:.4f})" if other else ""
            progress.update(task, advance=1, loss=f"loss {run.losses[-1]:.4f}{beside}")
        run.seconds_per_step = (time.perf_counter() - start) / max(flags.steps - 1, 1)
    run.validation_loss = float(np.mean([float(setup.evaluate(params, batch)) for batch in held_out]))
    return run


def main(args: list[str] | None = None) -> None:
    flags = parse_flags(args)
    start_jax(flags)
    param_dtype, dtype = PRECISIONS[flags.precision]
    config = GPTConfig(
        layers=flags.layers,
        d_model=flags.d_model,
        heads=flags.heads,
        sequence=flags.seq,
        dropout=flags.dropout,
        remat=flags.remat,
        param_dtype=param_dtype,
        dtype=dtype,
    )
    schedule = optax.warmup_cosine_decay_schedule(0.0, flags.learning_rate, flags.steps // 10, flags.steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
    key = jax.random.key(flags.seed)
    text = read_stdlib()

    plain = None if flags.skip_plain else train(set_up_plain(config, tx, key), text, flags)
    mesh = zerojax.make_mesh(flags.nodes, flags.devices_per_node)
    zero = train(set_up_zero(config, tx, key, mesh, flags.stage), text, flags, other=plain)
    if jax.process_index() == 0:
        print_losses(zero, plain)
        print_memory(zero, plain)
        print(save_results(flags.out, zero, plain, config, dict(mesh.shape)))


if __name__ == "__main__":
    main()
