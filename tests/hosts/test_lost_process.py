"""A process dies: the others end in stated time, and fewer go on from the last step as if nothing had been."""

import time

import jax
import models
import numpy as np
import optax
import processes

from zerojax.checkpoints.paths import steps_in

STEPS, ROWS = 24, 12
RUN = """
import numpy as np, optax, zerojax, models, time
init = models.dense_init
shapes, mesh = jax.eval_shape(init, jax.random.key(0)), zerojax.make_mesh()
layout = zerojax.partition(shapes, mesh, zerojax.ZeroConfig(min_shard_size=0))
tx = zerojax.zero(optax.adam(1e-2), layout)
step = zerojax.make_train_step(models.dense_loss, tx, layout)
state = zerojax.TrainState.create(layout.init(init, jax.random.key(0)), tx)
batches = [jax.device_get(batch) for batch in models.dense_batches(STEPS, ROWS)]
rows = slice(ROWS // COUNT * RANK, ROWS // COUNT * (RANK + 1))
with zerojax.CheckpointManager(sys.argv[1], layout, tx, every=2, keep=2) as manager:
    if (found := manager.restore()) is not None:
        state = found.state
    for number in range(int(state.step) + 1, STEPS + 1):
        state, metrics = step(state, layout.batch(jax.tree.map(lambda x: x[rows], batches[number - 1])))
        print("LOSS", number, float(metrics["loss"]), flush=True)
        manager.save(number, state)
        time.sleep(float(sys.argv[2]))
""".replace("STEPS", str(STEPS)).replace("ROWS", str(ROWS))


def losses(out):
    return {int(line.split()[1]): float(line.split()[2]) for line in out.splitlines() if line.startswith("LOSS")}


def test_when_one_of_three_is_killed_the_others_end_and_two_go_on_with_the_same_losses(tmp_path):
    from etils import epath

    folder = tmp_path / "run"
    job = processes.start(RUN, 3, 1, str(folder), "0.5", heartbeat=10)
    processes.wait_until(lambda: bool(steps_in(epath.Path(folder))), job)
    job[2].kill()
    start = time.monotonic()
    ends = processes.finish(job, 60)
    assert time.monotonic() - start < 10 + 20, "the heartbeat of 10 s, and as much again for a busy machine"
    assert all(status != 0 for status, _ in ends)
    before = losses(ends[0][1])
    again = processes.finish(processes.start(RUN, 2, 1, str(folder), "0"))
    assert [status for status, _ in again] == [0, 0], again[0][1][-3000:]
    after = losses(again[0][1])
    assert 1 < min(after) <= max(before) + 1, "from a saved step"
    assert max(after) == STEPS
    batches = models.dense_batches(STEPS, ROWS)
    params = models.dense_init(jax.random.key(0))
    _, _, expected, _ = models.train_plain(models.dense_loss, optax.adam(1e-2), params, batches)
    both = before | after
    # Sums of 12 rows in another order, carried over 24 steps of Adam at 1e-2: 1e-7 grows by less than a thousand.
    np.testing.assert_allclose([both[n] for n in range(1, STEPS + 1)], expected, rtol=1e-4)
