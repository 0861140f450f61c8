"""What a compiled program sends between devices, when, and what it holds: read from the program itself, not predicted.

`read_program` walks the optimised, scheduled HLO of a compiled step and returns every collective with the array it
moves, its element type on the wire, the mesh axes it spans, the loops around it and what is computed while it is under
way; the compiler's memory figures; and the FLOP of matrix products, since XLA gives no cost analysis for a target GPU
(2 times the elements of the result times the contracted length, times the iterations of the loops around; kernels that
XLA cannot look into, such as attention in cuDNN or Pallas, are not counted, recomputation is). `expect_collectives`
pins collectives in a test. A program for CPU can be read too, but its element types are not those of a GPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from zerojax.hlo.collective import Collective, Traffic
from zerojax.hlo.steps import Step, all_collectives, program_steps, total_flops
from zerojax.hlo.text import Module, hlo_dtype, parse_module


@dataclasses.dataclass(frozen=True)
class MemoryFigures:
    """Bytes of one device, from the compiler's own assignment of buffers.

    Attributes:
        argument: arguments of the step (host-memory arguments too, where the compiler counts them so).
        output: results.
        alias: results that reuse a donated argument's buffer.
        temp: everything between: activations, gathered weights, gradients.
        generated_code: the machine code.
        host_temp: temporaries kept in host memory.
        peak: the compiler's own figure for the highest use, where it gives one; what it takes in differs by version.
    """

    argument: int
    output: int
    alias: int
    temp: int
    generated_code: int
    host_temp: int
    peak: int | None

    @property
    def total(self) -> int:
        """Bytes a device must have: arguments, temporaries, code, and results that reuse no argument."""
        return self.argument + self.output - self.alias + self.temp + self.generated_code


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled program's collectives and memory.

    Attributes:
        collectives: in the order of the schedule, inner computations where they are called. Those whose groups are of
            one device send nothing and are left out.
        memory: the compiler's memory figures; None for a program read from text.
        mesh_shape: mesh axis names and sizes, outermost first.
        node_axes: the axes along which nodes are counted.
        num_devices: devices the program runs on.
        matmul_flops: FLOP of one device per call in matrix products and convolutions; all branches count.
        steps: kernels, collectives and loops in the order in which a device comes to them.
        module: the text as read.

    >>> program = read_program(jax.jit(lambda x: 2 * x).lower(jax.ShapeDtypeStruct((8,), "float32")).compile())
    >>> program.select("all-gather"), program.received_bytes()
    ((), 0)
    """

    collectives: tuple[Collective, ...]
    memory: MemoryFigures | None
    mesh_shape: Mapping[str, int]
    node_axes: tuple[str, ...]
    num_devices: int
    matmul_flops: int
    steps: tuple[Step, ...] = dataclasses.field(repr=False)
    module: Module = dataclasses.field(repr=False, compare=False)

    def select(
        self,
        kind: str | Iterable[str] | None = None,
        *,
        axes: str | Iterable[str] | None = None,
        dtype: Any = None,
        min_bytes: int = 0,
        in_loop: bool | None = None,
        phase: str | None = None,
        asynchronous: bool | None = None,
    ) -> tuple[Collective, ...]:
        """Collectives that fit all conditions given.

        Args:
            kind: one kind, or several.
            axes: exactly these mesh axes, in any order (axes of size one do not count).
            dtype: an element type among those on the wire, in JAX's name, or HLO's.
            min_bytes: least `payload_bytes`.
            in_loop: only those inside a loop, or only those outside.
            phase: "forward", "backward" or "other".
            asynchronous: only asynchronous ones, or only blocking ones.
        """
        kinds = {kind} if isinstance(kind, str) else kind if kind is None else set(kind)
        wanted = None
        if axes is not None:
            wanted = {axes} if isinstance(axes, str) else set(axes)
            if unknown := wanted - set(self.mesh_shape):
                raise ValueError(f"axes {sorted(unknown)} are not in the mesh {dict(self.mesh_shape)}")
            wanted = {axis for axis in wanted if self.mesh_shape[axis] > 1}
        element = None if dtype is None else hlo_dtype(dtype)
        return tuple(
            one
            for one in self.collectives
            if (kinds is None or one.kind in kinds)
            and (wanted is None or set(one.axes) == wanted)
            and (element is None or element in one.dtypes)
            and one.payload_bytes >= min_bytes
            and (in_loop is None or one.in_loop == in_loop)
            and (phase is None or one.phase == phase)
            and (asynchronous is None or one.asynchronous == asynchronous)
        )

    def received_bytes(self, kind: str | Iterable[str] | None = None, **conditions: Any) -> int:
        """Bytes one device receives per call, over the collectives `select` finds; all branches count."""
        return sum(one.received_bytes * one.executions for one in self.select(kind, **conditions))

    def node_bytes(self, kind: str | Iterable[str] | None = None, **conditions: Any) -> int:
        """Bytes that enter each node per call, over the collectives `select` finds; see `entering_node`."""
        return sum(one.node_bytes * one.executions for one in self.select(kind, **conditions))

    def traffic(self) -> tuple[Traffic, ...]:
        """The collectives added up by phase, kind, axes, element types, loop and mode."""
        sorts: dict[tuple[Any, ...], list[Collective]] = {}
        for one in self.collectives:
            sort = (one.phase, one.kind, one.axes, one.dtypes, one.in_loop, one.mode)
            sorts.setdefault(sort, []).append(one)
        return tuple(
            Traffic(
                *sort,
                executions=sum(one.executions for one in group),
                received_bytes=sum(one.received_bytes * one.executions for one in group),
                node_bytes=sum(one.node_bytes * one.executions for one in group),
                count=len(group),
            )
            for sort, group in sorts.items()
        )


def read_program(
    program: jax.stages.Compiled | str,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | Mapping[str, int] | None = None,
    *,
    node_axes: Sequence[str] = ("node",),
) -> CompiledProgram:
    """Reads what a compiled program sends and holds.

    Args:
        program: `jax.jit(f).lower(*args).compile()`, or its `as_text()`.
        mesh: the mesh the program was compiled for, or its axis names and sizes, outermost first. Without it axes and
            nodes are not named.
        node_axes: mesh axes along which the node changes; a mesh with none of them is one node.

    Raises:
        ValueError: not the text of a program, or a mesh of another number of devices.

    >>> mesh = jax.make_mesh((1,), ("local",))
    >>> step = jax.jit(lambda x: jax.numpy.sin(x)).lower(jax.ShapeDtypeStruct((256,), "float32")).compile()
    >>> program = read_program(step, mesh)
    >>> program.collectives, program.memory.argument
    ((), 1024)
    """
    text = program if isinstance(program, str) else program.as_text()
    if text is None:
        raise ValueError("this backend gives no text for compiled programs: compile for CPU or GPU")
    module = parse_module(text)
    shape: dict[str, int] = {} if mesh is None else dict(mesh if isinstance(mesh, Mapping) else mesh.shape)
    if shape and math.prod(shape.values()) != module.num_devices:
        raise ValueError(
            f"the program runs on {module.num_devices} devices, but mesh {shape} has {math.prod(shape.values())}: "
            "pass the mesh that its shardings use"
        )
    nodes = tuple(axis for axis in shape if axis in node_axes)
    steps = program_steps(module, tuple(shape.items()), nodes)
    collectives = tuple(all_collectives(steps))
    memory = None if isinstance(program, str) else memory_figures(program)
    return CompiledProgram(collectives, memory, shape, nodes, module.num_devices, total_flops(steps), steps, module)


def memory_figures(compiled: jax.stages.Compiled) -> MemoryFigures | None:
    """The compiler's memory figures of a program; None where the backend gives none."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    names = ("argument", "output", "alias", "temp", "generated_code", "host_temp")
    return MemoryFigures(
        **{name: int(getattr(stats, f"{name}_size_in_bytes", 0)) for name in names},
        peak=int(getattr(stats, "peak_memory_in_bytes", 0)) or None,
    )


def expect_collectives(
    program: CompiledProgram,
    kind: str | Iterable[str] | None = None,
    *,
    count: int | None = None,
    executions: int | None = None,
    only_dtypes: Iterable[Any] | None = None,
    **conditions: Any,
) -> tuple[Collective, ...]:
    """Checks that a program has the collectives its author means it to have; for tests.

    The compiler may peel an iteration off a loop (5 executions inside, 1 outside) or write a loop's body twice, so that
    `executions` without `in_loop` is what stays the same from version to version; `count` is not.

    Args:
        program: from `read_program`.
        kind: see `CompiledProgram.select`.
        count: how many such instructions there must be; without it, at least one.
        executions: how often they must run in all, loops counted.
        only_dtypes: the element types that may be on the wire in them.
        **conditions: `axes`, `dtype`, `min_bytes`, `in_loop`, `phase`, `asynchronous`, as in `CompiledProgram.select`.

    Returns:
        The collectives found.

    Raises:
        AssertionError: with a list of what the program has instead.

    >>> text = '''HloModule tiny, is_scheduled=true, num_partitions=4
    ...
    ... ENTRY %main (x: bf16[8]) -> bf16[32] {
    ...   %x = bf16[8]{0} parameter(0)
    ...   ROOT %all = bf16[32]{0} all-gather(%x), replica_groups={}, dimensions={0}
    ... }
    ... '''
    >>> program = read_program(text, {"node": 2, "local": 2})
    >>> expect_collectives(program, "all-gather", axes=("node", "local"), only_dtypes=["bfloat16"])[0].received_bytes
    48
    """
    found = program.select(kind, **conditions)
    faults = []
    if count is None and executions is None and not found:
        faults.append("at least one instruction required, none found")
    if count is not None and len(found) != count:
        faults.append(f"{count} instructions required, {len(found)} found")
    if executions is not None and (runs := sum(one.executions for one in found)) != executions:
        faults.append(f"{executions} executions required, {runs} found")
    if only_dtypes is not None:
        allowed = {hlo_dtype(dtype) for dtype in only_dtypes}
        faults += [
            f"only {sorted(allowed)} allowed on the wire: {one}" for one in found if not set(one.dtypes) <= allowed
        ]
    if faults:
        asked = ", ".join(
            f"{key}={value!r}" for key, value in {"kind": kind, **conditions}.items() if value is not None
        )
        listing = "\n".join(f"  {'*' if one in found else ' '} {one}" for one in program.collectives) or "  none"
        raise AssertionError(
            f"collectives with {asked or 'no conditions'}:\n  "
            + "\n  ".join(faults)
            + f"\nthe program has (* fits the conditions):\n{listing}"
        )
    return found
