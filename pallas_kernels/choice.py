"""Whether the kernel of a variant runs where nothing was said: the first GPU decides.

The first use of a variant on a GPU compiles kernel and reference, compares them bit for bit and times both
(`selfcheck`); the kernel is taken where it is equal and not slower. The decision holds for the process, and lies in a
small file for the next one: of this device kind, driver, JAX version and package, and of no other. Within a job the
first process decides and the others follow, as all must run one program. Knows neither ops nor kernels.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax

from pallas_kernels import _compat

Policy = Literal["auto", "always", "never"]
POLICIES = ("auto", "always", "never")
VARIABLE, CACHE_VARIABLE = "PALLAS_KERNELS", "PALLAS_KERNELS_CACHE"


class KernelNotice(UserWarning):
    """A kernel was not taken although the device could run it: it differed from the reference, or failed."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """What the check of one variant found.

    Attributes:
        takes_kernel: whether the kernel runs.
        reason: in words: "equal, 0.42 of XLA's time", or why not.
        ratio: time of the kernel over that of XLA's program, on this device in one run; None where it was not timed.
        faulty: the kernel differed or failed, which is to be reported.
        bytes_per_second: what the kernel must read and write, by its time on the real-size input.
    """

    takes_kernel: bool
    reason: str
    ratio: float | None = None
    faulty: bool = False
    bytes_per_second: float | None = None


@dataclasses.dataclass(frozen=True)
class Probe:
    """The device on which a kernel can be checked.

    Attributes:
        kind: as the driver names it.
        driver: version of the driver or platform.
        sizes: elements of a small and of a real-size input.
        how: keywords with which an op runs its kernel there.
    """

    kind: str
    driver: str
    sizes: tuple[int, int] = (1 << 17, 1 << 25)
    how: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"implementation": "mosaic_gpu"})


def probe() -> Probe | None:
    """The GPU of this process that can be asked, or None: on CPUs, and while compiling for a target GPU."""
    kind, capability = _compat.target_device()
    device = jax.local_devices()[0]
    if kind != "gpu" or capability is None or device.platform != "gpu" or _compat.is_assumed():
        return None
    return Probe(device.device_kind, str(device.client.platform_version))


_policy: contextvars.ContextVar[Policy] = contextvars.ContextVar("pallas_kernels_policy", default="auto")
_preferred: bool | None = None
_changes = 0
_agreed: dict[int, Policy] = {}
_decisions: dict[tuple[str, str], Decision] = {}
_deciding = threading.RLock()


def prefer_kernels(enabled: bool | None = True) -> bool | None:
    """Says for the process whether `implementation=None` means the kernels: True, False, or None for the check.

    Call it before the first trace: programs that are compiled already keep what they have.

    Returns:
        The setting before.

    >>> before = prefer_kernels()
    >>> prefer_kernels(before)
    True
    """
    global _preferred, _changes
    before, _preferred = _preferred, enabled
    _changes += 1
    return before


@contextlib.contextmanager
def kernel_policy(policy: Policy) -> Iterator[None]:
    """What is traced inside takes its kernels so: "auto" (as outside), "always" where there is one, or "never".

    >>> with kernel_policy("never"):
    ...     policy_here()
    'never'
    """
    check_policy(policy)
    token = _policy.set(policy if policy != "auto" else _policy.get())
    try:
        yield
    finally:
        _policy.reset(token)


def check_policy(policy: str) -> None:
    """Raises ValueError unless the policy is known."""
    if policy not in POLICIES:
        raise ValueError(f"kernels must be one of {POLICIES}, got {policy!r}")


def policy_here() -> Policy:
    """The policy of what is traced now: of `kernel_policy`, else of `prefer_kernels`, else of PALLAS_KERNELS."""
    if (given := _policy.get()) != "auto":
        return given
    if _preferred is not None:
        return "always" if _preferred else "never"
    named = os.environ.get(VARIABLE, "auto")
    if named not in POLICIES:
        raise ValueError(f"the environment variable {VARIABLE} must be one of {POLICIES}, got {named!r}")
    return named


def policy_of_the_job() -> Policy:
    """`policy_here`, as the first process of a job has it: one with another environment follows, with a notice.

    What `kernel_policy` says stays: it comes from the program, which is the same in all processes.
    """
    mine = policy_here()
    if _policy.get() != "auto" or jax.process_count() == 1:
        return mine
    with _deciding:
        if _changes not in _agreed:
            given = _compat.from_first_process(f"pallas_kernels/policy/{_changes}", lambda: mine)
            if given != mine:
                warnings.warn(
                    f"process {jax.process_index()} has kernels {mine!r} (prefer_kernels, or {VARIABLE} in the "
                    f"environment), the first process {given!r}, which holds for all: one program runs everywhere",
                    KernelNotice,
                    stacklevel=2,
                )
            check_policy(given)
            _agreed[_changes] = given  # type: ignore[assignment]
        return _agreed[_changes]


def takes_kernel(variant: Any) -> bool:
    """Whether ``implementation=None`` means the kernel of a variant in a program that is lowered for CUDA.

    Args:
        variant: hashable description of the call without its shapes; its string names it.
    """
    policy = policy_of_the_job()
    return policy == "always" or (policy == "auto" and decision(variant).takes_kernel)


def decision(variant: Any) -> Decision:
    """What the check says of a variant on this device; made at first use, never twice in a process."""
    device = probe()
    if device is None:
        return Decision(False, "no GPU here to check it on")
    identity, name = identity_of(device), str(variant)
    with _deciding:
        if (identity, name) not in _decisions:
            given = _compat.from_first_process(
                f"pallas_kernels/{name}", lambda: json.dumps(dataclasses.asdict(_made(variant, device, identity)))
            )
            _decisions[identity, name] = Decision(**json.loads(given))
            _report(name, device, _decisions[identity, name])
        return _decisions[identity, name]


def decisions() -> dict[str, Decision]:
    """The decisions of this process by the names of their variants."""
    return {name: found for (_, name), found in _decisions.items()}


def _made(variant: Any, device: Probe, identity: str) -> Decision:
    if (kept := _read_decision(read_cache().get(identity, {}).get(str(variant)))) is not None:
        return kept
    from pallas_kernels import selfcheck  # it runs the ops, which ask here

    # In a thread of its own: what is traced at the moment is no part of it.
    found = _in_a_thread(lambda: selfcheck.check(variant, device))
    write_cache(identity, str(variant), found)
    return found


def _read_decision(kept: Any) -> Decision | None:
    """A decision of the file; None where it is none: whoever wrote it, a word for a truth value must not decide."""
    if not isinstance(kept, dict) or kept.keys() != {field.name for field in dataclasses.fields(Decision)}:
        return None
    numbers = (kept["ratio"], kept["bytes_per_second"])
    right = isinstance(kept["takes_kernel"], bool) and isinstance(kept["faulty"], bool)
    right = right and isinstance(kept["reason"], str) and all(x is None or isinstance(x, float) for x in numbers)
    return Decision(**kept) if right and not (kept["takes_kernel"] and kept["faulty"]) else None


def _in_a_thread(function: Callable[[], Decision]) -> Decision:
    results: list[Decision] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0] if results else Decision(False, "the check itself failed", faulty=True)


def _report(name: str, device: Probe, found: Decision) -> None:
    if found.faulty:
        warnings.warn(
            f"the kernel {name} is not taken on {device.kind} ({device.driver}, JAX {jax.__version__}): "
            f"{found.reason}. XLA's program runs instead, with the values it always had. Please report this line",
            KernelNotice,
            stacklevel=2,
        )


def identity_of(device: Probe) -> str:
    """What a decision holds for: device kind, driver, JAX, and the sources of this package."""
    return f"{device.kind} | {device.driver} | jax {jax.__version__} | pallas_kernels {_sources()}"


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        digest.update(importlib.metadata.version("jaxlib").encode())
    return digest.hexdigest()[:16]


def cache_path() -> Path:
    """The file of decisions: readable, safe to delete; PALLAS_KERNELS_CACHE names another."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    if sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches"
    elif os.name == "nt":
        folder = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "pallas_kernels" / "decisions.json"


def read_cache() -> dict[str, dict[str, Any]]:
    """Decisions of the file by identity and variant; empty where there is none that can be read."""
    try:
        found = json.loads(cache_path().read_text())
    except (OSError, ValueError, RuntimeError):
        return {}
    return found if isinstance(found, dict) and all(isinstance(v, dict) for v in found.values()) else {}


def write_cache(identity: str, name: str, found: Decision) -> None:
    """Adds a decision to the file, which is replaced whole; one that cannot be written is left alone."""
    with contextlib.suppress(OSError, RuntimeError):
        path = cache_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        everything = read_cache()
        everything.setdefault(identity, {})[name] = dataclasses.asdict(found)
        # Home folders are shared between machines, on which processes have equal numbers.
        beside = path.with_name(f"{path.name}.{platform.node()}.{os.getpid()}")
        try:
            beside.write_text(json.dumps(everything, indent=1, sort_keys=True))
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)  # a full disk leaves half a file
