"""Starts a job on a list of hosts, and starts it again on those that remain when one is lost, from the last saved step.

    python examples/supervise.py --hosts a,b,c,d -- ssh {host} cd /code '&&' python examples/train_gpt.py \
        --skip-plain --checkpoint /shared/run --batch 96 \
        --coordinator {coordinator} --num-processes {count} --process-id {rank}

runs the command once for each host. A host is lost when its process was killed (-9, 137), cannot be reached any more
(255, of ssh), or still hangs `--patience` seconds after the others ended. Then the job starts anew with one process
less: its program makes the mesh of the devices that there are (7 x 8, not 8 x 8), restores the last complete step, and
goes on with the same batches, provided that the rows of a batch divide over every number of devices that may
remain. A failure that loses no host is tried again on all of them. SIGTERM is handed on to the processes, which save
and end with status 75, and so does the supervisor (ssh hands no signal on: send it to one of the processes). It keeps
nothing: it may be killed and started again itself.
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

# Ends of a process that say that its host is gone: killed, by a shell's count, and ssh without a connection.
LOST = frozenset({-signal.SIGKILL, 128 + signal.SIGKILL, 255})
REQUEUE = 75
LOCAL = frozenset({"localhost", "127.0.0.1"})


class End(NamedTuple):
    """How the process of one host ended: its status, and whether it had to be killed because it hung."""

    status: int
    hung: bool


class Supervisor:
    """Runs one command on many hosts until it is done.

    Args:
        hosts: their names, one process each; the first is the coordinator.
        command: the words of the command, with {host}, {coordinator}, {count} and {rank} in them.
        fewest: with fewer hosts the job is given up.
        restarts: how many times it is started again.
        patience: seconds that the others have to end after one has: longer than the job's heartbeat.
        port: of the coordinator; the next start takes the next one. On this machine alone a free one is taken.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        command: Sequence[str],
        *,
        fewest: int = 1,
        restarts: int = 100,
        patience: float = 90,
        port: int = 8476,
    ) -> None:
        self.hosts, self._command = list(hosts), list(command)
        self._fewest, self._restarts, self._patience, self._port = fewest, restarts, patience, port
        self._processes: list[subprocess.Popen[Any]] = []
        self._stopped = False

    def run(self) -> int:
        """The exit status: 0 when the job is done, 75 when it was told to stop, else that of its last failure."""
        for attempt in range(self._restarts + 1):
            ends = self._run_once(attempt)
            if self._stopped:
                return REQUEUE
            statuses = [end.status for end in ends]
            if not any(statuses):
                return 0
            lost = [h for h, end in zip(self.hosts, ends, strict=True) if end.hung or end.status in LOST]
            failure = next((status for status in statuses if status not in (0, REQUEUE)), REQUEUE)
            if failure == REQUEUE and not lost:
                return REQUEUE
            said = ", ".join(f"{h} {end.status}" for h, end in zip(self.hosts, ends, strict=True))
            print(f"supervise: the job ended ({said}); lost: {', '.join(lost) or 'no host'}", flush=True)
            remain = [h for h, end in zip(self.hosts, ends, strict=True) if not (end.hung or end.status in LOST)]
            self.hosts = remain or self.hosts  # all killed at once: the job was, not the hosts
            if len(self.hosts) < self._fewest:
                break
        return failure if failure > 0 else 128 - failure

    def stop(self, *_: object) -> None:
        """Hands SIGTERM on: the processes save their step and end."""
        self._stopped = True
        for process in self._processes:
            process.terminate()

    def start(self, words: list[str]) -> subprocess.Popen[Any]:
        """Starts the process of one host."""
        return subprocess.Popen(words)

    def _run_once(self, attempt: int) -> list[End]:
        coordinator = f"{self.hosts[0]}:{_free_port() if set(self.hosts) <= LOCAL else self._port + attempt}"
        for rank, host in enumerate(self.hosts):
            values = {"host": host, "coordinator": coordinator, "count": len(self.hosts), "rank": rank}
            words = self._command
            for name, value in values.items():
                words = [word.replace(f"{{{name}}}", str(value)) for word in words]
            self._processes.append(self.start(words))
        if self._stopped:  # while they were being started
            self.stop()
        try:
            return self._wait()
        finally:
            for process in self._processes:
                process.kill()
                process.wait()
            self._processes = []

    def _wait(self) -> list[End]:
        """Waits until all have ended. Once one was killed the rest cannot go on, and is ended soon."""
        deadline = None
        while any(process.poll() is None for process in self._processes):
            ended = [process.returncode for process in self._processes if process.returncode is not None]
            if deadline is None and any(ended):
                deadline = time.monotonic() + self._patience
            killed = any(status in LOST for status in ended)
            if killed and deadline is not None:
                deadline = min(deadline, time.monotonic() + 5)
            if deadline is not None and time.monotonic() > deadline:
                # Who is left hangs; but the others of one that was killed need not have heard of it yet, and where most
                # are left it is the job that hangs.
                left = sum(process.returncode is None for process in self._processes)
                hangs = not killed and 2 * left <= len(self._processes)
                return [End(1 if p.returncode is None else p.returncode, p.returncode is None and hangs)
                        for p in self._processes]  # fmt: skip
            time.sleep(0.1)
        return [End(process.returncode, False) for process in self._processes]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", required=True, help="names, separated by commas")
    parser.add_argument("--fewest", type=int, default=1, help="with fewer hosts the job is given up")
    parser.add_argument("--restarts", type=int, default=100)
    parser.add_argument("--patience", type=float, default=90, help="seconds; longer than the job's heartbeat of 30")
    parser.add_argument("--port", type=int, default=8476)
    parser.add_argument("command", nargs="+", help="with {host}, {coordinator}, {count} and {rank}")
    flags = vars(parser.parse_args(args))
    supervisor = Supervisor(flags.pop("hosts").split(","), flags.pop("command"), **flags)
    signal.signal(signal.SIGTERM, supervisor.stop)
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
