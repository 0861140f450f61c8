"""Parallelism of other kinds beside ZeRO: expert, tensor and sequence parallel on axes that the compiler manages.

A layer of a mixture of experts on sequences: attention, whose projection tensor parallelism splits and whose sequence
dim sequence parallelism splits, and experts, of which expert parallelism keeps a part on each device.
"""

import functools
import math

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tolerances import FLOAT32

import zerojax
from zerojax.hlo.program import read_program
from zerojax.planner.gpus import target_mesh

EXPERTS, WIDTH, HIDDEN, LENGTH = 4, 16, 24, 6

SPECS = {
    "expert": {"up": P("expert"), "down": P("expert")},
    "model": {"qkv": P(None, "model"), "up": P(None, None, "model"), "down": P(None, "model")},
    "seq": {},
}


def shapes(experts=EXPERTS, width=WIDTH, hidden=HIDDEN):
    return {
        "qkv": (width, 3 * width), "router": (width, experts), "up": (experts, width, hidden),
        "down": (experts, hidden, width), "scale": (width,),
    }  # fmt: skip


def make_params():
    keys = iter(jax.random.split(jax.random.key(0), 5))
    return {k: jax.random.normal(next(keys), s) / math.sqrt(s[-2] if len(s) > 1 else 1) for k, s in shapes().items()}


def loss_fn(params, batch, axis=None):
    """Top-1 routing without a capacity: each expert sees all tokens, zeros where they are not its own."""

    def over(x, name, dim):
        spec = P(*(None,) * dim, name)
        return jax.lax.with_sharding_constraint(x, spec) if axis == name else x

    p = jax.tree.map(lambda w: w.astype(batch["x"].dtype), params)
    x = over(batch["x"] * p["scale"], "seq", 1)
    x = over(x + models.attention(x, p["qkv"]), "seq", 1)
    x = over(x, "expert", 0)  # the dense part works on a part of the examples, the experts on all of them
    routed = jax.nn.softmax((x @ p["router"]).astype(jnp.float32))
    gate = jax.nn.one_hot(jnp.argmax(routed, -1), routed.shape[-1]) * routed
    mine = over(jnp.einsum("bte,btd->ebtd", (gate > 0).astype(x.dtype), x), "expert", 0)
    hidden = jax.nn.gelu(jnp.einsum("ebtd,edf->ebtf", mine, p["up"]))
    out = over(jnp.einsum("ebtf,efd->ebtd", hidden, p["down"]), "expert", 0)
    y = over(jnp.einsum("ebtd,bte->btd", out, gate.astype(out.dtype)), "expert", 0)
    return jnp.mean((over(x + y, "seq", 1) - batch["y"]).astype(jnp.float32) ** 2)


@functools.cache
def batch():
    draw = np.random.default_rng(5)
    return {n: jnp.asarray(draw.normal(size=(16, LENGTH, WIDTH)), jnp.float32) for n in "xy"}


@functools.cache
def oracle():
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(make_params(), batch())
    return loss, grads, optax.tree.norm(grads)


def take_step(axis, stage, **options):
    """One step of gradient descent, clipped to half the norm: parameters and metrics."""
    mesh = zerojax.make_mesh(2, 4, **{axis: 2})
    params = make_params()
    specs = {name: SPECS[axis].get(name, P()) for name in params}
    config = zerojax.ZeroConfig(stage=stage, min_shard_size=0, **options)
    layout = zerojax.partition(params, mesh, config, specs=specs)
    tx = zerojax.zero(optax.sgd(1.0), layout)
    limit = float(oracle()[2]) / 2
    step = zerojax.make_train_step(functools.partial(loss_fn, axis=axis), tx, layout, clip_norm=limit)
    before = zerojax.TrainState.create(layout.shard(params), tx, layout)
    for name in SPECS[axis]:  # each device has its own part of the leaf along the axis too
        parts = 2 * (layout.num_shards if stage == 3 else 1)
        assert models.largest_shard(before.params[name]) == before.params[name].nbytes // parts
    after, metrics = step(before, batch())
    for value in metrics.values():
        assert len({v.tobytes() for v in models.values_on_devices(value)}) == 1
    return params, layout.unshard(after.params), metrics


@pytest.mark.parametrize(
    ("axis", "stage"), [("expert", 0), ("expert", 2), ("expert", 3), ("model", 3), ("seq", 1), ("seq", 3)]
)
def test_gradients_their_scale_and_their_norm_are_those_of_one_device(axis, stage):
    params, after, metrics = take_step(axis, stage)
    loss, grads, norm = oracle()
    np.testing.assert_allclose(metrics["loss"], loss, rtol=FLOAT32)
    np.testing.assert_allclose([metrics["grad_norm"], metrics["clipped_norm"]], [norm, norm / 2], rtol=FLOAT32)
    want = jax.tree.map(lambda p, g: p - g / 2, params, grads)
    assert models.largest_error(after, want) < FLOAT32


@pytest.mark.filterwarnings("ignore::zerojax.ZeroNotice")
@pytest.mark.parametrize("axis", ["expert", "seq"])
def test_quantised_collectives_keep_scale_and_norm_within_their_bounds(axis):
    options = {"quantize_weights": "int8", "secondary": True, "quantize_gradients": ("int8", "int4")}
    params, after, metrics = take_step(axis, 3, min_quantize_size=0, **options)
    loss, grads, norm = oracle()
    # Weights to 1/254 of a block's largest value in four products; gradients to 9/8 / 14 of it between two nodes.
    np.testing.assert_allclose(metrics["loss"], loss, rtol=4 / 254 * 4)
    bound = 2 * 9 / 8 / 14 + 4 * 4 / 254
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=bound)
    factor = float(metrics["clipped_norm"] / metrics["grad_norm"])
    moved = jax.tree.map(lambda a, b: (a - b) / factor, params, after)
    assert models.largest_error(moved, grads) < bound


@pytest.mark.filterwarnings("ignore::zerojax.ZeroNotice")
def test_weight_deltas_are_those_of_each_part_of_the_leaf():
    params, after, metrics = take_step("model", 3, min_quantize_size=0, weight_deltas="int4")
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype) if x.ndim > 1 else x, params)
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(rounded, batch())
    np.testing.assert_allclose(metrics["loss"], loss, rtol=FLOAT32)
    factor = float(metrics["clipped_norm"] / metrics["grad_norm"])
    want = jax.tree.map(lambda p, g: p - g * factor, params, grads)
    assert models.largest_error(after, want) < FLOAT32


@pytest.mark.aot
def test_expert_weights_are_neither_gathered_nor_reduced_over_their_axis():
    mesh = target_mesh("h100", 2, 8, ("node", "local", "expert"), shape=(2, 4, 2))
    extents = shapes(8, 1024, 2048)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in extents.items()}
    specs = {name: SPECS["expert"].get(name, P()) for name in params}
    layout = zerojax.partition(params, mesh, zerojax.ZeroConfig(), specs=specs)
    over_batch = NamedSharding(mesh, P(("node", "local")))
    rows = {n: jax.ShapeDtypeStruct((8 * 2, 32, 1024), jnp.bfloat16, sharding=over_batch) for n in "xy"}
    grad_fn = zerojax.value_and_grad(functools.partial(loss_fn, axis="expert"), layout)
    program = read_program(jax.jit(grad_fn).lower(layout.param_shapes(), rows).compile(), mesh)
    one_expert, dense = 2 * 1024 * 2048, 4 * 1024 * 3 * 1024
    for one in program.collectives:
        if "expert" in one.axes:
            assert set(one.axes) == {"expert"}, one
            # Tokens on their way to their experts, and the gradient of the dense part, summed over the axis that
            # divides its examples.
            assert one.payload_bytes < one_expert or one.kind in ("all-reduce", "reduce-scatter"), one
            assert one.payload_bytes <= dense * 1.01, one
    # Each device holds half of the experts: over the data axes it gathers and reduces that half.
    half = 8 // 2 * one_expert
    for kind, axes, times in (("all-gather", ("node", "local"), 2 * 2), ("reduce-scatter", "local", 2)):
        sizes = [a.num_bytes * one.executions for one in program.select(kind, axes=axes)
                 for a in (one.results if kind == "all-gather" else one.operands) if a.num_bytes == half]  # fmt: skip
        assert sum(sizes) == times * half, (kind, program.traffic())
