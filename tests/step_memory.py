"""A step in a process of its own, whose peak of device memory is therefore the step's, beside what the plan says of it.

python tests/step_memory.py WIDTH LAYERS ROWS_PER_DEVICE
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.planner.gpus import TARGETS


def planned_and_used(width, layers, rows, **environment):
    """Bytes of a device: "peak" as its allocator counts (None on CPUs), "planned", of it "code", and "loss"."""
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(width), str(layers), str(rows)],
        env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def loss_fn(params, batch):
    """The mean square after some layers of one product each."""
    h, _ = jax.lax.scan(lambda h, w: (jax.nn.gelu(h @ w), None), batch, params["w"])
    return jnp.mean(h**2)


def made(shape, value):
    """An array of one value on all devices, each part made by the host: no temporary of an initialiser."""
    part = lambda at: np.full(np.empty(shape.shape, bool)[at].shape, value, shape.dtype)  # noqa: E731
    return jax.make_array_from_callback(shape.shape, shape.sharding, part)


def main(width, layers, rows):
    """Runs a step, then plans it."""
    mesh, tx = zerojax.make_mesh(), optax.adamw(1e-3)
    params = {"w": jax.ShapeDtypeStruct((layers, width, width), jnp.float32)}
    layout = zerojax.partition(params, mesh, zerojax.ZeroConfig(stage=3))
    wrapped = zerojax.zero(tx, layout)
    shapes = zerojax.TrainState.create(layout.param_shapes(), wrapped, layout)
    state = jax.tree.map(lambda s: made(s, 0), shapes)
    state = state._replace(params=jax.tree.map(lambda s: made(s, 0.01), shapes.params))
    over = NamedSharding(mesh, PartitionSpec(layout.config.axes))
    batch = jax.ShapeDtypeStruct((rows * mesh.size, width), jnp.float32, sharding=over)
    state, metrics = zerojax.make_train_step(loss_fn, wrapped, layout)(state, made(batch, 1))
    jax.block_until_ready(state)
    device = mesh.local_devices[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    # A GPU that is not in the table: its compiler is as an H100's, and only its memory may not suffice.
    known = {one.name: one for one in TARGETS.values()}
    target = known.get(device.device_kind) or dataclasses.replace(TARGETS["h100"], name=device.device_kind)
    nodes = mesh.shape["node"]
    plan = zerojax.plan(
        loss_fn, params, batch, tx, target=target, num_nodes=nodes, devices_per_node=mesh.size // nodes,
        compiles=True, largest_microbatch=False,
    )  # fmt: skip
    memory = plan.configs[0].memory
    print(json.dumps({
        "peak": peak, "planned": memory.total, "code": memory.classes["code"], "loss": float(metrics["loss"]),
        "state": sum(memory.classes[name] for name in ("params", "moments")),
    }))  # fmt: skip


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
