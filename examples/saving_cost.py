"""What saving while training goes on costs: the time of a step with and without a save in flight.

    python examples/saving_cost.py [--megabytes 192] [--saves 3]

trains a perceptron whose training state has that size, saves it with `CheckpointManager` from time to time, and
reports for the steps in between, each timed by itself: the median with nothing being written, the median while a save
is being written, the time that `save` itself takes (a copy of the state to the host, and checksums of it), and that of
a save that is waited for. Without accelerators it simulates 8 devices; the CPU then computes and compresses what is
written at once, which is the worst case: on GPUs the host is otherwise idle.

Two CPU cores (busy with other work too), 189 MB of state: a step 0.92 s, while a save is written 1.39 s (ratio 1.5);
the call of `save` 0.30 s, a third of a step; 5.0 s until it is on disk, as long as a save that is waited for. So a
save every 100 steps costs 3 % of the time here (a third of a step, and five steps half as long again), instead of 5 %.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax

WIDTH = 1024


class Cost(NamedTuple):
    """Medians in seconds.

    Attributes:
        state_bytes: bytes of the training state.
        step: of a step with nothing being written.
        step_while_saving: of a step while a save is being written.
        call: of the call of `save`, during which nothing is trained.
        written: from the call until the step is on disk.
        waited: of a save that is waited for, with nothing trained meanwhile.
    """

    state_bytes: int
    step: float
    step_while_saving: float
    call: float
    written: float
    waited: float

    @property
    def ratio(self) -> float:
        """Of the time of a step while saving to that of a step."""
        return self.step_while_saving / self.step


def measure(megabytes: float = 192, saves: int = 3, rows: int = 64, width: int = WIDTH, checksums: bool = True) -> Cost:
    """Trains and saves in a temporary folder, on all devices.

    Args:
        megabytes: size of parameters and optimizer state.
        saves: how many to measure.
        rows: of a batch.
        width: of the perceptron.
        checksums: as for `CheckpointManager`.
    """
    layers = max(1, round(megabytes * 1e6 / 12 / width**2))  # parameters and two moments in float32
    shapes = {"w": jax.ShapeDtypeStruct((layers, width, width), jnp.float32)}
    layout = zerojax.partition(shapes, zerojax.make_mesh(), zerojax.ZeroConfig(stage=3))
    tx = zerojax.zero(optax.adam(1e-3), layout)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])
        return jnp.mean((h - x) ** 2)

    def init(key: jax.Array) -> Any:
        return {"w": jax.random.normal(key, shapes["w"].shape) / np.sqrt(width)}

    step_fn = zerojax.make_train_step(loss, tx, layout)
    state = zerojax.TrainState.create(layout.init(init, jax.random.key(0)), tx)
    batch = layout.batch(np.random.default_rng(0).normal(size=(rows // jax.process_count(), width)).astype(np.float32))
    number = 0

    def one_step() -> float:
        nonlocal state, number
        start = time.perf_counter()
        state, metrics = step_fn(state, batch)
        metrics["loss"].block_until_ready()
        number += 1
        return time.perf_counter() - start

    alone, during, calls, written, waited = [], [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        manager = zerojax.CheckpointManager(folder, layout, tx, keep=1, checksums=checksums)
        with manager:
            for save in range(saves + 1):
                steps = [one_step() for _ in range(6)]
                start = time.perf_counter()
                manager.save(number, state)
                call = time.perf_counter() - start
                in_flight, target = [], Path(folder, str(number))
                while not target.exists():  # it takes its name when it is complete
                    in_flight.append(one_step())
                all_written = time.perf_counter() - start
                manager.wait()
                one_step()
                start = time.perf_counter()
                manager.save(number, state)
                manager.wait()
                if save:  # the first compiles
                    alone, during = alone + steps, during + in_flight
                    calls.append(call)
                    written.append(all_written)
                    waited.append(time.perf_counter() - start)
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    return Cost(size, *map(statistics.median, (alone, during, calls, written, waited)))


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=192, help="of parameters and optimizer state")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--rows", type=int, default=64, help="of a batch, over all devices")
    parser.add_argument("--no-checksums", action="store_true")
    flags = parser.parse_args(args)
    if not zerojax.distributed():
        zerojax.simulate_devices(8)
    cost = measure(flags.megabytes, flags.saves, flags.rows, checksums=not flags.no_checksums)
    if jax.process_index() == 0:
        print(f"training state {cost.state_bytes / 1e6:.0f} MB; seconds, medians")
        print(f"step, nothing being written   {cost.step:8.3f}")
        print(f"step while a save is written  {cost.step_while_saving:8.3f}  ratio {cost.ratio:.2f}")
        print(f"the call of save              {cost.call:8.3f}  {cost.call / cost.step:.2f} steps")
        print(f"until it is on disk           {cost.written:8.3f}")
        print(f"a save that is waited for     {cost.waited:8.3f}")


if __name__ == "__main__":
    main()
