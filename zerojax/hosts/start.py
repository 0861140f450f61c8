"""`distributed`: this process joins the others of its job, whoever started them.

JAX reads Slurm, Open MPI and Kubernetes by itself, and gives each process one GPU wherever the launcher tells which of
the node's processes it is. That is right for one task per GPU. With fewer tasks than GPUs the others would idle, and
where the launcher hands each task its own GPU alone, JAX would ask for one that is not there: both are decided here.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

import jax

# A process that is silent so long is taken for dead, and the others end. XLA's compiler does not keep it from speaking.
HEARTBEAT_SECONDS = 30


def distributed(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
) -> bool:
    """Joins the job's other processes; call it before anything asks for devices.

    Args:
        coordinator: "HOST:PORT" of process 0, with the next two; None reads the launcher: Slurm (one task per GPU, or
            one per node, which then has all of the node's GPUs), Open MPI (version 5 needs mpi4py), an indexed job of
            Kubernetes.
        num_processes: how many there are.
        process_id: which one this is, from 0.
        heartbeat_seconds: when a process dies or hangs, the others end about so long after.

    Returns:
        Whether this is a job of several processes (or one that a launcher started); False where no launcher is seen.

    Raises:
        ValueError: only some of the three are given; the node's GPUs do not divide over its processes.
        RuntimeError: JAX has started its devices already, or the others do not come.

    >>> distributed()
    False
    """
    given = (coordinator, num_processes, process_id)
    if None in given and any(x is not None for x in given):
        raise ValueError(
            f"distributed{given}: give coordinator, num_processes and process_id, or none of them under a launcher"
        )
    if jax.distributed.is_initialized():
        return True
    launcher = launcher_of(os.environ)
    if coordinator is None and launcher is None:
        return False
    devices = None if coordinator is not None else visible_devices(os.environ)
    jax.distributed.initialize(
        coordinator, num_processes, process_id, heartbeat_timeout_seconds=heartbeat_seconds,
        cluster_detection_method="deactivate" if coordinator is not None else launcher,
    )  # fmt: skip
    if devices is not None:
        for name in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
            jax.config.update(name, devices)
    return True


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a command that take the place of a launcher."""
    parser.add_argument("--coordinator", help="HOST:PORT of process 0, where no launcher says it")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)


def launcher_of(environment: Mapping[str, str]) -> str | None:
    """JAX's name of the launcher that started this process; None if there is none.

    >>> launcher_of({"JOB_COMPLETION_INDEX": "0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    'k8s'
    """
    if "OMPI_COMM_WORLD_RANK" in environment:  # first: under mpirun, Slurm's variables are those of its daemons
        return "ompi" if "OMPI_MCA_orte_hnp_uri" in environment else "mpi4py"
    if "SLURM_STEP_NODELIST" in environment and "SLURM_PROCID" in environment:
        return "slurm"
    return "k8s" if "JOB_COMPLETION_INDEX" in environment else None


def visible_devices(environment: Mapping[str, str]) -> str | None:
    """The GPUs of this process among those it can see, for JAX: "all" or numbers; None leaves it JAX's rule.

    >>> visible_devices({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_NODES": "4", "SLURM_LOCALID": "0"})
    'all'
    >>> visible_devices({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    ...                  "CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    '2,3'
    """
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environment:
        tasks = int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"])
        local = int(environment["OMPI_COMM_WORLD_LOCAL_RANK"])
    elif "SLURM_LOCALID" in environment:
        nodes = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or 1)
        tasks, local = -(-int(environment.get("SLURM_NTASKS", "1")) // nodes), int(environment["SLURM_LOCALID"])
    else:
        return None
    listed = environment.get("CUDA_VISIBLE_DEVICES", environment.get("ROCR_VISIBLE_DEVICES", ""))
    seen = len([entry for entry in listed.split(",") if entry.strip()])
    if tasks == 1 or seen == 1:
        return "all"
    if not seen or seen == tasks:
        return None
    if seen % tasks:
        raise ValueError(
            f"this node has {seen} GPUs ({listed}) and {tasks} processes of the job: start one process per GPU, one "
            "per node, or a number that divides the GPUs"
        )
    each = seen // tasks
    return ",".join(str(local * each + i) for i in range(each))
