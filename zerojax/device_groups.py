"""Which devices take part in a collective together: the forms in which XLA prints replica groups.

Explicit lists were joined by two short forms, as thousands of devices made the lists most of a program's text: an iota
(consecutive numbers, reshaped and transposed) and axes of a mesh. All are read into tuples of device numbers, which for
a program compiled by JAX are positions in the flat device array of its mesh.
"""

import functools
import math
import re

import numpy as np

_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(((?:[^()]|\([^()]*\))*)\))? \{([^}]*)\}")
_GROUPS = re.compile(
    r"\{(?:\{[\d, ]*\},? ?)*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|maximal_mesh\[device_id=\d+\]|" + _MESH.pattern
)


def parse_groups(text: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Groups of devices that take part in a collective together, in any of the printed forms.

    Explicit `{{0,1},{2,3}}`; all devices `{}`; iota `[4,2]<=[2,4]T(1,0)`, the numbers 0, 1, .. shaped (2, 4),
    transposed and cut into 4 groups of 2; mesh `mesh['a'=2,'b'=4] {'b'}`, groups along the named axes, where
    `'b':(2)2` is a part of an axis (the axis seen as 2 x 2 x rest) and `device_ids=(..)` orders the mesh's devices.

    Args:
      text: attributes of an instruction, or the groups alone.
      num_devices: devices of the program, for `{}` and where no groups are printed.

    Returns:
      Device numbers of each group, in the group's order.

    Raises:
      ValueError: groups in a form that is none of these.

    >>> parse_groups("[4,2]<=[2,4]T(1,0)", 8)
    ((0, 4), (1, 5), (2, 6), (3, 7))
    >>> parse_groups("channel_id=1, replica_groups=mesh['node'=2,'local'=4] {'local'}, dimensions={0}", 8)
    ((0, 1, 2, 3), (4, 5, 6, 7))
    """
    _, printed, rest = text.partition("replica_groups=")
    rest = rest if printed else text
    found = _GROUPS.match(rest)
    if not found:
        if printed or rest.startswith(("{", "[", "mesh")):
            raise ValueError(f"replica groups in an unknown form: {rest[:80]!r}")
        return (tuple(range(num_devices)),)
    return _groups(found.group(), num_devices)


@functools.lru_cache(maxsize=4096)
def _groups(text: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    if text.startswith("{"):
        groups = tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d, ]+)\}", text))
        return groups or (tuple(range(num_devices)),)
    if text.startswith("["):
        shape, _, order = text.partition("<=")
        return _rows(_device_order(order).reshape(_numbers(shape)))
    if text.startswith("maximal"):
        return (tuple(_numbers(text)),)
    return _rows(_mesh_groups(text))


def _rows(groups: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, groups.reshape(-1, groups.shape[-1]).tolist()))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _device_order(text: str) -> np.ndarray:
    """Flat device numbers of `[2,8]T(1,0)` or of a plain list."""
    if not text.startswith("["):
        return np.array(_numbers(text))
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return (ids.transpose(_numbers(order)) if order else ids).reshape(-1)


def _mesh_groups(text: str) -> np.ndarray:
    found = _MESH.match(text)
    assert found, text
    axes = {name: int(size) for name, size in re.findall(r"[\"']?([^\"'=,\s]+)[\"']?=(\d+)", found.group(1))}
    ids = _device_order(found.group(2)) if found.group(2) else np.arange(math.prod(axes.values()))
    grouped = [
        (name, int(before or 1), int(size) if size else axes[name])
        for name, before, size in re.findall(r"[\"']?([^\"':,\s]+)[\"']?(?::\((\d+)\)(\d+))?", found.group(3))
    ]
    sizes: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for axis, size in axes.items():
        done = 1
        for _, before, part in sorted(entry for entry in grouped if entry[0] == axis):
            if before != done:
                sizes.append(before // done)
            place[axis, before] = len(sizes)
            sizes.append(part)
            done = before * part
        sizes.append(size // done)
    last = [place[axis, before] for axis, before, _ in grouped]
    first = [dim for dim in range(len(sizes)) if dim not in last]
    group_size = math.prod(sizes[dim] for dim in last)
    return ids.reshape(sizes).transpose(first + last).reshape(-1, group_size)
