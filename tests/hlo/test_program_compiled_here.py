"""The reader of compiled programs on programs compiled here, for target GPUs and for simulated CPU devices."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import build
from programs.kept import MESH, VERSIONS, kept, rows

from zerojax.hlo.program import expect_collectives, read_program
from zerojax.planner.gpus import target_mesh

# ---------------------------------------------------------------- programs compiled here, for GPUs


@pytest.mark.aot
@pytest.mark.parametrize(("num_nodes", "num_local"), [(48, 8), (7, 8)])
def test_a_gradient_compiled_for_a_cluster_moves_exactly_the_weights(num_nodes, num_local):
    mesh = target_mesh("h100", num_nodes, num_local)
    num_devices = num_nodes * num_local
    width = 16 * num_devices if num_devices > 16 else build.WIDTH
    compiled = build.layers(mesh, rows=width)
    program = read_program(compiled, mesh)
    weight = width * build.WIDTH * 2
    num = build.NUM_LAYERS
    for kind, times in (("all-gather", 2), ("reduce-scatter", 1)):
        over_node = expect_collectives(program, kind, axes="node", executions=times * num, only_dtypes=["bfloat16"])
        over_local = expect_collectives(program, kind, axes="local", executions=times * num, only_dtypes=["bfloat16"])
        assert {one.group_size for one in over_node} == {num_nodes}
        assert {one.group_size for one in over_local} == {num_local}
        received = times * num * weight // num_local * (num_nodes - 1) // num_nodes
        assert program.received_bytes(kind, axes="node") == received
        assert program.received_bytes(kind, axes="local") == times * num * weight * (num_local - 1) // num_local
        assert program.node_bytes(kind) == num_local * received == times * num * weight * (num_nodes - 1) // num_nodes
    expect_collectives(program, axes=("local", "node"), count=0)
    assert program.memory is not None
    assert program.memory.argument == num * weight // num_devices + build.BATCH * width * 2
    assert program.memory.output == num * weight // num_devices
    assert program.memory.temp > 0


@pytest.mark.aot
@pytest.mark.parametrize("name", ["kinds", "combined", "nested"])
def test_a_program_compiled_here_reads_like_the_kept_texts(name):
    program = read_program(build.PROGRAMS[name](target_mesh("h100", 2, 8)), MESH)
    assert {rows(kept(name, version)) == rows(program) for version in VERSIONS} == {True}


@pytest.mark.aot
def test_a_loop_body_written_twice_and_peeled_keeps_all_totals():
    mesh = target_mesh("h100", 2, 8)
    known = jax.__version__ in VERSIONS
    plain = kept("layers", jax.__version__) if known else read_program(build.layers(mesh), mesh)
    doubled = read_program(build.layers(mesh, options={"xla_gpu_enable_while_loop_double_buffering": True}), mesh)
    assert len(doubled.collectives) > len(plain.collectives)
    assert doubled.matmul_flops == plain.matmul_flops
    for conditions in ({"axes": "node"}, {"axes": "local"}, {"phase": "forward"}, {"phase": "backward"}):
        assert doubled.received_bytes(**conditions) == plain.received_bytes(**conditions)
        assert doubled.node_bytes(**conditions) == plain.node_bytes(**conditions)


@pytest.mark.needs_cuda_plugin
def test_int4_travels_packed():
    mesh = target_mesh("h100", 2, 8)

    def function(x):
        return jax.lax.all_to_all(x, "node", 0, 0, tiled=True)

    program = read_program(build.compiled(mesh, function, (P(),), P(), ((64, 1024), "int4")), mesh)
    (one,) = expect_collectives(program, "all-to-all", axes="node", count=1)
    assert one.operand_bytes == 64 * 1024 // 2
    assert program.received_bytes() == 64 * 1024 // 4


@pytest.mark.needs_cuda_plugin
def test_axes_are_those_of_a_mesh_whose_devices_are_in_another_order():
    ordered = target_mesh("h100", 2, 4)
    mesh = Mesh(ordered.devices.T, ("local", "node"))

    def function(x):
        return jax.lax.psum(x, "node"), jax.lax.all_gather(x, "local")

    program = read_program(build.compiled(mesh, function, (P(),), P(), ((1024,), "float32")), mesh)
    (total,) = program.select("all-reduce")
    (gather,) = program.select("all-gather")
    assert (total.axes, gather.axes) == (("node",), ("local",))
    assert (total.node_bytes, gather.node_bytes) == (4 * 4096, 0)


# ---------------------------------------------------------------- programs compiled here, for CPU


@pytest.fixture
def cpu_mesh() -> Mesh:
    if len(jax.devices("cpu")) < 8:
        pytest.skip("needs 8 simulated CPU devices")
    return Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("node", "local"))


def test_programs_for_cpu_are_read_too(cpu_mesh):
    program = read_program(build.nested(cpu_mesh), cpu_mesh)
    (gather,) = expect_collectives(program, "all-gather", axes="local", executions=15, in_loop=True)
    # The CPU backend widens bfloat16 to float32, or not, by version: the elements are what is sure.
    assert gather.results[0].dims == (1024, 1024)
    assert not gather.asynchronous
    (total,) = expect_collectives(program, "all-reduce", axes="node", executions=3)
    assert total.in_conditional
    kinds = read_program(build.kinds(cpu_mesh), cpu_mesh)
    for kind, axes in [
        ("all-reduce", ("node", "local")),
        ("all-reduce", "local"),
        ("reduce-scatter", "local"),
        ("all-to-all", "local"),
        ("collective-permute", "node"),
    ]:
        expect_collectives(kinds, kind, axes=axes)
    assert sum(one.operand_bytes for one in kinds.select("all-to-all")) == 65536
    assert kinds.received_bytes("all-to-all") == 65536 * 3 // 4


def test_memory_figures_are_the_bytes_of_the_shards_and_donation_shows_as_alias(cpu_mesh):
    sharding = NamedSharding(cpu_mesh, P(("local", "node")))
    x = jax.ShapeDtypeStruct((8, 256), "float32", sharding=sharding)
    for donate, alias in [((), 0), ((0,), 1024)]:
        step = jax.jit(lambda x: x * 2, donate_argnums=donate, out_shardings=sharding)
        memory = read_program(step.lower(x).compile(), cpu_mesh).memory
        assert memory is not None
        assert (memory.argument, memory.output, memory.alias) == (1024, 1024, alias)
        assert memory.total == memory.argument + memory.output - alias + memory.temp + memory.generated_code
        assert all(type(value) is int for value in (memory.total, memory.temp, memory.host_temp))
        assert memory.peak is None or memory.peak > 0


def test_one_device_sends_nothing():
    mesh = jax.make_mesh((1, 1), ("node", "local"), devices=jax.devices("cpu")[:1])
    program = read_program(build.nested(mesh), mesh)
    assert (program.received_bytes(), program.node_bytes(), program.num_devices) == (0, 0, 1)
    expect_collectives(program, count=0)
    with pytest.raises(AssertionError, match=r"none found\nthe program has .*:\n  none"):
        expect_collectives(program, axes="node")
