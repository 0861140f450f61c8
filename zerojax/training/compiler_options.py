"""Options of XLA that decide when collectives run, in one table keyed by the version of JAX.

The order of gathers and reductions is the program's own, by data dependence; what is left to the compiler is how many
may be in flight and whether a loop's are moved into the iteration before. Names change between releases, and a name
that the compiler does not know ends the compilation (in XLA_FLAGS: the process), so each entry says since when it is
there; one test compiles with each. "Seen here" are steps of an 18B GPT (stage 3, 48 x 8 H100, 400 GB/s into a node)
compiled ahead of time and replayed as scheduled; nobody has timed them on GPUs.

Where a GPU is at hand, profile-guided scheduling needs no option of ours: `JAX_ENABLE_PGLE=true` in the environment
profiles the first steps of a `jax.jit` function and compiles it again with the times found (docs.jax.dev, "GPU
performance tips"); it has no effect on a step compiled ahead of time.

Left as it is: `xla_gpu_enable_analytical_sol_latency_estimator`, on by default in 0.12 for H100. Without it the
scheduler takes all collectives for equally long: 0.781 -> 0.930 s, half of the communication hidden instead of 87 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerojax import _compat
from zerojax.layout.layout import Layout
from zerojax.layout.mesh import is_of_gpus, prefetch_window

Value = bool | int | str


class CompilerOption(NamedTuple):
    """One thing to ask of the compiler.

    Attributes:
        safe: whether it is given without being asked for.
        does: what changes in the program.
        seen: what it was seen to do, here and by others, with the source.
        values: names and values for the compiler, by the first version of JAX that takes them, oldest first.
    """

    safe: bool
    does: str
    seen: str
    values: Mapping[tuple[int, int], Mapping[str, Value]]


_WINDOW = "prefetch_bytes"  # stands for the bytes that a layout gathers ahead

OPTIONS: Mapping[str, CompilerOption] = {
    "latency_hiding": CompilerOption(
        safe=True,
        does="schedules collectives around compute instead of where they are written",
        seen="set in NVIDIA's containers (docs.nvidia.com/jax-toolbox, environment variables); named so that another "
        "default of the compiler cannot expose every gather",
        values={(0, 10): {"xla_gpu_enable_latency_hiding_scheduler": True}},
    ),
    "merged_messages": CompilerOption(
        safe=True,
        does="merges the gathers of a layer, and the reductions, into one message each, up to the bytes of "
        "`ZeroConfig(prefetch_bytes=...)`; XLA's own bound is far below a layer",
        seen="here 0.96 -> 0.78 s with the next layer gathered ahead, scanned: one collective is in flight at a time, "
        "so that of four gathers of a layer one was hidden. Unrolled under checkpoint: 1.05 times the ideal step; "
        "eight layers without: 1.21 (1.28 on 0.10)",
        values={
            (0, 10): {
                "xla_gpu_all_gather_combine_threshold_bytes": _WINDOW,
                "xla_gpu_reduce_scatter_combine_threshold_bytes": _WINDOW,
                "xla_gpu_enable_all_gather_combine_by_dim": False,
                "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
            }
        },
    ),
    "double_buffering": CompilerOption(
        safe=False,
        does="compiles two iterations of a loop as one, so that what is carried to the next changes buffers instead of "
        "being copied; twice the code of each loop to compile",
        seen="here, on 0.12, 0.781 -> 0.760 s: a layer's weights and gradient are copied no more, and 5.59 GB of "
        "temporaries instead of 5.63. Combined with other options it interacts (marin#8054)",
        values={(0, 10): {"xla_gpu_enable_while_loop_double_buffering": True}},
    ),
    "parallel_collectives": CompilerOption(
        safe=False,
        does="lets four collectives be in flight instead of one, so that hops inside and between nodes overlap",
        seen="here 1.07 -> 0.87 s with `prefetch_bytes=None`, and no gain with prefetch (0.781 s both); elsewhere +0.3 "
        "to +0.65 % on GB200 (marin-community/marin#8279), and 24 % slower with peer-write all-to-alls (marin#8077). "
        "Collectives that share two devices can deadlock when they overlap; the scheduler's guard against it came back "
        "in April 2026 (openxla/xla#40656, #40520)",
        values={(0, 10): {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}},
    ),
    "pipelined_gathers": CompilerOption(
        safe=False,
        does="moves the gathers of a loop into the iteration before, for one layer of weights more in memory",
        seen="here 1.07 -> 0.95 s and 1.6 GB more on 0.12; with parallel_collectives 0.77 s and 1.1 GB. Combined with "
        "other options it interacts (marin#8054)",
        values={
            (0, 10): {"xla_gpu_enable_pipelined_all_gather": True},
            (0, 12): {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"},
        },
    ),
    "pipelined_reductions": CompilerOption(
        safe=False,
        does="moves the reduce-scatters of a loop into the iteration after",
        seen="here, on 0.10 with the two options above, 0.98 -> 0.80 s",
        values={
            (0, 10): {"xla_gpu_enable_pipelined_reduce_scatter": True},
            (0, 12): {"xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_ON"},
        },
    ),
}


def compiler_options(layout: Layout, *, experimental: Sequence[str] = ()) -> dict[str, Value]:
    """Options for `jax.jit(step, compiler_options=...)` of a step under a layout.

    `make_train_step` passes the safe ones itself. JAX takes options at the outermost `jax.jit` alone.

    Args:
        layout: the layout of the parameters.
        experimental: names of further options: "double_buffering", "parallel_collectives", "pipelined_gathers",
            "pipelined_reductions" (`zerojax.training.compiler_options.OPTIONS` says of each what it does and what it
            was seen to do).

    Returns:
        Names and values as this version's compiler takes them; none where the mesh is not of GPUs, whose compilers
        refuse them, or has one device.

    Raises:
        ValueError: a name that is not in the table.

    >>> import jax
    >>> import zerojax
    >>> layout = zerojax.partition({"w": jax.numpy.ones((8,))}, zerojax.make_mesh(num_nodes=2, devices_per_node=4))
    >>> compiler_options(layout, experimental=["parallel_collectives"])  # a mesh of CPU devices
    {}
    """
    names = (experimental,) if isinstance(experimental, str) else tuple(experimental)
    if unknown := [name for name in names if name not in OPTIONS]:
        raise ValueError(f"compiler_options(experimental={unknown}): the names are {', '.join(map(repr, OPTIONS))}")
    if not is_of_gpus(layout.mesh) or layout.mesh.size == 1:
        return {}
    window = prefetch_window(layout.mesh, layout.config)
    found = [_at_this_version(option) for name, option in OPTIONS.items() if option.safe or name in names]
    return {
        key: window if window and value == _WINDOW else value
        for values in found if window or _WINDOW not in values.values() for key, value in values.items()
    }  # fmt: skip


def _at_this_version(option: CompilerOption) -> Mapping[str, Value]:
    known = [since for since in option.values if since <= _compat.jax_line()]
    return option.values[max(known)] if known else {}
