"""Processes agree, or all of them say where they differ: one exchange of short texts, before anything is computed.

A job in which one process has another batch shape, seed, path or library computes nonsense or waits for ever in a
collective. `agree` compares what each process says of itself over JAX's coordination service, which needs no device and
has time limits. With one process nothing is done.

What grows with P processes, in each agreement: process 0 reads P - 1 texts of about 1 kB and publishes one decision;
each other process writes one text and reads the decision, whatever P. No process reads what all others wrote. 4096
processes: 4095 reads and 4 MB at process 0, one after the other. Texts of earlier rounds are deleted.
"""

from __future__ import annotations

import collections
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from zerojax import _compat

# How long a process waits for the others. Longer than reading data or a slow file system makes them differ.
WAIT_SECONDS = 300
_rounds: collections.Counter[str] = collections.Counter()
_ERRORS: dict[str, type[Exception]] = {e.__name__: e for e in (ValueError, FileNotFoundError)}


def agree(
    what: str,
    facts: Mapping[str, Any],
    decide: Callable[[], str] | None = None,
    *,
    seconds: float = WAIT_SECONDS,
) -> str:
    """Compares facts over all processes; with one process it only decides.

    Args:
        what: what is about to happen, for messages ("the first step"); all processes call with the same.
        facts: what must be equal everywhere, by name. Long texts travel as a digest.
        decide: run by process 0 alone once the facts agree, for what only one may decide (the latest step, what a
            folder holds); what it raises is raised on all.
        seconds: how long to wait for the others.

    Returns:
        What process 0 decided; "" without `decide`.

    Raises:
        ValueError: a fact differs (field and processes are named), or a process does not come.

    >>> agree("a test", {"batch": (8, 2)}, lambda: "step 7")
    'step 7'
    """
    if jax.process_count() == 1 or _compat.coordination_client() is None:
        return decide() if decide is not None else ""

    def combine(said: list[str]) -> str:
        if difference := compare(what, dict(enumerate(map(json.loads, said)))):
            raise ValueError(difference)
        return decide() if decide is not None else ""

    return exchange(what, json.dumps({name: _short(str(value)) for name, value in facts.items()}), combine, seconds)


def exchange(what: str, text: str, combine: Callable[[list[str]], str], seconds: float = WAIT_SECONDS) -> str:
    """What process 0 makes of the texts of all processes, on every process.

    Args:
        what: as for `agree`.
        text: of this process. All of them go to process 0 and to no other.
        combine: run by process 0 on the texts, in the order of the processes; what it raises is raised on all.
        seconds: how long to wait for the others.

    Raises:
        ValueError: a process does not come; what `combine` raised.

    >>> exchange("a test", "mine", " ".join)
    'mine'
    """
    client = _compat.coordination_client()
    if jax.process_count() == 1 or client is None:
        return combine([text])
    rank, number = jax.process_index(), _rounds[what]
    _rounds[what] += 1
    room = f"zerojax/{what}/{number}"
    if rank:
        client.key_value_set(f"{room}/{rank}", text)
        # Process 0 waits for the slowest before it answers: its time, and some to spare.
        answer = _get(client, f"{room}/answer", 2 * seconds)
        if answer is None:
            raise ValueError(f"{what}: process 0 did not come within {2 * seconds:.0f} s; process {rank} waited")
    else:
        answer = _answer(client, what, room, text, combine, seconds)
        client.key_value_set(f"{room}/answer", answer)
        if number >= 2:  # all have read what came two rounds ago
            client.key_value_delete(f"zerojax/{what}/{number - 2}/")
    kind, _, text = answer.partition(":")
    if kind != "fine":
        raise _ERRORS[kind](text)
    return text


def _answer(client: Any, what: str, room: str, mine: str, combine: Callable[[list[str]], str], seconds: float) -> str:
    said, end = [mine], time.monotonic() + seconds
    for rank in range(1, jax.process_count()):
        text = _get(client, f"{room}/{rank}", max(end - time.monotonic(), 0.01))
        if text is None:
            return f"ValueError:{what}: process {rank} did not come within {seconds:.0f} s; process 0 waited"
        said.append(text)
    try:
        return f"fine:{combine(said)}"
    except tuple(_ERRORS.values()) as error:
        kind = next(name for name, known in _ERRORS.items() if isinstance(error, known))
        return f"{kind}:{error}"
    except Exception as error:
        return f"ValueError:{what}: process 0 failed: {type(error).__name__}: {error}"


def compare(what: str, said: Mapping[int, Mapping[str, str]]) -> str:
    """One sentence that names the first fields that differ and the processes on each side; "" if none does.

    >>> compare("save", {0: {"step": "1"}, 1: {"step": "2"}, 2: {"step": "1"}})
    'save: processes do not agree on step: 1 (processes 0, 2), 2 (process 1)'
    """
    parts = []
    for name in dict.fromkeys(name for facts in said.values() for name in facts):
        holders: dict[str, list[int]] = {}
        for rank, facts in said.items():
            holders.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            sides = [f"{value} ({_processes(ranks)})" for value, ranks in holders.items()]
            more = f" and {len(sides) - 4} more" if len(sides) > 4 else ""
            parts.append(f"{name}: {', '.join(sides[:4])}{more}")
    return f"{what}: processes do not agree on {'; '.join(parts)}" if parts else ""


def digest(value: Any) -> str:
    """A short name of a long value, the same in every process.

    >>> digest({"a": 1})
    '240f5ff9499f'
    """
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:120]}... (digest {digest(text)})"


def _processes(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"


def _get(client: Any, key: str, seconds: float) -> str | None:
    try:
        return client.blocking_key_value_get(key, int(1000 * seconds))
    except Exception as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise
