"""Starts a script as several real processes of one job on this machine."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Joins the job; `RANK` and `COUNT` are the process's number and the number of processes.
START = """
import os, sys
import jax
RANK, COUNT = (int(os.environ[name]) for name in ("RANK", "COUNT"))
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(os.environ["COORDINATOR"], COUNT, RANK, heartbeat_timeout_seconds=HEARTBEAT)
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def command(script: str, *arguments: str, heartbeat: int = 60) -> list[str]:
    """The words that start one process of a job; its place in it comes by the environment."""
    return [sys.executable, "-W", "ignore", "-c", START.replace("HEARTBEAT", str(heartbeat)) + script, *arguments]


def environment(devices: int) -> dict[str, str]:
    """Of each process of a job: so many simulated devices, programs compiled quickly."""
    return {
        **os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip


def start(script: str, count: int, devices: int, *arguments: str, heartbeat: int = 60) -> list[subprocess.Popen[str]]:
    """The processes, each with so many simulated devices; stdout and stderr are one pipe.

    A process that does not answer for `heartbeat` seconds counts as dead: long, for machines that are busy.
    """
    coordinator = f"127.0.0.1:{free_port()}"
    return [
        subprocess.Popen(
            command(script, *arguments, heartbeat=heartbeat),
            env=environment(devices) | {"RANK": str(rank), "COUNT": str(count), "COORDINATOR": coordinator},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(count)
    ]  # fmt: skip


class Forked:
    """A process with the interface of `Popen`, forked from one that has imported everything: a fifth of the work."""

    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload(["jax", "zerojax", "optax", "orbax.checkpoint", "models"])

    def __init__(self, script: str, environment: dict[str, str], arguments: list[str]) -> None:
        before = dict(os.environ)
        os.environ.update(environment)  # of the server, which starts with the first process
        try:
            self._process = self._context.Process(target=_run, args=(START + script, environment, arguments))
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        self.terminate, self.kill, self.wait = self._process.terminate, self._process.kill, self._process.join

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget


def _run(script: str, environment: dict[str, str], arguments: list[str]) -> None:
    os.environ.update(environment)
    sys.argv[1:] = arguments
    exec(compile(script.replace("HEARTBEAT", "60"), "job", "exec"), {})


def finish(processes: list[subprocess.Popen[str]], seconds: float = 200) -> list[tuple[int, str]]:
    """(exit status, output) of each; none outlives this call."""
    end = time.monotonic() + seconds
    try:
        return [(p.returncode, out) for p in processes for out, _ in [p.communicate(timeout=end - time.monotonic())]]
    finally:
        for p in processes:
            p.kill()


def wait_until(condition: Callable[[], bool], processes: list[subprocess.Popen[str]], seconds: float = 150) -> None:
    """Waits while all processes live."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "too slow"
        assert all(p.poll() is None for p in processes), [p.communicate()[0][-3000:] for p in processes if p.poll()]
        time.sleep(0.1)


def terminate(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
