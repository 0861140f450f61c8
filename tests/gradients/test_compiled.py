"""The whole step compiled ahead of time for H100 nodes: what it sends, where, in which dtype, and what it holds.

The program is the one a cluster would run: dtype on the wire, loops, donated bytes and temporary memory are the
compiler's own. The model has one stack of layers with four large leaves, a tied embedding and a norm scale. M is the
bytes of all parameters in bfloat16.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import models
import optax
import pytest
from compiled_once import compile_once
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.hlo.program import CompiledProgram, expect_collectives, read_program
from zerojax.planner.gpus import target_mesh

pytestmark = pytest.mark.needs_cuda_plugin
AOT = pytest.mark.aot

# 384 devices divide the width; no two leaves that are told apart by their bytes have the same.
LAYERS, WIDTH, TOKENS, LENGTH = 6, 1152, 6144, 512
LARGE = ("qkv", "out", "up", "down")
# Anything this large is a weight or an activation: a norm scale of one layer has 2 KiB, the smallest weight 2 MiB.
SIZEABLE = 64 * 1024
# Keeps the compiler from moving the reduction of a layer's gradients into the next layer's backward pass.
PROMPTLY: dict[str, Any] = (
    {"xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_OFF"}
    if jax.__version_info__ >= (0, 11)
    else {"xla_gpu_enable_pipelined_reduce_scatter": False}
)


class Compiled(NamedTuple):
    program: CompiledProgram
    layout: zerojax.Layout
    state_bytes: int  # params and optimizer state of one device


class Program(NamedTuple):
    """What is compiled.

    `by`: whose gradients: "zerojax", "drop-in" (the user's jax.grad), "annotated" (and activations constrained).
    `delayed`: whether the compiler may reduce a layer's gradients during the next layer's backward pass (its default).
    `window`: `prefetch_bytes`.
    """

    nodes: int = 2
    local: int = 8
    stage: int = 3
    remat: bool = False
    by: str = "zerojax"
    layers: int = LAYERS
    width: int = WIDTH
    delayed: bool = True
    window: int | str | None = "auto"


def compiled(*which, **more) -> Compiled:
    return compiled_once(Program(*which, **more))


@functools.cache
def compiled_once(one: Program) -> Compiled:
    nodes, local, stage, remat, by, layers, width, delayed, window = one
    mesh = target_mesh("h100", nodes, local)
    config = zerojax.ZeroConfig(stage=stage, prefetch_bytes=window)
    layout = zerojax.partition(models.transformer_shapes(layers, width, TOKENS), mesh, config)
    tx = zerojax.zero(optax.adamw(1e-3), layout)
    over_batch = NamedSharding(mesh, P(("node", "local")))
    options: dict[str, Any] = {"compute": jnp.bfloat16, "remat": remat}
    if by == "annotated":
        options["constrain"] = lambda x: jax.lax.with_sharding_constraint(x, over_batch)
    loss = functools.partial(models.transformer_loss, **options)
    grad_fn = zerojax.value_and_grad(loss, layout) if by == "zerojax" else jax.value_and_grad(loss)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        value, grads = grad_fn(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = layout.param_shapes()
    state = tx.init(params)
    batch = {k: jax.ShapeDtypeStruct((2 * mesh.size, LENGTH), jnp.int32, sharding=over_batch) for k in "xy"}
    lowered = step.lower(params, state, batch)
    program = read_program(compile_once(lowered, mesh, "h100", {} if delayed else PROMPTLY), mesh)
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves((params, state)))
    return Compiled(program, layout, held)


def layer_bytes(layout, name) -> int:
    """Bytes of one layer of a leaf in bfloat16."""
    placement = layout.placements["layers"][name]
    return math.prod(placement.padded_shape[1:]) * 2


def model_bytes(layout) -> int:
    return sum(math.prod(p.shape) * 2 for p in layout.leaves)


# Nodes, devices of each, and activation checkpointing; one of them is compiled in the first tier too.
PROGRAMS = [(2, 8, True), *(pytest.param(*p, marks=AOT) for p in ((2, 8, False), (48, 8, True), (48, 8, False)))]


@pytest.mark.parametrize(("nodes", "local", "remat"), PROGRAMS)
def test_stage_three_gathers_twice_and_reduces_once_per_layer_and_leaf(nodes, local, remat):
    program, layout, _ = compiled(nodes, local, remat=remat)
    wanted = sorted(layer_bytes(layout, name) for name in LARGE)
    for kind, times, axes in (("all-gather", 2, ("node", "local")), ("reduce-scatter", 1, "local")):
        # What completes (or starts from) the full weight of a layer: a gather over both axes, or the hop over "local".
        # The first layers travel before a loop and the last ones after it; the number of executions stays.
        runs, looped = dict.fromkeys(wanted, 0), dict.fromkeys(wanted, 0)
        for one in program.select(kind, axes=axes, min_bytes=SIZEABLE):
            for array in one.results if kind == "all-gather" else one.operands:
                if array.num_bytes in runs:
                    runs[array.num_bytes] += one.executions
                    looped[array.num_bytes] += one.executions * one.in_loop
        for size in runs:
            assert runs[size] == times * LAYERS * wanted.count(size), (kind, runs, program.traffic())
            assert looped[size] >= times * (LAYERS - 2) * wanted.count(size), (kind, looped, program.traffic())


@pytest.mark.parametrize(("nodes", "local", "remat"), PROGRAMS)
def test_stage_three_sends_weights_in_two_bytes_and_no_activation(nodes, local, remat):
    program, layout, _ = compiled(nodes, local, remat=remat)
    embed = math.prod(layout.placements["embed"].padded_shape) * 2
    layers = {layer_bytes(layout, name) for name in LARGE}
    # Of a gather, and over "local", arrays are full on one side; over "node" they are one device's part of the node's.
    sizes = {size // part for size in (*layers, embed) for part in (1, local)}
    for one in program.select(min_bytes=SIZEABLE):
        assert one.kind in ("all-gather", "reduce-scatter"), one
        for array in one.results if one.kind == "all-gather" else one.operands:
            assert array.num_bytes in sizes, one
            assert array.dtype in ("bf16", "u16"), one


@pytest.mark.parametrize(("nodes", "local", "remat"), PROGRAMS)
def test_stage_three_volume_is_three_times_the_model(nodes, local, remat):
    program, layout, _ = compiled(nodes, local, remat=remat)
    size, n = model_bytes(layout), nodes * local
    # Each device receives (N-1)/N of what it gathers and reduces.
    assert program.received_bytes() == pytest.approx(3 * size * (n - 1) / n, rel=0.02)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=AOT), pytest.param(2, marks=AOT), 3])
def test_parameters_and_state_are_updated_in_place(stage):
    program, _, held = compiled(stage=stage, remat=stage == 3, by="zerojax" if stage > 1 else "drop-in")
    assert program.memory is not None
    # The compiler rounds every buffer up to whole words.
    assert program.memory.alias == pytest.approx(held, rel=1e-4)


@AOT
@pytest.mark.parametrize("remat", [False, True])
def test_memory_does_not_grow_with_whole_weights_of_layers(remat):
    """Doubling the layers adds activations and shards, no layer's full weight."""
    weight = 2 * 12 * WIDTH * WIDTH  # one layer in bfloat16

    def growth(by):
        few, many = (compiled(remat=remat, layers=layers, by=by) for layers in (LAYERS, 2 * LAYERS))
        return (many.program.memory.temp - few.program.memory.temp) / LAYERS

    # What a layer leaves for the backward pass is for the compiler to say: the same as in its own partitioning.
    assert growth("zerojax") < growth("annotated") + 0.1 * weight
    if remat:
        residuals = 2 * LENGTH * WIDTH * 2  # the layer's input, of two sequences in bfloat16
        shards = 12 * WIDTH * WIDTH * (4 + 4) // 16  # gradients and updates in float32
        assert growth("zerojax") < residuals + shards + 0.1 * weight


@AOT
def test_memory_grows_with_the_width_as_shards_do():
    """At fixed activations per width, a layer's full weight would grow with the square of the width."""
    def per_layer(width):
        few, many = compiled(width=width), compiled(width=width, layers=2 * LAYERS)
        return (many.program.memory.temp - few.program.memory.temp) / LAYERS

    # Activations double with the width; the shards of gradients and updates (8 bytes / 16) quadruple.
    shards = 12 * WIDTH * WIDTH * 8 / 16
    assert per_layer(2 * WIDTH) < 2 * per_layer(WIDTH) + 2 * shards + 0.1 * 2 * 12 * (2 * WIDTH) ** 2


@AOT
@pytest.mark.parametrize("remat", [False, True])
def test_memory_is_not_above_that_of_the_annotated_version(remat):
    ours, ahead, theirs = (
        compiled(remat=remat, by=by, delayed=False, window=window)
        for by, window in (("zerojax", None), ("zerojax", "auto"), ("annotated", "auto"))
    )
    assert ours.program.memory.temp <= 1.05 * theirs.program.memory.temp
    # What is gathered ahead is a layer's weights, and the gradient that leaves late is another.
    assert ahead.program.memory.temp <= ours.program.memory.temp + 2 * 2 * 12 * WIDTH * WIDTH


@AOT
@pytest.mark.parametrize("remat", [False, True])
def test_a_delayed_reduction_holds_the_gradients_of_two_layers_at_most(remat):
    """Whatever the number of layers. The compiler trades it for overlap with the next layer's backward pass; it does
    not in the annotated version, where it makes the reduce-scatters only afterwards."""
    for layers in (LAYERS, 2 * LAYERS):
        default, prompt = (
            compiled(remat=remat, layers=layers, delayed=delayed, window=None) for delayed in (True, False)
        )
        assert default.program.memory.temp - prompt.program.memory.temp < 2 * 2 * 12 * WIDTH * WIDTH


@pytest.mark.parametrize("stage", [pytest.param(1, marks=AOT), 2])
def test_the_optimizer_alone_reduces_in_the_backward_loop_in_bfloat16(stage):
    program, layout, _ = compiled(stage=stage, by="drop-in")
    sent = program.select("reduce-scatter", in_loop=True, phase="backward", min_bytes=SIZEABLE)
    wanted = sorted(layer_bytes(layout, name) for name in LARGE)
    whole = sorted(array.num_bytes for one in sent for array in one.operands for _ in range(one.executions // LAYERS))
    assert [w for w in whole if w in wanted] == wanted, program.traffic()
    assert {array.dtype for one in sent for array in one.operands} == {"bf16"}


@AOT
def test_stage_two_gathers_no_weight_before_the_update():
    program, layout, _ = compiled(stage=2)
    assert not program.select("all-gather", in_loop=True)
    expect_collectives(program, "reduce-scatter", in_loop=True, min_bytes=SIZEABLE, only_dtypes=["bfloat16"])
    # Gradients in 2 bytes, updates in float32, since there is no master copy: M + 2M.
    assert program.received_bytes() == pytest.approx(3 * model_bytes(layout) * 15 / 16, rel=0.02)
    # Updates are gathered between the nodes first, then inside them: no gather spans both axes.
    sent = program.select("all-gather", min_bytes=SIZEABLE)
    assert {one.axes for one in sent} == {("node",), ("local",)}, program.traffic()


@pytest.mark.aot
def test_tensor_parallel_weights_are_not_gathered_over_their_axis():
    mesh = target_mesh("h100", 2, 8, ("node", "local", "model"), shape=(2, 4, 2))
    specs = {
        "embed": P(),
        "layers": {"qkv": P(None, None, "model"), "out": P(None, "model"), "up": P(None, None, "model"),
                   "down": P(None, "model"), "scale": P()},
    }  # fmt: skip
    shapes = models.transformer_shapes(LAYERS, WIDTH, TOKENS)
    layout = zerojax.partition(shapes, mesh, zerojax.ZeroConfig(), specs=specs)
    tx = zerojax.zero(optax.adamw(1e-3), layout)
    grad_fn = zerojax.value_and_grad(functools.partial(models.transformer_loss, compute=jnp.bfloat16), layout)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        value, grads = grad_fn(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = layout.param_shapes()
    over_batch = NamedSharding(mesh, P(("node", "local")))
    batch = {k: jax.ShapeDtypeStruct((16, LENGTH), jnp.int32, sharding=over_batch) for k in "xy"}
    program = read_program(compile_once(step.lower(params, tx.init(params), batch), mesh, "h100"), mesh)
    rows = 2 * LENGTH
    for one in program.collectives:
        if "model" in one.axes:
            assert set(one.axes) == {"model"}, one
            # What tensor parallelism itself sends: activations of this device's examples, never a weight.
            for array in one.results:
                assert one.kind != "all-gather" or (array.dims[0] != WIDTH and array.dims[-1] != WIDTH) or \
                    math.prod(array.dims) % rows == 0, one
    # Each device holds half of every layer's leaf: the data axes carry that half.
    whole = sorted(layer_bytes(layout, name) // 2 for name in LARGE)
    gathers = program.select("all-gather", axes=("node", "local"), in_loop=True)
    sizes = {array.num_bytes for one in gathers for array in one.results}
    assert sizes == set(whole)
