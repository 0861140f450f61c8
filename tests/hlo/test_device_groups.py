"""Device groups in every printed form, the axes they span, and the bytes that must cross between nodes."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerojax.hlo.collective import entering_node, spanned_axes
from zerojax.hlo.text import parse_groups


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{0,3,1},{2}}", ((0, 3, 1), (2,))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4] {'b','a'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh[a=2,b=4] {b}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=2,'b'=4] {'b':(2)2,'a'}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['a'=8,'b'=1], device_ids=([2,4]T(1,0)) {'a'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", ((3, 1), (2, 0))),
        ("mesh['a'=2,'b'=2] {}", ((0,), (1,), (2,), (3,))),
    ],
)
def test_groups_in_every_printed_form(text, groups):
    assert parse_groups(text, 8) == groups
    assert (
        parse_groups(f"channel_id=1, replica_groups={text}, dimensions={{0}}, use_global_device_ids=true", 8) == groups
    )


def test_no_groups_are_all_devices_and_unknown_groups_are_an_error():
    assert parse_groups("channel_id=1, dimensions={0}", 3) == ((0, 1, 2),)
    with pytest.raises(ValueError, match="unknown form: 'spiral"):
        parse_groups("replica_groups=spiral(3)", 8)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_three_forms_of_the_same_groups_agree_and_span_the_axes_they_were_made_along(data):
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 3, 7]), min_size=1, max_size=3))
    grouped = data.draw(st.permutations(range(len(sizes))).map(lambda dims: dims[: len(dims) // 2 + 1]))
    kept_dims = [dim for dim in range(len(sizes)) if dim not in grouped]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    order = kept_dims + list(grouped)
    width = math.prod(sizes[dim] for dim in grouped)
    expected = ids.transpose(order).reshape(-1, width)
    explicit = "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in expected) + "}"
    shape = ",".join(map(str, sizes))
    iota = f"[{expected.shape[0]},{width}]<=[{shape}]T({','.join(map(str, order))})"
    axes = [f"x{dim}" for dim in range(len(sizes))]
    mesh = "mesh[" + ",".join(f"'{a}'={n}" for a, n in zip(axes, sizes, strict=True)) + "]"
    mesh += " {" + ",".join(f"'{axes[dim]}'" for dim in grouped) + "}"
    groups = tuple(map(tuple, expected.tolist()))
    for form in (explicit, iota, mesh):
        assert parse_groups(form, ids.size) == groups
    spanned = {axes[dim] for dim in grouped if sizes[dim] > 1}
    assert set(spanned_axes(groups, tuple(zip(axes, sizes, strict=True)))) == spanned


def pieces_entering(kind: str, groups, node_of, node: int) -> int:
    """Counts by hand the distinct pieces (one of k equal parts of the operand, or a whole operand) sent into a node."""
    sent = set()
    for group in groups:
        for source, target in itertools.product(group, group):
            if node_of(source) != node and node_of(target) == node:
                match kind:
                    case "all-gather":  # the same for all who need it
                        sent.add((source,))
                    case "reduce-scatter":  # one sum per foreign node and part
                        sent.add((node_of(source), target))
                    case "all-to-all":
                        sent.add((source, target))
    return len(sent)


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-to-all"])
@pytest.mark.parametrize("axes", [("node",), ("local",), ("node", "local")])
@pytest.mark.parametrize(("num_nodes", "num_local"), [(1, 1), (1, 4), (2, 8), (3, 2), (7, 4), (6, 1)])
def test_bytes_entering_a_node_are_the_pieces_that_must_cross(kind, axes, num_nodes, num_local):
    sizes = {"node": num_nodes, "local": num_local}
    names = ",".join(f"'{axis}'" for axis in axes)
    groups = parse_groups(f"mesh['node'={num_nodes},'local'={num_local}] {{{names}}}", num_nodes * num_local)
    k = len(groups[0])
    piece = 12
    operand = piece if kind == "all-gather" else piece * k
    expected = piece * pieces_entering(kind, groups, lambda device: device // num_local, 0)
    mesh = tuple(sizes.items())
    assert entering_node(kind, operand, groups, mesh, ("node",)) == expected
    if kind == "reduce-scatter":  # all-reduce is that and the gather of the sums
        assert entering_node("all-reduce", operand, groups, mesh, ("node",)) == 2 * expected
    assert entering_node(kind, operand, groups, mesh, ()) == 0
