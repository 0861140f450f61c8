"""One collective of a compiled program: the arrays it moves, between which devices, and the bytes that takes.

The bytes are those of the best algorithm, with k devices in a group and S the bytes of the global array (the result of
an all-gather, the operand of all others). Each device receives: all-gather, reduce-scatter and all-to-all (k-1)/k S,
all-reduce 2 (k-1)/k S, permute and broadcast S. What enters a node is stated at `entering_node`, which predictions use
too, so that a prediction and a program are counted alike.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from zerojax.hlo.schedule import Loop, Visit, arrays_of, collective_kind, mode_of, name_stack
from zerojax.hlo.text import ArrayShape, parse_groups


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program; shapes and bytes are those of one device and one execution.

    Attributes:
        kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", ..
        name: the instruction's name in the HLO text.
        operands: arrays each device puts in; more than one where the compiler combined collectives.
        results: arrays each device gets out.
        groups: device numbers (position in the flat mesh) of each group; of a permute, its (source, target) pairs.
        axes: mesh axes along which a group extends, in mesh order; empty without a mesh.
        loops: loops around it, outermost first.
        in_conditional: whether it stands in a branch, and so may not run.
        asynchronous: whether the program goes on after starting it. Otherwise everything waits.
        overlapped: names of the computing instructions issued between start and done (bookkeeping on scalars left out).
        overlaps_matmul: whether a matrix product is among them.
        pipelined: whether the compiler moved it into another iteration of its loop.
        op_name: JAX's name stack, of the instruction or, where the compiler made it, of what is around it.
        node_bytes: bytes that enter one node (the one that receives most).
    """

    kind: str
    name: str
    operands: tuple[ArrayShape, ...]
    results: tuple[ArrayShape, ...]
    groups: tuple[tuple[int, ...], ...] = dataclasses.field(repr=False)
    axes: tuple[str, ...]
    loops: tuple[Loop, ...]
    in_conditional: bool
    asynchronous: bool
    overlapped: tuple[str, ...]
    overlaps_matmul: bool
    pipelined: bool
    op_name: str
    node_bytes: int

    @property
    def group_size(self) -> int:
        """Devices that exchange data with each other: the largest group, 2 for a permute."""
        return max(map(len, self.groups))

    @property
    def operand_bytes(self) -> int:
        """Bytes one device puts in."""
        return sum(shape.num_bytes for shape in self.operands)

    @property
    def result_bytes(self) -> int:
        """Bytes one device gets out."""
        return sum(shape.num_bytes for shape in self.results)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the full array: the larger of operand and result."""
        return max(self.operand_bytes, self.result_bytes)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """HLO element types on the wire, the one with most bytes first."""
        by_bytes: dict[str, int] = {}
        for shape in self.operands:
            by_bytes[shape.dtype] = by_bytes.get(shape.dtype, 0) + shape.num_bytes
        return tuple(sorted(by_bytes, key=lambda dtype: -by_bytes[dtype]))

    @property
    def received_bytes(self) -> int:
        """Bytes one device receives from others, in one execution; the model is in the module's docstring."""
        k = self.group_size
        match self.kind:
            case "all-gather":
                return self.operand_bytes * (k - 1)
            case "reduce-scatter" | "all-to-all" | "ragged-all-to-all":
                return math.ceil(self.operand_bytes * (k - 1) / k)
            case "all-reduce":
                return math.ceil(2 * self.operand_bytes * (k - 1) / k)
        return self.result_bytes if k > 1 else 0

    @property
    def executions(self) -> int:
        """How often it runs in a usual call of the program; a loop of unknown length counts as one iteration."""
        if self.is_seldom:
            return 0
        return math.prod(loop.trip_count or 1 for loop in self.loops)

    @property
    def is_seldom(self) -> bool:
        """Whether no usual step runs it: a replica of weights gathered anew since these were edited or restored."""
        return "gathered_anew" in self.op_name

    @property
    def in_loop(self) -> bool:
        """Whether it stands in a loop."""
        return bool(self.loops)

    @property
    def phase(self) -> str:
        """ "backward" (recomputation too), "forward" (changes of weights too) or "other", by JAX's name stack."""
        if "transpose(" in self.op_name or "rematted_computation" in self.op_name:
            return "backward"
        return "forward" if "jvp(" in self.op_name or "weight_deltas" in self.op_name else "other"

    @property
    def mode(self) -> str:
        """ "overlapped" (computing goes on), "asynchronous" or "blocking"."""
        return ("overlapped" if self.overlapped else "asynchronous") if self.asynchronous else "blocking"

    def __str__(self) -> str:
        arrays = ", ".join(map(str, self.operands))
        loops = " in loop x " + " x ".join(str(loop.trip_count or "?") for loop in self.loops) if self.loops else ""
        return (
            f"{self.kind} over {'+'.join(self.axes) or 'no axis'} (groups of {self.group_size}) of {arrays}, "
            f"{self.payload_bytes} bytes in all{loops}, {self.mode}, {self.phase}: {self.name}"
        )


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one sort, together, per call of the program: as compiled, or as predicted of one leaf or of all.

    Attributes:
        phase: "forward", "backward" (with recomputation), "other" or, of a step, "update" (all that follows).
        kind: of collective, as in `Collective`.
        axes: mesh axes of more than one device, outermost first.
        dtypes: element types on the wire; a predicted "int8" and "int4" with their scales.
        in_loop: whether inside a loop.
        mode: "overlapped" (computing goes on), "asynchronous", "blocking"; "" where nothing was compiled.
        executions: how often collectives of the sort run.
        received_bytes: bytes into each device.
        node_bytes: bytes into each node; as many leave it.
        count: instructions of a compiled program.
        pass_bytes: bytes of device memory read and written to quantise and dequantise, where predicted.
        path: key path of the leaf that it is predicted for.
    """

    phase: str
    kind: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    in_loop: bool
    mode: str
    executions: int
    received_bytes: int
    node_bytes: int
    count: int = 0
    pass_bytes: int = 0
    path: str = ""

    @property
    def dtype(self) -> str:
        """The element type with most bytes on the wire."""
        return self.dtypes[0]

    def __str__(self) -> str:
        return (
            f"{self.phase:8} {self.kind:18} {'+'.join(self.axes) or 'no axis':12} {'+'.join(self.dtypes):10} "
            f"{'loop' if self.in_loop else 'once':4} {self.mode:12} "
            f"{self.count} instructions, {self.executions} executions, "
            f"{self.received_bytes} bytes into a device, {self.node_bytes} into a node"
        )


def describe_collective(
    visit: Visit,
    mesh: tuple[tuple[str, int], ...],
    node_axes: tuple[str, ...],
    num_devices: int,
    multiplying: frozenset[str],
) -> Collective:
    """Works out groups, axes, mode and bytes of a collective.

    Args:
        visit: the collective where the schedule reaches it.
        mesh: axis names and sizes, outermost first; empty when not known.
        node_axes: the axes along which the node changes.
        num_devices: devices of the program.
        multiplying: from `schedule.multiplying_computations`.
    """
    line = visit.instruction
    kind = collective_kind(line) or line.opcode
    operands, results = arrays_of(visit)
    mode = mode_of(visit, multiplying)
    if kind == "collective-permute":
        _, _, printed = line.attributes.partition("source_target_pairs=")
        groups = parse_groups(printed, num_devices) if not printed.startswith("{}") else ((0,),)
    else:
        groups = parse_groups(line.attributes, num_devices)
    operand_bytes = sum(shape.num_bytes for shape in operands)
    return Collective(
        kind=kind,
        name=line.name,
        operands=operands,
        results=results,
        groups=groups,
        axes=spanned_axes(groups, mesh),
        loops=visit.loops,
        in_conditional=visit.in_conditional,
        asynchronous=mode.asynchronous,
        overlapped=mode.overlapped,
        overlaps_matmul=mode.overlaps_matmul,
        pipelined='"is_pipelined":true' in line.attributes,
        op_name=name_stack(visit),
        node_bytes=entering_node(kind, operand_bytes, groups, mesh, node_axes),
    )


@functools.lru_cache(maxsize=4096)
def spanned_axes(groups: tuple[tuple[int, ...], ...], mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """Mesh axes along which the devices of some group differ.

    Args:
        groups: device numbers, each a position in the flat mesh.
        mesh: axis names and sizes, outermost first.

    >>> spanned_axes(((0, 4), (1, 5), (2, 6), (3, 7)), (("node", 2), ("local", 4)))
    ('node',)
    """
    spanned = set()
    for group in groups:
        place = np.unravel_index(np.array(group), [size for _, size in mesh]) if mesh else ()
        spanned |= {axis for (axis, _), index in zip(mesh, place, strict=True) if (index != index[0]).any()}
    return tuple(axis for axis, _ in mesh if axis in spanned)


@functools.lru_cache(maxsize=4096)
def entering_node(
    kind: str,
    operand_bytes: int,
    groups: tuple[tuple[int, ...], ...],
    mesh: tuple[tuple[str, int], ...],
    node_axes: tuple[str, ...],
) -> int:
    """Bytes that must enter one node for a collective, by the best algorithm; of unequal nodes the one that gets most.

    Of a group with c of its k devices in this node and the others on m - 1 more, o operand bytes on each device:

    - all-gather: (k - c) o, as every foreign piece enters once and is passed on inside. Over the node axis alone
      (c = 1) that is (n-1)/n of the result for each of the node's groups, over a whole flat mesh (n-1)/n of it in all.
    - reduce-scatter, whose sums are first formed inside each node: (m - 1) c o / k. All-reduce, twice that.
    - all-to-all, where nothing can be shared: c (k - c) o / k.
    - permute and broadcast: o for each device whose data comes from another node.

    Args:
        kind: of collective.
        operand_bytes: o.
        groups: device numbers.
        mesh: axis names and sizes, outermost first.
        node_axes: the axes along which the node changes.

    >>> entering_node("all-gather", 100, ((0, 1, 2, 3),), (("node", 2), ("local", 2)), ("node",))
    200
    """
    sizes = [size for _, size in mesh]
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    total: dict[int, float] = {}
    for group in groups:
        node = [
            sum(
                device // stride % size * stride
                for (axis, size), stride in zip(mesh, strides, strict=True)
                if axis in node_axes
            )
            for device in group
        ]
        k, present = len(group), {place: node.count(place) for place in node}
        for place, c in present.items():
            match kind:
                case "all-gather":
                    entering = (k - c) * operand_bytes
                case "reduce-scatter":
                    entering = (len(present) - 1) * c * operand_bytes / k
                case "all-reduce":
                    entering = 2 * (len(present) - 1) * c * operand_bytes / k
                case "all-to-all" | "ragged-all-to-all":
                    entering = c * (k - c) * operand_bytes / k
                case "collective-permute":
                    entering = operand_bytes if place == node[-1] != node[0] else 0
                case _:
                    entering = operand_bytes if place != node[0] else 0
            total[place] = total.get(place, 0) + entering
    return math.ceil(max(total.values(), default=0))


_UNIT = 1 << 20


@functools.lru_cache(maxsize=256)
def node_share(kind: str, axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...], num_nodes: int) -> float:
    """Bytes that enter a node for each byte that a device receives, in a collective over some axes.

    Args:
        kind: of collective.
        axes: that it spans.
        mesh: axis names and sizes, outermost first; devices are numbered node by node.
        num_nodes: machines, which divide the devices into consecutive parts.

    >>> node_share("all-gather", ("node",), (("node", 48), ("local", 8)), 48)
    8.0
    """
    k = math.prod(size for axis, size in mesh if axis in axes)
    if k == 1:
        return 0.0
    received = {"all-gather": k - 1, "all-reduce": 2 * (k - 1) / k}.get(kind, (k - 1) / k) * k * _UNIT
    per_node = math.prod(size for _, size in mesh) // num_nodes
    machines = (("node", num_nodes), ("in node", per_node))
    return entering_node(kind, k * _UNIT, _groups(axes, mesh), machines, ("node",)) / received


@functools.lru_cache(maxsize=64)
def _groups(axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...]) -> tuple[tuple[int, ...], ...]:
    """Device numbers of the groups that a collective over some axes forms."""
    numbers = np.arange(math.prod(size for _, size in mesh)).reshape([size for _, size in mesh])
    inside = [d for d, (axis, _) in enumerate(mesh) if axis in axes]
    outside = [d for d, (axis, _) in enumerate(mesh) if axis not in axes]
    k = math.prod(mesh[d][1] for d in inside)
    return tuple(tuple(map(int, group)) for group in numbers.transpose([*outside, *inside]).reshape(-1, k))
