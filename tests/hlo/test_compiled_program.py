"""The reader of compiled programs: kept texts of three JAX versions, programs compiled here, and the cost model."""

import re

import jax.numpy as jnp
import pytest
from programs import build
from programs.kept import MESH, VERSIONS, WEIGHT, kept, rows

from zerojax.hlo.program import expect_collectives, read_program
from zerojax.hlo.text import ArrayShape, parse_module

# ---------------------------------------------------------------- texts of all versions


def test_every_version_has_all_programs():
    assert build.saved() == sorted(f"{name}.jax-{version}" for name in build.PROGRAMS for version in VERSIONS)


@pytest.mark.parametrize("version", VERSIONS)
def test_one_collective_of_each_kind(version):
    # (k-1)/k of 2 MiB over 8, twice 15/16 of it over 16; between the two nodes 8 rings of 512 bytes each.
    assert rows(kept("kinds", version)) == {
        ("all-reduce", ("node", "local"), ("bf16",), WEIGHT, 1, 2 * WEIGHT * 15 // 16, WEIGHT),
        ("reduce-scatter", ("local",), ("bf16",), WEIGHT, 1, WEIGHT * 7 // 8, 0),
        ("all-to-all", ("local",), ("s8",), 65536, 1, 57344, 0),
        ("collective-permute", ("node",), ("f32",), 512, 1, 512, 8 * 512),
        ("all-reduce", ("node",), ("f32",), 512, 1, 512, 8 * 512),
        ("all-reduce", ("local",), ("f32",), 512, 1, 2 * 512 * 7 // 8, 0),
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_combined_collectives_keep_all_their_arrays(version):
    (one,) = kept("combined", version).collectives
    assert one.operands == (ArrayShape("bf16", (4, 64)), ArrayShape("s8", (8, 64)), ArrayShape("f32", (8,)))
    assert one.results == (ArrayShape("bf16", (64, 64)), ArrayShape("s8", (128, 64)), ArrayShape("f32", (128,)))
    assert one.dtypes == ("bf16", "s8", "f32")
    assert (one.operand_bytes, one.result_bytes, one.group_size) == (1056, 16 * 1056, 16)
    assert one.received_bytes == 15 * 1056
    assert one.node_bytes == 16 * 1056 // 2


@pytest.mark.parametrize("version", VERSIONS)
def test_nested_loops_multiply_and_branches_are_marked(version):
    program = kept("nested", version)
    (gather,) = program.select("all-gather")
    assert [loop.trip_count for loop in gather.loops] == [3, 5]
    assert (gather.axes, gather.executions, gather.in_conditional) == (("local",), 15, False)
    (total,) = program.select("all-reduce")
    assert [loop.trip_count for loop in total.loops] == [3]
    assert (total.axes, total.executions, total.in_conditional) == (("node",), 3, True)
    assert program.received_bytes("all-gather") == 15 * WEIGHT * 7 // 8
    assert program.matmul_flops == 15 * 2 * build.BATCH * build.WIDTH**2


@pytest.mark.parametrize("version", VERSIONS)
def test_trip_counts_follow_from_the_condition_when_the_compiler_did_not_write_them_down(version):
    for name in ("nested", "layers"):
        text = build.text_of(f"{name}.jax-{version}")
        stripped = re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", text)
        assert stripped != text
        found, expected = read_program(stripped, MESH), read_program(text, MESH)
        assert [one.executions for one in found.collectives] == [one.executions for one in expected.collectives]
        assert found.matmul_flops == expected.matmul_flops


@pytest.mark.parametrize("version", VERSIONS)
def test_peeled_and_pipelined_iterations_add_up_to_one_per_layer(version):
    program = kept("layers", version)
    for kind, phase, axis, whole in [
        ("all-gather", "forward", "node", WEIGHT // 8),
        ("all-gather", "forward", "local", WEIGHT),
        ("all-gather", "backward", "node", WEIGHT // 8),
        ("all-gather", "backward", "local", WEIGHT),
        ("reduce-scatter", "backward", "local", WEIGHT),
        ("reduce-scatter", "backward", "node", WEIGHT // 8),
    ]:
        found = program.select(kind, phase=phase, axes=axis)
        assert {one.payload_bytes for one in found} == {whole}
        assert sum(one.executions for one in found) == build.NUM_LAYERS
        part = (1, 2) if axis == "node" else (7, 8)
        assert program.received_bytes(kind, phase=phase, axes=axis) == build.NUM_LAYERS * whole * part[0] // part[1]
    # Each of the three brings half of the weight from the other node, once for the node.
    assert program.node_bytes() == 3 * build.NUM_LAYERS * WEIGHT // 2
    # Two products forward, the same recomputed (but for the last), four backward.
    product = 2 * build.BATCH * build.WIDTH**2 * build.NUM_LAYERS
    assert 7 * product <= program.matmul_flops <= 8 * product


@pytest.mark.parametrize("version", VERSIONS)
def test_collectives_the_compiler_places_have_a_phase_and_the_axes_of_the_users_mesh(version):
    whole = ("node", "local"), ("bf16",), WEIGHT, build.NUM_LAYERS, WEIGHT * 15 // 16, WEIGHT // 2
    program = kept("annotated", version)
    assert rows(program, phase="forward") == {("all-gather", *whole)}
    assert rows(program, phase="backward") == {("all-gather", *whole), ("reduce-scatter", *whole)}
    assert rows(program, phase="other") == set()
    # The order of the devices in a group is that of the shards: local-major.
    assert {one.groups[0][:3] for one in program.collectives} == {(0, 8, 1)}
    (reduce,) = program.select("reduce-scatter")
    assert reduce.asynchronous
    assert reduce.overlaps_matmul


def test_blocking_and_asynchronous_are_told_apart_in_both_spellings():
    # 0.10 marks a blocking start as is_sync, 0.12 prints one instruction.
    for version, opcode in [("0.10.2", "all-gather-start("), ("0.12.0.1", "all-gather(")]:
        text = build.text_of(f"combined.jax-{version}")
        assert opcode in text
        (one,) = read_program(text, MESH).collectives
        assert not one.asynchronous
        assert one.overlapped == ()
    asynchronous = build.text_of("combined.jax-0.10.2").replace('"is_sync":true', '"is_sync":false')
    (one,) = read_program(asynchronous, MESH).collectives
    assert one.asynchronous
    assert one.overlapped == ()


# ---------------------------------------------------------------- shapes of text that no small program here has

WRAPPED = (build.FOLDER / "async_computation.txt").read_text()


def test_a_collective_inside_an_async_computation_takes_the_mode_of_its_pair():
    scatter, gather = read_program(WRAPPED, {"node": 2, "local": 2}).collectives
    assert (scatter.kind, scatter.asynchronous, scatter.results) == (
        "reduce-scatter",
        True,
        (ArrayShape("f32", (16,)),),
    )
    assert scatter.overlapped == ("product",)  # the counter's update hides nothing
    assert scatter.overlaps_matmul
    assert (scatter.received_bytes, scatter.node_bytes) == (192, 128)
    assert (gather.kind, gather.asynchronous, gather.results) == ("all-gather", True, (ArrayShape("f32", (256,)),))
    assert gather.axes == ("node", "local")


def test_a_loop_of_unknown_length_counts_once_and_names_what_it_holds():
    program = read_program(WRAPPED, {"node": 2, "local": 2})
    for one in program.collectives:
        assert [loop.trip_count for loop in one.loops] == [None]
        assert (one.executions, one.phase) == (1, "backward")
        assert "in loop x ?" in str(one)
    assert program.matmul_flops == 2 * 64**3


def test_text_that_is_no_program_and_a_mesh_of_another_size_are_refused():
    with pytest.raises(ValueError, match="no HloModule"):
        read_program("module @jit_f {}")
    with pytest.raises(ValueError, match="no ENTRY"):
        read_program(WRAPPED.partition("ENTRY")[0])
    with pytest.raises(ValueError, match=r"runs on 4 devices, but mesh .* has 16"):
        read_program(WRAPPED, MESH)
    with pytest.raises(ValueError, match=r"axes .'model'. are not in the mesh"):
        read_program(WRAPPED, {"node": 2, "local": 2}).select(axes="model")


def test_without_a_mesh_bytes_are_counted_and_axes_are_not_told():
    scatter, _ = read_program(WRAPPED).collectives
    assert (scatter.axes, scatter.group_size, scatter.received_bytes, scatter.node_bytes) == ((), 4, 192, 0)


# ---------------------------------------------------------------- what users' tests pin


def test_expectations_that_hold_return_what_they_found():
    program = kept("layers", "0.12.0.1")
    found = expect_collectives(program, "all-gather", axes="node", phase="forward", dtype="bfloat16", count=1)
    assert [one.name for one in found] == [one.name for one in program.collectives[:1]]
    expect_collectives(
        program, ("all-gather", "reduce-scatter"), axes={"node"}, executions=18, only_dtypes=[jnp.bfloat16]
    )
    expect_collectives(program, "all-reduce", count=0)
    expect_collectives(program, min_bytes=WEIGHT + 1, count=0)
    expect_collectives(program, "all-gather", dtype="float32", count=0)


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ({"kind": "all-to-all"}, "kind='all-to-all':\n  at least one instruction required, none found"),
        ({"kind": "all-gather", "count": 1}, "1 instructions required, 6 found"),
        ({"axes": "node", "executions": 3}, "axes='node':\n  3 executions required, 18 found"),
        ({"phase": "forward", "only_dtypes": ["int8"]}, r"only \['s8'\] allowed on the wire: all-gather over node"),
    ],
)
def test_an_expectation_that_fails_lists_what_the_program_has(wanted, complaint):
    program = kept("layers", "0.12.0.1")
    with pytest.raises(AssertionError, match=complaint) as caught:
        expect_collectives(program, **wanted)
    listing = str(caught.value).partition("the program has")[2].splitlines()[1:]
    assert len(listing) == len(program.collectives)
    assert all(("bf16[" in line and "in loop x" in line) or "blocking" in line for line in listing)


def test_traffic_adds_up_to_the_totals():
    for name in build.saved():
        program = read_program(build.text_of(name), MESH)
        traffic = program.traffic()
        assert sum(line.received_bytes for line in traffic) == program.received_bytes()
        assert sum(line.node_bytes for line in traffic) == program.node_bytes()
        assert sum(line.count for line in traffic) == len(program.collectives)


def test_groups_of_a_large_cluster_are_read_once_and_fast():
    # 4096 devices, 2000 collectives: the groups are parsed once, so this is a matter of a second, not minutes.
    line = "  %g{} = bf16[4096]{{0}} all-gather(%x), replica_groups=[512,8]<=[4096], dimensions={{0}}\n"
    text = "HloModule big, num_partitions=4096\n\nENTRY %main (x: bf16[512]) -> bf16[512] {\n"
    text += "  %x = bf16[512]{0} parameter(0)\n" + "".join(line.format(n) for n in range(2000))
    text += "  ROOT %y = bf16[512]{0} copy(%x)\n}\n"
    program = read_program(text, {"node": 512, "local": 8})
    assert program.received_bytes(axes="local") == 2000 * 7 * 1024
    assert len(parse_module(text).computations["main"].instructions) == 2002
