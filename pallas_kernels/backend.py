"""Which backend runs an op: one resolver for all of them, decided before anything is traced for a device.

    "xla"         the reference, on any device
    "mosaic_gpu"  the Pallas kernel (Hopper and Blackwell; Ampere and Ada on JAX 0.11 and later)
    None          per variant: the kernel where the program is lowered for CUDA and `choice` takes it, that is where it
                  is forced or was found equal and not slower on this device; the reference everywhere else

A backend answers a call described in static terms with a `Plan`: how to run it, or every reason why it cannot. A kernel
for an architecture that the compiler does not know aborts the process, hence the gate on the compute capability. An
explicit request that cannot be met is an error with every reason, never a silent fallback.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.core import Tracer

from pallas_kernels import _compat, choice

Implementation = Literal["xla", "mosaic_gpu"]
IMPLEMENTATIONS = ("xla", "mosaic_gpu")


def device_problems() -> list[str]:
    """Why a Mosaic GPU kernel cannot be compiled for the device at hand; empty if it can, or if none is known."""
    kind, capability = _compat.target_device()
    if kind == "cpu":
        return ["the program runs on a CPU; use interpret=True there, or implementation='xla'"]
    if capability is None:
        return []
    major = capability[0]
    if major in (9, 10) or (major == 8 and _compat.MOSAIC_ON_AMPERE):
        return []
    needs = "8.x, 9.x or 10.x" if _compat.MOSAIC_ON_AMPERE else "9.x or 10.x with this JAX version"
    return [f"compute capability {'.'.join(map(str, capability))} is not supported, it needs {needs}"]


def check_implementation(implementation: str | None) -> None:
    """Raises ValueError unless the name is known."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")


def run(
    op: str,
    variant: Any,
    implementation: str | None,
    interpret: bool,
    problems: Sequence[str],
    reference: Callable[..., Any],
    kernel: Callable[..., Any],
    *operands: Any,
) -> Any:
    """Runs ``reference`` or ``kernel`` on the operands.

    Args:
        op: the op's name, for messages.
        variant: what `choice` is asked about where nothing is said.
        implementation: as the user gave it.
        interpret: interpret the kernel on the CPU (a mode of "mosaic_gpu").
        problems: why the kernel cannot do this call, from its own checks; empty if it can.
        reference: function of the operands.
        kernel: function of the operands and the keyword ``interpret``; returns the same pytree as ``reference``.
        *operands: pytrees of arrays.

    Raises:
        ValueError: the name is unknown, or ``interpret`` goes with the reference.
        NotImplementedError: "mosaic_gpu" was asked for and cannot be had; lists every reason.
    """
    check_implementation(implementation)
    if interpret and implementation != "mosaic_gpu":
        raise ValueError(f"interpret=True is a mode of implementation='mosaic_gpu', got {implementation!r}")
    if implementation == "xla":
        return reference(*operands)
    reasons = list(problems)
    if implementation == "mosaic_gpu":
        if interpret and not _compat.MOSAIC_INTERPRETS:
            reasons.append("this JAX version cannot interpret Mosaic GPU kernels, it needs 0.11 or later")
        if not interpret:
            reasons += device_problems() or _concrete_on_cpu(operands)
        if reasons:
            raise NotImplementedError(
                f"{op}: implementation='mosaic_gpu' cannot do this call:\n- " + "\n- ".join(dict.fromkeys(reasons))
            )
        return kernel(*operands, interpret=interpret)
    if reasons or device_problems() or _concrete_on_cpu(operands) or not choice.takes_kernel(variant):
        return reference(*operands)
    # Decided at lowering: one traced program runs on a CPU and compiles ahead of time for a target GPU.
    return jax.lax.platform_dependent(*operands, cuda=lambda *args: kernel(*args, interpret=False), default=reference)


def _concrete_on_cpu(operands: Sequence[Any]) -> list[str]:
    """A reason if the op was called eagerly and its arrays live on a CPU."""
    for leaf in jax.tree.leaves(operands):
        concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        if concrete and any(device.platform == "cpu" for device in leaf.devices()):
            return ["the arrays live on a CPU; use interpret=True there, or implementation='xla'"]
    return []


def _refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a plan with problems was run")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The programs that a kernel runs; with its machine code they say what it costs (`sass`).

    Attributes:
        count: programs of the grid.
        elements: of the result that one program makes.
        trips: how often the loop of a program runs; 1 without a loop.
        loads_shared: by the bytes of a load, lanes that read the same address, which costs one transaction.
        stores_shared: the same for stores.
    """

    count: int
    elements: int
    trips: int = 1
    loads_shared: Mapping[int, int] = dataclasses.field(default_factory=dict)
    stores_shared: Mapping[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A kernel for one static description of a call.

    Attributes:
        problems: why the kernel cannot do the call; empty if it can.
        run: function of the operands and the keyword ``interpret``.
        programs: what runs; None where there are problems.
    """

    problems: tuple[str, ...]
    run: Callable[..., Any] = _refuse
    programs: Programs | None = None
