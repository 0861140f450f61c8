"""Differences between JAX versions (0.10 to 0.12) that the kernels meet; the only file that asks for the version."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])
MOSAIC_INTERPRETS = VERSION >= (0, 11)
MOSAIC_ON_AMPERE = VERSION >= (0, 11)
# The pass that runs the assembler is registered once, with the compute capability of the first kernel.
ONE_ASSEMBLER_A_PROCESS = VERSION >= (0, 11)

_assumed: list[tuple[int, int]] = []


@contextlib.contextmanager
def assume_compute_capability(major: int, minor: int = 0) -> Iterator[None]:
    """Compile Mosaic kernels for this compute capability while no such GPU is present.

    JAX assumes 9.0 when it compiles without a device. Needed only for deviceless compilation for another generation.
    """
    import jax.experimental.mosaic.gpu.core as core

    owner: Any = core if VERSION < (0, 11) else core.utils
    original = owner._infer_arch
    _assumed.append((major, minor))
    owner._infer_arch = lambda: _assumed[-1]
    try:
        yield
    finally:
        _assumed.pop()
        owner._infer_arch = original


def is_assumed() -> bool:
    """Whether kernels are compiled for a GPU that is only assumed."""
    return bool(_assumed)


def from_first_process(key: str, make: Callable[[], str]) -> str:
    """A text that the first process of a job makes and the others take from it, without a device being asked.

    All processes trace the same programs and so ask for the same keys, each once.

    Raises:
        RuntimeError: the first process has not answered within ten minutes.
    """
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None or jax.process_count() == 1:
        return make()
    if jax.process_index() == 0:
        made = make()
        client.key_value_set(key, made)
        return made
    try:
        return client.blocking_key_value_get(key, 600_000)
    except Exception as error:
        raise RuntimeError(
            f"the first process has not said within ten minutes whether it takes {key}: do all processes run the same "
            "program? Inside kernel_policy('never'), or 'always', nobody is asked"
        ) from error


def target_device() -> tuple[str | None, tuple[int, int] | None]:
    """``(platform kind, compute capability)`` the program is traced for, each None where it cannot be known.

    Inside `jax.shard_map` the mesh knows its devices. Elsewhere a process with a GPU compiles for that GPU; a process
    without one may be compiling for an absent one.
    """
    if _assumed:
        return "gpu", _assumed[-1]
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    kind = getattr(device, "device_kind", None)
    if kind is not None and kind.lower() == "cpu":
        return "cpu", None
    default = jax.devices()[0]
    capability = getattr(default, "compute_capability", None)
    if default.platform == "gpu" and capability and "gfx" not in capability:
        major, minor = capability.split(".")
        return "gpu", (int(major), int(minor))
    return ("gpu", None) if kind else (None, None)


def load(ref: Any, layout: Any) -> jax.Array:
    """Reads a global-memory ref into registers of the given layout."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    read: Any = plgpu.load  # its signature differs between the versions
    index = () if VERSION >= (0, 11) else ((),)
    return read(ref, *index, layout=layout, optimized=False)


def store(ref: Any, value: jax.Array) -> None:
    """Writes registers to a global-memory ref."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    if VERSION >= (0, 12):
        plgpu.store(ref, value, optimized=False)  # type: ignore[attr-defined]
    else:
        ref[...] = value


def interpret_params() -> Any:
    """The value of ``interpret=`` that runs a Mosaic kernel on the CPU."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams()  # type: ignore[attr-defined]


def mosaic_kernel(body: Callable[..., None], out_type: list[Any], grid: tuple[int, ...], interpret: bool) -> Any:
    """A Mosaic GPU kernel over a one-dimensional grid named "i"."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    mode: dict[str, Any] = {"interpret": interpret_params()} if interpret else {}
    return plgpu.kernel(body, out_type=out_type, grid=grid, grid_names=("i",), **mode)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes over which a value is typed as varying (none outside `jax.shard_map` or without ``check_vma``)."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The value typed as varying over at least ``axes``."""
    missing = axes - varying_axes(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x
