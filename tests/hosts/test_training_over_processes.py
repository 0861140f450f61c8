"""Jobs of real processes train as one process does: plain optax, and for ZeRO++ the same mesh of simulated devices."""

import jax
import models
import numpy as np
import optax
import processes
import pytest

import zerojax

STEPS, ROWS = 3, 24
TRAIN = """
import jax, optax, zerojax, models

def train(mesh, stage, batches):
    init = models.dense_init
    if stage == "++":
        config = zerojax.ZeroConfig.zero_plus_plus(min_shard_size=30, min_quantize_size=100)
    else:
        config = zerojax.ZeroConfig(stage=int(stage), min_shard_size=30)
    layout = zerojax.partition(jax.eval_shape(init, jax.random.key(0)), mesh, config)
    tx = zerojax.zero(optax.sgd(0.3, momentum=0.9), layout)
    state = zerojax.TrainState.create(layout.init(init, jax.random.key(0)), tx, layout)
    step = zerojax.make_train_step(models.dense_loss, tx, layout)
    for batch in batches:
        state, _ = step(state, layout.batch(batch))
    return layout.unshard(state.params)
"""
JOB = (
    (
        TRAIN
        + """
import numpy as np
mesh = zerojax.make_mesh()
assert dict(mesh.shape) == {"node": COUNT, "local": int(sys.argv[2])}
rows = slice(ROWS // COUNT * RANK, ROWS // COUNT * (RANK + 1))
batches = [jax.tree.map(lambda x: x[rows], jax.device_get(b)) for b in models.dense_batches(STEPS, ROWS)]
for stage in sys.argv[3:]:
    params = train(mesh, stage, batches)
    if RANK == COUNT - 1:
        np.savez(f"{sys.argv[1]}/{stage}.npz", *(x.addressable_data(0) for x in jax.tree.leaves(params)))
"""
    )
    .replace("STEPS", str(STEPS))
    .replace("ROWS", str(ROWS))
)


@pytest.mark.parametrize(
    ("count", "devices", "stages"),
    [
        (4, 1, ["3", "++"]), pytest.param(4, 1, ["0", "2"], marks=pytest.mark.aot),
        pytest.param(3, 2, ["1", "3", "++"], marks=pytest.mark.aot),
    ],
)
def test_a_job_of_processes_ends_with_the_parameters_of_one(tmp_path, count, devices, stages):
    job = processes.start(JOB, count, devices, str(tmp_path), str(devices), *stages)
    batches = models.dense_batches(STEPS, ROWS)
    plain, *_ = models.train_plain(
        models.dense_loss, optax.sgd(0.3, momentum=0.9), models.dense_init(jax.random.key(0)), batches
    )
    here: dict = {}
    exec(TRAIN, here)
    simulated = here["train"](zerojax.make_mesh(count, devices, jax.devices()[: count * devices]), "++", batches)
    ends = processes.finish(job)
    assert not any(status for status, _ in ends), [out[-2000:] for _, out in ends]
    for stage in stages:
        with np.load(tmp_path / f"{stage}.npz") as file:
            found = list(file.values())
        wanted = jax.tree.leaves(simulated if stage == "++" else plain)
        # Sums of 24 rows in another order, three steps of momentum.
        assert models.largest_error(found, wanted) < 1e-5, stage
    assert models.largest_error(simulated, plain) > 1e-4, "something is quantised"
