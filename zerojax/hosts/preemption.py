"""Told to stop: SIGTERM reaches one process, all stop after the same step.

Slurm and Kubernetes send SIGTERM some time before they end a job. In a job of several processes JAX's coordination
service catches it on any of them and tells all, but nothing stops: here a thread waits for that notice, and then agrees
with its peers on a step that none has passed. Asking costs no message. In a single process a handler notes the signal.
"""

from __future__ import annotations

import atexit
import functools
import signal
import threading
from typing import Any

import jax

from zerojax import _compat
from zerojax.hosts.agreement import exchange

# "Try again later" of sysexits.h: a scheduler tells by it that the job is to be started again.
REQUEUE_STATUS = 75
_noticed = threading.Event()
_leaving = threading.Event()
# How long one question to the coordination service lasts, and so the longest that the end of the process waits.
_PATIENCE = 2.0
_points: list[StopPoint] = []


class StopPoint:
    """Whether the job is to stop, asked once in every step by all processes.

    Args:
        grace: how many further steps to let pass.

    >>> StopPoint().reached(1)
    False
    """

    def __init__(self, grace: int = 0) -> None:
        self._grace = grace
        self._lock = threading.Lock()
        self._last, self._stop_at = 0, None
        self._name = f"stopping {len(_points)}"  # made in the same order by all processes
        _points.append(self)
        _watch()

    def reached(self, step: int) -> bool:
        """Whether `step`, which grows from call to call, is the last; the same answer on all processes."""
        with self._lock:  # held by the agreement: no step is passed meanwhile
            self._last = step
            if self._stop_at is None and _noticed.is_set() and jax.process_count() == 1:
                self._stop_at = step + self._grace
            return self._stop_at is not None and step >= self._stop_at

    def _agree(self) -> None:
        with self._lock:
            latest = exchange(self._name, str(self._last), lambda said: str(max(map(int, said))))
            self._stop_at = 1 + self._grace + int(latest)


@functools.cache
def _watch() -> None:
    """Starts to listen, once for the process."""
    client = _compat.coordination_client()
    if client is not None and jax.process_count() > 1:
        thread = threading.Thread(target=_wait_for_notice, args=(client,), name="zerojax-preemption", daemon=True)
        thread.start()
        atexit.register(_leave, thread)
    elif threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: _noticed.set())


def _leave(thread: threading.Thread) -> None:
    """Lets the thread end first: one that returns from C++ into an interpreter that is gone aborts the process."""
    _leaving.set()
    thread.join(2 * _PATIENCE)


def _wait_for_notice(client: Any) -> None:
    while not _compat.preemption_notice(client, seconds=_PATIENCE):
        if _leaving.is_set():
            return
    _noticed.set()
    done = 0
    while done < len(_points):
        _points[done]._agree()
        done += 1
