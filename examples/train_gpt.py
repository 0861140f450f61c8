"""The main job: a byte-level transformer trained on the Python standard library, by plain optax and by a ZeRO stage.

    python examples/train_gpt.py --stage 3

trains the same model twice from the same seed, on one device and on all of them, and reports the losses side by side
and the bytes that one device holds. With --zero-plus-plus, or some of its techniques, the first run is of the same
stage without them, and the bytes sent between nodes are reported for both. One such pair of runs moves by about a
percent from rounding alone; convergence_study.py takes the mean over seeds.

Without accelerators it simulates 2 nodes x 4 devices on the CPU. On GPUs it uses what is there, and under Slurm, Open
MPI or a Kubernetes job it joins the other processes (or with --coordinator): see launch/.
"""

import argparse
import functools
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
from zerojax.gather.uses import leaf_uses

# What is stored, and what the matrix products run in.
PRECISIONS = {
    "mixed": (jnp.float32, jnp.bfloat16),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),  # with float32 master weights in the optimizer state
    "float32": (jnp.float32, jnp.float32),
}


def parse_flags(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--stage", type=int, default=3, help="0 plain data parallelism, 1 optimizer state, 2 gradients, 3 parameters")
    add("--zero-plus-plus", action="store_true", help="all three techniques of ZeRO++; beside the stage without them")
    add("--quantize-weights", choices=("int8", "int4"), help="format of the weight gathers")
    add("--secondary", action="store_true", help="backward gathers stay inside the node")
    add("--quantize-gradients", nargs="+", choices=("int8", "int4"), help="formats inside the node and between nodes")
    add("--error-feedback", action="store_true", help="carry what quantised gradients lost into the next step")
    add("--weight-deltas", choices=("int4", "int2"), help="every node keeps the weights; their change is sent")
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
    add("--coordinator", help="HOST:PORT of process 0, where no launcher tells; with the next two")
    add("--num-processes", type=int)
    add("--process-id", type=int)
    add("--checkpoint", help="folder to save the sharded run in, and to resume it from if it holds steps")
    add("--checkpoint-every", type=int, default=100, help="steps between two checkpoints; the last three are kept")
    add("--out", type=Path, default=Path("out"), help="folder of the picture and the numbers")
    flags = parser.parse_args(args)
    if len(flags.quantize_gradients or ()) > 2:
        parser.error("--quantize-gradients takes one format, or one for inside the node and one for between nodes")
    try:
        zerojax.ZeroConfig(stage=flags.stage, **techniques_of(flags))
    except ValueError as error:  # before anything is trained
        parser.error(str(error))
    return flags


def start_jax(flags: argparse.Namespace) -> None:
    """Join the job's other processes; without accelerators, simulate the mesh's devices on the CPU."""
    distributed = zerojax.distributed(flags.coordinator, flags.num_processes, flags.process_id)
    zerojax.simulate_devices((1 if distributed else flags.nodes or 2) * (flags.devices_per_node or 4))
    if jax.default_backend() == "cpu" and not distributed:
        flags.nodes, flags.devices_per_node = flags.nodes or 2, flags.devices_per_node or 4


def techniques_of(flags: argparse.Namespace) -> dict[str, Any]:
    """The options of `zerojax.ZeroConfig` that the flags ask for beside the stage."""
    chosen = {
        "quantize_weights": flags.quantize_weights,
        "secondary": flags.secondary,
        "quantize_gradients": flags.quantize_gradients and (flags.quantize_gradients * 2)[:2],
        "error_feedback": flags.error_feedback,
        "weight_deltas": flags.weight_deltas,
    }
    default: dict[str, Any] = {"quantize_gradients": ("int8", "int4")}
    if not flags.weight_deltas:  # which take the place of both
        default |= {"quantize_weights": "int8", "secondary": True}
    return (default if flags.zero_plus_plus else {}) | {name: value for name, value in chosen.items() if value}


class Setup(NamedTuple):
    """All that differs between the two ways to train."""

    name: str
    params: Any
    opt_state: Any
    tx: optax.GradientTransformation
    grad_fn: Callable[..., tuple[jax.Array, Any]]  # (params, batch, *key) -> loss, grads
    evaluate: Callable[..., jax.Array]  # (params, batch) -> loss
    put: Callable[[np.ndarray], jax.Array]  # a host's batch to the devices
    wire: Any = None  # what the wire remembers; then grad_fn takes it as wire= and returns the next one
    node_bytes: int = 0  # predicted bytes into each node per step
    manager: zerojax.CheckpointManager | None = None  # of the run's steps on disk


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
    config: GPTConfig,
    tx: optax.GradientTransformation,
    key: jax.Array,
    mesh: jax.sharding.Mesh,
    stage: Any,
    checkpoint: tuple[str | None, int] = (None, 1),
    **techniques: Any,
) -> Setup:
    """The same with zerojax: parameters are born sharded and gathered one layer at a time."""
    loss_fn = make_loss(config)
    init = functools.partial(init_params, config)
    shapes = jax.eval_shape(init, key)
    layout = zerojax.partition(shapes, mesh, zerojax.ZeroConfig(stage=stage, **techniques))
    if jax.process_index() == 0:
        print(layout.describe())
    params, tx = layout.init(init, key), zerojax.zero(tx, layout)
    batch_sharding = NamedSharding(mesh, PartitionSpec(layout.config.axes))
    folder, every = checkpoint
    return Setup(
        name=f"ZeRO{'++' if techniques else ''} stage {stage}, {mesh.devices.size} devices",
        params=params,
        opt_state=tx.init(params),
        tx=tx,
        grad_fn=zerojax.value_and_grad(loss_fn, layout),
        evaluate=jax.jit(zerojax.apply(loss_fn, layout)),
        put=lambda batch: jax.make_array_from_callback(batch.shape, batch_sharding, lambda index: batch[index]),
        wire=zerojax.init_wire_state(layout),
        node_bytes=bytes_into_node(loss_fn, layout, config.sequence),
        manager=zerojax.CheckpointManager(folder, layout, tx, keep=3, every=every) if folder else None,
    )


def bytes_into_node(loss_fn: Callable[..., Any], layout: zerojax.Layout, sequence: int) -> int:
    """What one step sends into each node, predicted from the placements and from how the loss uses each leaf."""
    example = jax.ShapeDtypeStruct((1, sequence + 1), jnp.uint8)
    jaxpr = jax.make_jaxpr(loss_fn)(layout.logical_shapes(), example)
    moves = zerojax.predict_traffic(layout, leaf_uses(jaxpr, len(layout.leaves)))
    return sum(move.node_bytes for move in moves)


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


def remembering(wire: Any) -> dict[str, Any]:
    """The gradient function's keyword argument; none where nothing is carried."""
    return {} if wire is None else {"wire": wire}


def train(setup: Setup, text: Text, flags: argparse.Namespace, other: Run | None = None) -> Run:
    """The training loop, the same for both; ``other`` is a finished run to show beside this one."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, carried: Any, batch: jax.Array, *key: jax.Array) -> tuple[Any, Any, jax.Array]:
        opt_state, wire = carried
        loss, grads, *new_wire = setup.grad_fn(params, batch, *key, **remembering(wire))
        updates, opt_state = setup.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), (opt_state, new_wire[0] if new_wire else None), loss

    rng = np.random.default_rng(flags.seed)
    held_out = [setup.put(sample_batch(text.validation, rng, flags.batch, flags.seq)) for _ in range(8)]
    params, carried = setup.params, (setup.opt_state, setup.wire)
    first = setup.put(sample_batch(text.train, rng, flags.batch, flags.seq))
    keys = [(jax.random.fold_in(jax.random.key(flags.seed), i),) if flags.dropout else () for i in range(flags.steps)]
    grads = jax.jit(setup.grad_fn)(params, first, *keys[0], **remembering(setup.wire))[1]
    run = Run(
        name=setup.name,
        bytes={
            "parameters": bytes_per_device(params),
            "gradients": bytes_per_device(grads),
            "optimizer state": bytes_per_device(carried),
        },
    )
    del grads

    def state_at(step: int) -> zerojax.TrainState:
        return zerojax.TrainState(np.asarray(step, np.int32), params, *carried)  # type: ignore[arg-type]

    if setup.manager and (found := setup.manager.restore(like=state_at(0))) is not None:
        params, carried = found.state.params, (found.state.opt_state, found.state.wire)
        rng, run.losses = found.data["rng"], found.data["losses"]
    with make_progress(enabled=jax.process_index() == 0) as progress:
        first_step = len(run.losses)
        task = progress.add_task(setup.name, total=flags.steps, completed=first_step, loss="")
        start = time.perf_counter()
        for step in range(first_step, flags.steps):
            batch = setup.put(sample_batch(text.train, rng, flags.batch, flags.seq))
            params, carried, loss = train_step(params, carried, batch, *keys[step])
            run.losses.append(float(loss))
            if setup.manager:
                setup.manager.save(step + 1, state_at(step + 1), data={"rng": rng, "losses": run.losses})
                if setup.manager.stopping:  # the job was told to end: the scheduler starts it again
                    raise SystemExit(setup.manager.exit_status)
            if step == first_step:
                start = time.perf_counter()  # the first step compiles
            beside = f" ({other.name.split(',')[0]} {other.losses[step]:.4f})" if other else ""
            progress.update(task, advance=1, loss=f"loss {run.losses[-1]:.4f}{beside}")
        run.seconds_per_step = (time.perf_counter() - start) / max(flags.steps - first_step - 1, 1)
    if setup.manager:
        setup.manager.close()
    run.validation_loss = float(np.mean([float(setup.evaluate(params, batch)) for batch in held_out]))
    return run


def print_between_nodes(setup: Setup, run: Run, plain_setup: Setup | None, plain: Run | None) -> None:
    """What quantised communication saves and what it costs, beside the same stage without it."""
    line = f"predicted bytes into each node per step: {setup.node_bytes:,}"
    if plain_setup:
        without = plain_setup.node_bytes
        part = f" ({setup.node_bytes / without:.3f})" if without else ": there is one node"
        line += f", without the techniques {without:,}{part}"
    print(line)
    if plain:
        gap = run.validation_loss / plain.validation_loss - 1
        print(f"validation loss {run.validation_loss:.4f}, without {plain.validation_loss:.4f}: {100 * gap:+.2f} %")


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

    mesh, techniques = zerojax.make_mesh(flags.nodes, flags.devices_per_node), techniques_of(flags)
    if flags.batch % mesh.size:
        raise SystemExit(f"--batch {flags.batch} does not divide over the {mesh.size} devices of the mesh")
    make_plain = functools.partial(set_up_zero, mesh=mesh, stage=flags.stage) if techniques else set_up_plain
    plain_setup = None if flags.skip_plain else make_plain(config, tx, key)
    plain = plain_setup and train(plain_setup, text, flags)
    checkpoint = flags.checkpoint, flags.checkpoint_every
    setup = set_up_zero(config, tx, key, mesh, flags.stage, checkpoint, **techniques)
    zero = train(setup, text, flags, other=plain)
    if jax.process_index() == 0:
        print_losses(zero, plain)
        if techniques:
            print_between_nodes(setup, zero, plain_setup, plain)
        print_memory(zero, plain)
        print(save_results(flags.out, zero, plain, config, dict(mesh.shape)))


if __name__ == "__main__":
    main()
