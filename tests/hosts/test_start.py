"""How a process joins its job, by what each launcher puts into its environment."""

import os
from pathlib import Path

import jax
import pytest

import zerojax
from zerojax.hosts.start import launcher_of, visible_devices

SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "a[1-2]", "SLURM_PROCID": "9", "SLURM_STEP_NUM_NODES": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "16"}
EIGHT = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


@pytest.mark.parametrize(
    ("environment", "launcher", "devices"),
    [
        (SLURM | EIGHT | {"SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}, "slurm", None),  # JAX's rule: GPU 1
        (SLURM | {"SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}, "slurm", "all"),
        (SLURM | EIGHT | {"SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}, "slurm", "4,5,6,7"),
        # --gpus-per-task=1: each task sees its own GPU alone, whatever its number.
        (SLURM | {"SLURM_NTASKS": "16", "SLURM_LOCALID": "5", "CUDA_VISIBLE_DEVICES": "3"}, "slurm", "all"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "mpi4py", "all"),
        # mpirun inside Slurm: Slurm's variables are those of the daemon that mpirun started.
        (SLURM | OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0",
                             "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}, "ompi", None),
        ({"JOB_COMPLETION_INDEX": "1"}, "k8s", None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, None, None),  # the shell of an allocation starts nothing
        ({}, None, None),
    ],
)  # fmt: skip
def test_each_launcher_is_seen_and_no_gpu_of_the_node_idles(environment, launcher, devices):
    assert launcher_of(environment) == launcher
    assert visible_devices(environment) == devices


def test_gpus_that_do_not_divide_over_the_tasks_are_refused():
    with pytest.raises(ValueError, match=r"8 GPUs .* and 3 processes"):
        visible_devices(SLURM | EIGHT | {"SLURM_NTASKS": "6", "SLURM_LOCALID": "1"})


def test_joining_is_jaxs_own_with_a_short_heartbeat(monkeypatch):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: calls.append((args, options)))
    for name in {*SLURM, *OPEN_MPI, "JOB_COMPLETION_INDEX"} & os.environ.keys():
        monkeypatch.delenv(name)
    assert not zerojax.distributed()
    assert zerojax.distributed("host:1", 2, 1)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    assert zerojax.distributed(heartbeat_seconds=9)
    assert calls == [
        (("host:1", 2, 1), {"heartbeat_timeout_seconds": 30, "cluster_detection_method": "deactivate"}),
        ((None, None, None), {"heartbeat_timeout_seconds": 9, "cluster_detection_method": "k8s"}),
    ]
    with pytest.raises(ValueError, match="give coordinator, num_processes and process_id, or none"):
        zerojax.distributed("host:1", 2)


def test_the_launch_scripts_call_the_example_with_flags_that_it_has(monkeypatch):
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.syspath_prepend(examples)
    import train_gpt

    folder = examples / "launch"
    scripts = [*folder.glob("*.sh"), *folder.glob("*.yaml")]
    assert len(scripts) == 5
    for script in scripts:
        text = script.read_text().replace("\\\n", " ").replace(",", " ")
        (line,) = [line for line in text.splitlines() if "train_gpt.py" in line]
        flags = [word.strip("[]") for word in line.split("train_gpt.py")[1].split() if word.startswith("--")]
        values = {"--skip-plain": [], "--num-processes": ["2"], "--process-id": ["0"]}
        parsed = train_gpt.parse_flags([part for flag in flags for part in [flag, *values.get(flag, ["x"])]])
        assert parsed.skip_plain
        assert parsed.checkpoint == "x"
