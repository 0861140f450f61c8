"""ZeRO++ on a slow network, measured: real processes on an emulated cluster, at several bandwidths between nodes.

    sudo python examples/slow_network.py
    sudo python examples/slow_network.py --nodes 4 --devices-per-node 1 --bandwidths 100 1000

Each node is a network namespace with one process, whose devices are simulated on the CPU; what goes between nodes goes
over a link limited to the stated bandwidth. The same small GPT is trained by stage 3 and by each technique of ZeRO++; a
table and a picture show the time of a step, and the bytes out of each node, counted by the network interface, beside
what zerojax predicts for GPUs (the interface counts protocol headers too, and XLA's CPU backend sends the sums of
bfloat16 gradients in float32, twice the predicted bytes of that part). Compute and codec run on the CPU's cores, which
all nodes share here: on GPUs they cost far less, so that a technique pays at higher bandwidths than in this table.
"""

import argparse
import functools
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from emulated_cluster import EmulatedCluster, sent_bytes, what_is_missing

VARIANTS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "int8 weights": {"quantize_weights": "int8"},
    "secondary": {"secondary": True},
    "quantised gradients": {"quantize_gradients": ("int8", "int4")},
    "weight deltas": {"weight_deltas": "int4", "quantize_gradients": ("int8", "int4")},
    "ZeRO++": {"quantize_weights": "int8", "secondary": True, "quantize_gradients": ("int8", "int4")},
}
PORT = 29_500


def parse_flags(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--nodes", type=int, default=2)
    add("--devices-per-node", type=int, default=2)
    add("--bandwidths", type=float, nargs="+", default=[50, 200, 1000], help="between nodes, in Mbit/s (10^6)")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add("--steps", type=int, default=5, help="timed steps for each bandwidth; the median counts")
    add("--layers", type=int, default=4)
    add("--d-model", type=int, default=384)
    add("--seq", type=int, default=64)
    add("--out", type=Path, default=Path("out"), help="folder of the picture and the numbers")
    add("--worker", type=int, help=argparse.SUPPRESS)  # set by this program for the process of each node
    flags = parser.parse_args(args)
    if flags.nodes < 2:
        parser.error("--nodes: a network needs two nodes or more")
    return flags


def work(flags: argparse.Namespace) -> None:
    """One node: compiles the step of one variant, then times it whenever the parent says that a bandwidth is set."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", flags.devices_per_node)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = os.environ["ZEROJAX_COORDINATOR"]
    jax.distributed.initialize(address, flags.nodes, flags.worker)

    import jax.numpy as jnp
    import numpy as np
    import optax
    from gpt import GPTConfig, init_params, make_loss
    from jax.sharding import NamedSharding, PartitionSpec

    import zerojax

    config = GPTConfig(layers=flags.layers, d_model=flags.d_model, sequence=flags.seq, param_dtype=jnp.bfloat16)
    init, loss_fn, key = functools.partial(init_params, config), make_loss(config), jax.random.key(0)
    (variant,) = flags.variants
    layout = zerojax.partition(
        jax.eval_shape(init, key), zerojax.make_mesh(), zerojax.ZeroConfig(stage=3, **VARIANTS[variant])
    )
    tx = zerojax.zero(optax.adamw(1e-3), layout)
    state = zerojax.TrainState.create(layout.init(init, key), tx, layout=layout)
    step = zerojax.make_train_step(loss_fn, tx, layout)
    examples = flags.nodes * flags.devices_per_node
    tokens = np.random.default_rng(0).integers(0, 256, (examples, flags.seq + 1), dtype=np.uint8)
    placed = NamedSharding(layout.mesh, PartitionSpec(layout.config.axes))
    batch = jax.make_array_from_callback(tokens.shape, placed, lambda index: tokens[index])
    shapes = (layout, loss_fn, jax.ShapeDtypeStruct((1, flags.seq + 1), jnp.uint8))
    answer = {"predicted": predicted_bytes(*shapes), "parameters": sum(np.prod(p.shape) for p in layout.leaves)}
    for _ in range(2):
        state, metrics = step(state, batch)
    print(json.dumps({k: float(v) for k, v in answer.items()} | {"loss": float(metrics["loss"])}), flush=True)
    for _ in sys.stdin:  # one line for each bandwidth
        seconds, before = [], sent_bytes()
        for _ in range(flags.steps):
            start = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready(state)
            seconds.append(time.perf_counter() - start)
        sent = (sent_bytes() - before) / flags.steps
        print(json.dumps({"seconds": statistics.median(seconds), "sent": sent}), flush=True)


def predicted_bytes(layout: Any, loss_fn: Any, example: Any) -> int:
    """Bytes out of each node in one step: as many as come in."""
    import jax

    import zerojax
    from zerojax.gather.uses import leaf_uses

    jaxpr = jax.make_jaxpr(loss_fn)(layout.logical_shapes(), example)
    return sum(move.node_bytes for move in zerojax.predict_traffic(layout, leaf_uses(jaxpr, len(layout.leaves))))


def measure(flags: argparse.Namespace, cluster: EmulatedCluster, variant: str) -> dict[str, Any]:
    """The step of one variant at each bandwidth."""
    cluster.limit(10_000)  # compiling and warming up are not what is measured
    command = [
        sys.executable, __file__, "--nodes", str(flags.nodes), "--devices-per-node", str(flags.devices_per_node),
        "--variants", variant, "--steps", str(flags.steps), "--layers", str(flags.layers),
        "--d-model", str(flags.d_model), "--seq", str(flags.seq),
    ]  # fmt: skip
    env = {"ZEROJAX_COORDINATOR": f"{cluster.address(0)}:{PORT}", "TF_CPP_MIN_LOG_LEVEL": "2"}
    workers = [cluster.start(node, [*command, "--worker", str(node)], env) for node in range(flags.nodes)]

    def answers() -> list[dict[str, float]]:
        # The communication library prints lines of its own.
        lines = [next((line for line in worker.stdout or () if line.startswith("{")), "") for worker in workers]
        if not all(lines):
            raise SystemExit(f"{variant}: the process of a node ended; its own message stands above")
        return [json.loads(line) for line in lines]

    found: dict[str, Any] = {"variant": variant, **answers()[0], "at": {}}
    for bandwidth in flags.bandwidths:
        cluster.limit(bandwidth)
        for worker in workers:
            assert worker.stdin
            worker.stdin.write("measure\n")
            worker.stdin.flush()
        parts = answers()
        sent = sum(part["sent"] for part in parts) / len(parts)
        found["at"][bandwidth] = {"seconds": max(part["seconds"] for part in parts), "sent": sent}
        print(f"{variant:>20} at {bandwidth:>6g} Mbit/s: {found['at'][bandwidth]['seconds']:.3f} s a step", flush=True)
    for worker in workers:
        assert worker.stdin
        worker.stdin.close()
    for worker in workers:
        worker.wait(60)
    return found


def print_table(flags: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    last = results[-1]
    table = Table("", title=f"{flags.nodes} nodes x {flags.devices_per_node} devices, seconds a step")
    for bandwidth in flags.bandwidths:
        table.add_column(f"{bandwidth:g} Mbit/s", justify="right")
    for name in ("MB out of a node", "predicted"):
        table.add_column(name, justify="right")
    for one in results:
        times = [
            f"{one['at'][b]['seconds']:.2f} ({one['at'][b]['seconds'] / last['at'][b]['seconds']:.1f}x)"
            for b in flags.bandwidths
        ]
        sent = statistics.mean(at["sent"] for at in one["at"].values())
        table.add_row(one["variant"], *times, f"{sent / 1e6:.2f}", f"{one['predicted'] / 1e6:.2f}")
    table.caption = f"{results[0]['parameters'] / 1e6:.1f}M parameters; (x): in relation to {last['variant']}"
    Console().print(table)


def draw(flags: argparse.Namespace, results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for one in results:
        axes.plot(flags.bandwidths, [one["at"][b]["seconds"] for b in flags.bandwidths], "o-", label=one["variant"])
    axes.set(xscale="log", yscale="log", xlabel="bandwidth between nodes, Mbit/s", ylabel="seconds a step")
    axes.set_title(f"{flags.nodes} nodes x {flags.devices_per_node} devices")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main(args: list[str] | None = None) -> None:
    flags = parse_flags(args)
    if flags.worker is not None:
        return work(flags)
    if missing := what_is_missing():
        raise SystemExit(f"slow_network.py emulates a cluster on this machine: {missing}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is removed then too
    with EmulatedCluster(flags.nodes) as cluster:
        results = [measure(flags, cluster, variant) for variant in flags.variants]
    print_table(flags, results)
    flags.out.mkdir(parents=True, exist_ok=True)
    (flags.out / "slow_network.json").write_text(json.dumps(results, indent=1))
    draw(flags, results, flags.out / "slow_network.png")
    print(flags.out / "slow_network.png")
    return None


if __name__ == "__main__":
    main()
