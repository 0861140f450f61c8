"""A cluster with a slow network on one Linux machine: a network namespace for each node, joined by a switch.

Every node has one interface, "net0", whose both directions a token bucket limits to the same rate (tc-tbf(8)); what
crosses it is counted by the kernel. Processes started on a node see only that interface and the node's own loopback, so
that whatever goes between two nodes is slow and counted, and whatever stays inside a node is neither. Needs root, and
iproute2's `ip` and `tc`. Everything made is removed on exit, also after ctrl-C or an error.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from types import TracebackType

SUBNET = "10.77.0"
INTERFACE = "net0"
BURST_SECONDS = 0.004  # what a bucket holds, in time at its rate: the kernel refills it at least this often


def what_is_missing() -> str | None:
    """Why no cluster can be emulated here, in words; None where one can."""
    if not hasattr(os, "geteuid") or shutil.which("ip") is None or shutil.which("tc") is None:
        return "it needs Linux with the commands ip and tc (Debian and Ubuntu: apt install iproute2)"
    if os.geteuid() != 0:
        return "it needs root, to make network namespaces: run it with sudo"
    name = f"zerojax-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"this machine does not let root make network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


class EmulatedCluster:
    """Nodes with addresses 10.77.0.1, .2, .. joined by a switch; a context manager.

    Args:
        num_nodes: number of nodes, at most 200.

    Example:
        with EmulatedCluster(2) as cluster:
            cluster.limit(50)
            process = cluster.start(0, ["python", "worker.py"])
    """

    def __init__(self, num_nodes: int) -> None:
        if not 1 <= num_nodes <= 200:
            raise ValueError(f"num_nodes={num_nodes}: from 1 to 200")
        self.num_nodes = num_nodes
        self._prefix = f"zerojax-{os.getpid()}"
        self._switch = f"{self._prefix}-switch"
        self._processes: list[subprocess.Popen[str]] = []

    def address(self, node: int) -> str:
        """The address of a node."""
        return f"{SUBNET}.{node + 1}"

    def __enter__(self) -> EmulatedCluster:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def limit(self, megabits_per_second: float) -> None:
        """Sets the rate of every node's link, in each direction (10^6 bits per second)."""
        bits = megabits_per_second * 1e6
        # A packet of the loopback-sized kind (64 KiB, as segmentation offload makes them) must fit into the bucket.
        burst = max(96 * 1024, int(bits / 8 * BURST_SECONDS))
        for node in range(self.num_nodes):
            for where, link in ((self._name(node), INTERFACE), (self._switch, f"to{node}")):
                _run(
                    "tc", "-n", where, "qdisc", "replace", "dev", link, "root", "tbf",
                    "rate", f"{int(bits)}bit", "burst", str(burst), "latency", "100ms",
                )  # fmt: skip

    def start(self, node: int, command: list[str], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts a process on a node, with pipes at its input and output; it ends with the cluster at the latest."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._name(node), *command],
            env={**os.environ, **(env or {})}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def _name(self, node: int) -> str:
        return f"{self._prefix}-{node}"

    def _hosts(self, node: int) -> Path:
        """What `ip netns exec` shows as /etc on a node: the machine's own name is the node's address there."""
        return Path("/etc/netns") / self._name(node)

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge0", "up")
        for node in range(self.num_nodes):
            name, port = self._name(node), f"to{node}"
            _run("ip", "netns", "add", name)
            _run(
                "ip", "link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port,
                "netns", self._switch,
            )  # fmt: skip
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge0", "up")
            _run("ip", "-n", name, "address", "add", f"{self.address(node)}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            self._hosts(node).mkdir(parents=True)
            text = f"127.0.0.1 localhost\n{self.address(node)} {socket.gethostname()}\n"
            (self._hosts(node) / "hosts").write_text(text)

    def _remove(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for name in (*(self._name(node) for node in range(self.num_nodes)), self._switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        for node in range(self.num_nodes):
            shutil.rmtree(self._hosts(node), ignore_errors=True)


def sent_bytes() -> int:
    """Bytes that the node of the calling process has sent to other nodes so far, headers included."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
