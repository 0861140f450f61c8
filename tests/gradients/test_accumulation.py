"""Gradient accumulation: both policies give the gradient of one large batch, and send what they say."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tolerances import FLOAT32

import zerojax
from zerojax.hlo.program import CompiledProgram, read_program
from zerojax.planner.gpus import target_mesh

ALL = {"quantize_weights": "int8", "secondary": True, "quantize_gradients": ("int8", "int4")}


def loss_fn(params, batch):
    """The stack scanned over and, again, layer by layer; cast in one of them."""
    h = batch["x"] @ params["first"]
    for i in range(2):
        h = jnp.tanh(h @ params["stack"]["w"][i] * models.ramp(24) + params["stack"]["b"][i])
    return models.dense_loss(params, batch) + jnp.mean((h @ params["last"]) ** 2)


def layout_of(stage, mesh="2x4"):
    params = models.dense_init(jax.random.key(1))
    options = {**ALL, "error_feedback": True, "min_quantize_size": 0} if stage == "++" else {}
    return models.make_layout(params, mesh, 3 if stage == "++" else stage, **options), params


@functools.cache
def oracle():
    params, batch = models.dense_init(jax.random.key(1)), models.dense_batches(1, 48)[0]
    return jax.jit(jax.value_and_grad(loss_fn))(params, batch)


@pytest.mark.parametrize(
    ("stage", "mesh", "accumulation"),
    [(0, "3x2", "deferred"), (1, "2x4", "sharded"), (2, "data", "deferred"), (3, "3x2", "deferred")],
)
def test_both_policies_give_the_gradient_of_one_large_batch(stage, mesh, accumulation):
    layout, params = layout_of(stage, mesh)
    grad_fn = zerojax.value_and_grad(loss_fn, layout, microbatches=2, accumulation=accumulation)
    loss, grads = jax.jit(grad_fn)(layout.shard(params), models.dense_batches(1, 48)[0])
    want_loss, want = oracle()
    np.testing.assert_allclose(loss, want_loss, rtol=FLOAT32)
    assert models.largest_error(layout.unshard(grads), want) < FLOAT32


@pytest.mark.aot
@pytest.mark.filterwarnings("ignore::zerojax.ZeroNotice")
def test_a_deferred_quantised_reduction_loses_what_that_of_one_large_batch_loses():
    """Full sums are quantised once per step; in other blocks, since a stack is then reduced as one leaf."""
    layout, params = layout_of("++")
    stored, batch = layout.shard(params), models.dense_batches(1, 48)[0]
    exact = jax.tree.leaves(jax.jit(jax.grad(models.dense_loss))(params, batch))

    def lost(count):
        grad_fn = zerojax.value_and_grad(models.dense_loss, layout, microbatches=count, accumulation="deferred")
        _, grads, wire = jax.jit(grad_fn)(stored, batch, wire=zerojax.init_wire_state(layout))
        grads = jax.tree.leaves(layout.unshard(grads))
        # The first, the last and the stacked matrices lose something between nodes; a stack of vectors does not.
        assert sum(bool(jnp.any(x != 0)) for x in jax.tree.leaves(wire)) == 3
        return [np.linalg.norm(g - e) / np.linalg.norm(e) for g, e in zip(grads, exact, strict=True)]

    one, many = lost(1), lost(3)
    for a, b in zip(one, many, strict=True):
        # Rounding errors are spread evenly: of at least 120 of them, the norm scatters by less than a third.
        assert b < a * 4 / 3 + FLOAT32
    assert max(many) > 1e-3  # it did travel quantised


def test_what_stage_0_cannot_do_and_unknown_names_are_refused():
    layout, _ = layout_of(0)
    with pytest.raises(ValueError, match="stage 0 shards nothing: use 'deferred'"):
        zerojax.value_and_grad(loss_fn, layout, microbatches=2, accumulation="sharded")
    with pytest.raises(ValueError, match="use 'sharded', 'deferred' or None"):
        zerojax.value_and_grad(loss_fn, layout, microbatches=2, accumulation="late")


# --- what is sent, from programs compiled for 2 x 8 H100 ---

LAYERS, WIDTH = 2, 1024
REDUCTIONS = ("all-reduce", "reduce-scatter", "all-to-all")
SIZEABLE = 64 * 1024  # a norm scale has 4 KiB in bfloat16, a matrix 2 MiB or more


def perceptron_loss(params, batch):
    def layer(h, p):
        cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), p)
        return h + jax.nn.gelu((h * cast["scale"]) @ cast["up"]) @ cast["down"], None

    h, _ = jax.lax.scan(layer, batch, params)
    return jnp.mean(h.astype(jnp.float32) ** 2)


@functools.cache
def compiled(stage: Any, accumulation: str, count: int) -> CompiledProgram:
    mesh = target_mesh("h100", 2, 8)
    extents = {"up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH), "scale": (LAYERS, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in extents.items()}
    config = zerojax.ZeroConfig(**ALL) if stage == "++" else zerojax.ZeroConfig(stage=stage)
    layout = zerojax.partition(params, mesh, config)
    over_batch = NamedSharding(mesh, P(("node", "local")))
    batch = jax.ShapeDtypeStruct((16 * 64 * count, WIDTH), jnp.bfloat16, sharding=over_batch)
    grad_fn = zerojax.value_and_grad(perceptron_loss, layout, microbatches=count, accumulation=accumulation)
    return read_program(jax.jit(grad_fn).lower(layout.param_shapes(), batch).compile(), mesh)


def reduced_bytes(program, **conditions) -> int:
    return program.received_bytes(REDUCTIONS, min_bytes=SIZEABLE, **conditions)


ELEMENTS = LAYERS * 8 * WIDTH * WIDTH


@pytest.mark.needs_cuda_plugin
@pytest.mark.parametrize(
    ("stage", "bytes_each"),
    # Bytes received per element: an all-reduce is two reduce-scatters. Stages 2 and 3 reduce in the dtype of the
    # compute, the others in that of the parameters. ZeRO++: 1 byte inside the node (7/8 of it arrives), then 4.27 bits
    # of an eighth, of which half arrives.
    [
        (3, 2 * 15 / 16),
        *(
            pytest.param(*more, marks=pytest.mark.aot)
            for more in ((0, 2 * 4 * 15 / 16), (2, 2 * 15 / 16), ("++", 7 / 8 * (1 + 2 / 128) + 4.27 / 8 / 8 / 2))
        ),
    ],
)
def test_deferred_reduces_once_per_step_outside_the_loop(stage, bytes_each):
    two, four = (compiled(stage, "deferred", count) for count in (2, 4))
    assert reduced_bytes(two) == reduced_bytes(four)
    assert reduced_bytes(four) == pytest.approx(bytes_each * ELEMENTS, rel=0.02)
    assert not four.select(REDUCTIONS, min_bytes=SIZEABLE, in_loop=True), four.traffic()
    if stage == "++":  # and the weights enter a node once, for all microbatches, forward and backward
        assert two.node_bytes("all-gather", dtype="int8") == four.node_bytes("all-gather", dtype="int8") > 0


@pytest.mark.aot
def test_sharded_reduces_every_microbatch_and_keeps_no_whole_accumulator():
    two, four = (compiled(3, "sharded", count) for count in (2, 4))
    assert reduced_bytes(four) == 2 * reduced_bytes(two) > 0
    deferred = compiled(3, "deferred", 4)
    # The float32 sum, full instead of a sixteenth.
    assert deferred.memory.temp - four.memory.temp >= 4 * ELEMENTS * 15 / 16 * 0.98
