"""A process dies or hangs: the others end in stated time, and fewer go on from the last step as if nothing had been."""

import random
import signal
import sys
import time

import jax
import models
import numpy as np
import optax
import processes
import pytest

from zerojax.checkpoints.paths import steps_in

STEPS, ROWS = 24, 12
RUN = """
import numpy as np, optax, zerojax, models, signal, threading, time
folder, log, pause, victim, moment = sys.argv[1:]
init = models.dense_init
shapes, mesh = jax.eval_shape(init, jax.random.key(0)), zerojax.make_mesh()
layout = zerojax.partition(shapes, mesh, zerojax.ZeroConfig(min_shard_size=0))
tx = zerojax.zero(optax.adam(1e-2), layout)
step = zerojax.make_train_step(models.dense_loss, tx, layout)
state = zerojax.TrainState.create(layout.init(init, jax.random.key(0)), tx)
batches = [jax.device_get(batch) for batch in models.dense_batches(STEPS, ROWS)]
rows = slice(ROWS // COUNT * RANK, ROWS // COUNT * (RANK + 1))
with zerojax.CheckpointManager(folder, layout, tx, every=2, keep=2) as manager:
    if (found := manager.restore()) is not None:
        state = found.state
    for number in range(int(state.step) + 1, STEPS + 1):
        if (COUNT, str(RANK), number) == (4, victim, int(float(moment) * STEPS)):  # killed in or about this step
            after = float(moment) * STEPS % 1 * (float(pause) + 0.1)
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        state, metrics = step(state, layout.batch(jax.tree.map(lambda x: x[rows], batches[number - 1])))
        if RANK == 0:
            with open(log, "a") as file:
                print(COUNT, number, float(metrics["loss"]), file=file)
        manager.save(number, state)
        time.sleep(float(pause))
""".replace("STEPS", str(STEPS)).replace("ROWS", str(ROWS))


def check_losses(log, before, after):
    """Of both attempts, from the file that process 0 of each wrote: those of plain optax on one device."""
    lines = [line.split() for line in log.read_text().splitlines()]
    first, second = ({int(n): float(loss) for c, n, loss in lines if int(c) == count} for count in (before, after))
    assert min(second) <= max(first, default=0) + 1, "from a saved step"
    assert max(second) == STEPS
    batches = models.dense_batches(STEPS, ROWS)
    params = models.dense_init(jax.random.key(0))
    _, _, expected, _ = models.train_plain(models.dense_loss, optax.adam(1e-2), params, batches)
    for found in (first, second):
        # Sums of 12 rows in another order, carried over 24 steps of Adam at 1e-2: 1e-7 grows by less than a thousand.
        np.testing.assert_allclose([*found.values()], [expected[n - 1] for n in found], rtol=1e-4)
    assert {*first, *second} == {*range(1, STEPS + 1)}
    return min(second)


@pytest.mark.aot
def test_when_one_of_three_hangs_the_others_end_and_two_go_on_with_the_same_losses(tmp_path):
    from etils import epath

    folder, log = tmp_path / "run", tmp_path / "log"
    job = processes.start(RUN, 3, 1, str(folder), str(log), "0.5", "none", "0", heartbeat=10)
    processes.wait_until(lambda: bool(steps_in(epath.Path(folder))), job)
    job[2].send_signal(signal.SIGSTOP)
    start = time.monotonic()
    try:
        ends = processes.finish(job[:2], 60)
    finally:
        job[2].kill()
    assert time.monotonic() - start < 10 + 20, "the heartbeat of 10 s, and twice as much again for a busy machine"
    assert all(status != 0 for status, _ in ends)
    assert all("heartbeat" in out for _, out in ends), "they say why"
    again = processes.finish(processes.start(RUN, 2, 1, str(folder), str(log), "0", "none", "0"))
    assert [status for status, _ in again] == [0, 0], again[0][1][-3000:]
    assert check_losses(log, 3, 2) > 1


def supervised(tmp_path, monkeypatch, victim, moment):
    """A job of four, of which one is killed, under the supervisor of the examples."""
    monkeypatch.syspath_prepend(processes.ROOT / "examples")
    import supervise

    class Forking(supervise.Supervisor):
        def start(self, words):
            place = dict(zip(("RANK", "COUNT", "COORDINATOR"), words, strict=True))
            arguments = [str(tmp_path / "run"), str(tmp_path / "log"), "0.1", str(victim), str(moment)]
            return processes.Forked(RUN, processes.environment(1) | place, arguments)

    supervisor = Forking(["localhost"] * 4, ["{rank}", "{count}", "{coordinator}"], patience=120, restarts=1)
    assert supervisor.run() == 0
    assert len(supervisor.hosts) == 3
    return check_losses(tmp_path / "log", 4, 3)


@pytest.mark.aot
def test_the_supervisor_goes_on_with_three_of_four_when_one_is_killed(tmp_path, monkeypatch):
    assert supervised(tmp_path, monkeypatch, 2, 0.4) > 1


@pytest.mark.aot
@pytest.mark.parametrize("trial", range(20))
def test_wherever_one_of_four_is_killed_three_go_on(tmp_path, monkeypatch, trial):
    draw = random.Random(trial)
    supervised(tmp_path, monkeypatch, draw.randrange(4), draw.uniform(1 / STEPS, 1))


def test_the_supervisor_tells_a_lost_host_from_a_failing_program(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(processes.ROOT / "examples")
    import supervise

    def run(script, hosts=4, **options):
        words = [sys.executable, "-c", f"import os, signal, sys, time\nrank, count = {{rank}}, {{count}}\n{script}"]
        supervisor = supervise.Supervisor(["localhost"] * hosts, words, patience=1.5, **options)
        return supervisor.run(), len(supervisor.hosts)

    assert run("sys.exit(0)") == (0, 4)
    assert run("sys.exit(75)") == (75, 4)
    assert run("sys.exit(3 * (rank == 1))", restarts=2) == (3, 4)
    killed = "os.kill(os.getpid(), signal.SIGKILL) if (rank, count) == (1, 4) else sys.exit(count == 4)"
    assert run(killed) == (0, 3)
    hangs = "time.sleep(30 * (rank == 2 and count > 2)); sys.exit(count > 2)"
    assert run(hangs) == (0, 2)
    assert run(hangs, fewest=3) == (1, 2)
