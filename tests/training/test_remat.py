"""Activation checkpointing: values and gradients of the oracle, and memory and traffic compiled for target GPUs."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.hlo.program import read_program
from zerojax.planner.gpus import target_mesh
from zerojax.training.remat import checkpoint

LAYERS = 8
# 24 * 6 rows summed in float32 in another order: sqrt(144) * 6e-8 = 7e-7 of a leaf's largest value, and as much again
# in each of the products of width 12 and 24 that the model axis splits: seven of them on the way to the first layer.
FLOAT32 = 7 * 7e-7

MODES = {
    "nothing kept": {},
    "one name saved": {"save": ["hidden"]},
    "one name offloaded": {"offload": ["hidden"]},
    "input offloaded": {"offload": ["input"]},
    "partitioned": {"partition_over": "model"},
    "partitioned and offloaded": {"partition_over": "model", "offload": ["input"]},
}


def layer(x, w):
    hidden = checkpoint_name(jax.nn.gelu(x @ w["up"]), "hidden")
    return x + jnp.tanh(hidden @ w["down"]) * models.ramp(x.shape[-1], x.dtype), None


def scanned(options):
    """The loss of a scan over layers under `checkpoint`."""
    wrap = (lambda f: f) if options is None else functools.partial(checkpoint, prevent_cse=False, **options)

    def loss(params, batch):
        x, _ = jax.lax.scan(wrap(layer), batch["x"], params["layers"])
        return jnp.mean(jnp.tanh(x @ params["last"]).astype(jnp.float32) ** 2)

    return loss


def unrolled(options):
    """The same layers one after the other, outside a loop."""

    def loss(params, batch):
        x, wrapped = batch["x"], checkpoint(layer, **options)
        for i in range(params["layers"]["up"].shape[0]):
            x, _ = wrapped(x, jax.tree.map(lambda w, i=i: w[i], params["layers"]))
        return jnp.mean(jnp.tanh(x @ params["last"]).astype(jnp.float32) ** 2)

    return loss


def small_parameters(layers=3, width=12):
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "layers": {
            "up": jax.random.normal(keys[0], (layers, width, 2 * width)) / 3,
            "down": jax.random.normal(keys[1], (layers, 2 * width, width)) / 5,
        },
        "last": jax.random.normal(keys[2], (width, 5)),
    }


SPECS = {
    "layers": {"up": PartitionSpec(None, None, "model"), "down": PartitionSpec(None, "model")},
    "last": PartitionSpec(),
}


@functools.cache
def oracle():
    params = small_parameters()
    batch = {"x": jnp.asarray(np.random.default_rng(3).normal(size=(24, 6, 12)), jnp.float32)}
    return params, batch, jax.value_and_grad(scanned(None))(params, batch)


@pytest.mark.parametrize(
    ("form", "mode", "shape"),
    [(scanned, mode, (2, 2, 2)) for mode in MODES]
    + [(form, "partitioned and offloaded", shape) for form, shape in ((scanned, (1, 3, 2)), (unrolled, (1, 1, 2)))]
    + [(unrolled, "one name saved", (1, 3, 2))],
)
def test_gradients_equal_those_of_the_unsharded_model(form, mode, shape):
    params, batch, (value, grads) = oracle()
    nodes, local, model = shape
    mesh = zerojax.make_mesh(nodes, local * model, jax.devices()[: nodes * local * model], model=model)
    layout = zerojax.partition(params, mesh, zerojax.ZeroConfig(stage=3, min_shard_size=0), specs=SPECS)
    got, got_grads = jax.jit(zerojax.value_and_grad(form(MODES[mode]), layout))(layout.shard(params), batch)
    np.testing.assert_allclose(got, value, rtol=1e-6)
    assert models.largest_error(layout.unshard(got_grads), grads) < FLOAT32


@pytest.mark.parametrize("stage", [0, 2])
def test_stages_with_whole_parameters_take_it_too(stage):
    params, batch, (_, grads) = oracle()
    mesh = zerojax.make_mesh(2, 4, model=2)
    layout = zerojax.partition(params, mesh, zerojax.ZeroConfig(stage=stage, min_shard_size=0), specs=SPECS)
    options = MODES["partitioned and offloaded"]
    _, got = jax.jit(zerojax.value_and_grad(scanned(options), layout))(layout.shard(params), batch)
    assert models.largest_error(layout.unshard(got), grads) < FLOAT32


def test_it_works_without_zerojax_on_one_device():
    params, batch, (value, grads) = oracle()
    got, got_grads = jax.jit(jax.value_and_grad(unrolled({"offload": ["input", "hidden"]})))(params, batch)
    np.testing.assert_allclose(got, value, rtol=1e-6)
    assert models.largest_error(got_grads, grads) < FLOAT32


def test_any_argument_can_hold_the_activations():
    wrapped = checkpoint(lambda p, state: state["x"] * p + state["n"], activations=1, offload=["input"])
    state = {"x": jnp.arange(3.0), "n": jnp.arange(3)}
    assert jax.grad(lambda p: wrapped(p, state).sum())(2.0) == 3


# ------------------------------------------------------------------ compiled ahead of time for target GPUs

ROWS, LENGTH, WIDTH = 8, 512, 1024
CHECKPOINTS = LAYERS * ROWS * LENGTH * WIDTH * 2  # bytes: the input of every layer on one device, bfloat16
WEIGHTS = LAYERS * 2 * WIDTH * 4 * WIDTH * 2 // 2  # bytes of all layers on the 2 devices of a model axis, each


@functools.cache
def compiled(mode, prefetch_bytes=None):
    mesh = target_mesh("h100", 2, 8, ("node", "local", "model"), shape=(2, 4, 2))
    shapes = {
        "layers": {
            "up": jax.ShapeDtypeStruct((LAYERS, WIDTH, 4 * WIDTH), jnp.bfloat16),
            "down": jax.ShapeDtypeStruct((LAYERS, 4 * WIDTH, WIDTH), jnp.bfloat16),
        },
        "last": jax.ShapeDtypeStruct((WIDTH, 8), jnp.bfloat16),
    }
    layout = zerojax.partition(shapes, mesh, zerojax.ZeroConfig(prefetch_bytes=prefetch_bytes), specs=SPECS)
    sharding = NamedSharding(mesh, PartitionSpec(("node", "local")))
    batch = {"x": jax.ShapeDtypeStruct((ROWS * 8, LENGTH, WIDTH), jnp.bfloat16, sharding=sharding)}
    loss = scanned(None if mode == "no checkpoint" else MODES[mode])
    step = jax.jit(zerojax.value_and_grad(loss, layout)).lower(layout.param_shapes(), batch)
    return read_program(step.compile(), mesh)


def memory(mode):
    figures = compiled(mode).memory
    assert figures is not None
    return figures


@pytest.mark.aot
def test_memory_falls_to_the_inputs_of_the_layers_and_below():
    plain, nothing = memory("no checkpoint"), memory("nothing kept")
    assert nothing.temp < plain.temp / 3
    part, host, both = (memory(m) for m in ("partitioned", "input offloaded", "partitioned and offloaded"))
    assert plain.host_temp == nothing.host_temp == part.host_temp == 0
    # Half of the checkpoints is gone from each device of the model axis, but for a gathered input (a quarter of that)
    # and, on JAX 0.12, a tenth more that is scheduled beside it.
    assert nothing.temp - part.temp > 0.6 * CHECKPOINTS / 2
    assert host.host_temp == CHECKPOINTS
    assert both.host_temp == CHECKPOINTS / 2
    assert nothing.temp - host.temp > 0.7 * CHECKPOINTS
    assert nothing.temp - both.temp > 0.7 * CHECKPOINTS
    # A loop that gathers ahead runs its last layer forward and back at once: the input of that one stays.
    ahead = compiled("input offloaded", "auto").memory
    assert ahead is not None
    assert ahead.host_temp == CHECKPOINTS * (LAYERS - 1) // LAYERS


@pytest.mark.needs_cuda_plugin
@pytest.mark.parametrize(
    "mode",
    ["partitioned", *(pytest.param(m, marks=pytest.mark.aot) for m in ("nothing kept", "partitioned and offloaded"))],
)
def test_the_weights_still_travel_three_times(mode):
    program = compiled(mode)
    large = WIDTH * 4 * WIDTH // 8  # bytes that one gather or reduction of a weight moves at least
    for kind, times in (("all-gather", 2), ("reduce-scatter", 1)):
        hops = ("node", "local", ("node", "local"))
        node, local, both = (program.received_bytes(kind, axes=axes, min_bytes=large) for axes in hops)
        # A shard is 1/8 of a weight: "node" brings one more, "local" three times the two; a gather is one message.
        hop = times * WEIGHTS // 8
        assert (node, local, both) == ((0, 0, 7 * hop) if kind == "all-gather" else (hop, 6 * hop, 0))


@pytest.mark.aot
def test_partitioning_costs_two_gathers_of_the_input_and_nothing_else():
    before, after = compiled("nothing kept"), compiled("partitioned")
    assert after.received_bytes("all-gather", axes="model") == 2 * CHECKPOINTS // 2
    assert before.received_bytes("all-gather", axes="model") == 0
    for kind in ("all-reduce", "reduce-scatter", "all-to-all", "collective-permute"):
        assert after.received_bytes(kind, axes="model") == before.received_bytes(kind, axes="model")


# ------------------------------------------------------------------ bad input


def test_names_that_would_do_nothing_are_refused():
    x = jnp.ones((4, 12))
    w = {"up": jnp.ones((12, 24)), "down": jnp.ones((24, 12))}
    with pytest.raises(ValueError, match=r"named \['hiden'\] \(it has \['hidden'\]\)"):
        checkpoint(layer, save=["hiden"])(x, w)
    with pytest.raises(ValueError, match=r"\['hidden'\] cannot be both"):
        checkpoint(layer, save=["hidden"], offload=["hidden"])
    with pytest.raises(ValueError, match=r"save='hidden'\): a sequence"):
        checkpoint(layer, save="hidden")
    with pytest.raises(ValueError, match=r"no positional argument \[2\] among 2"):
        checkpoint(layer, offload=["input"], activations=2)(x, w)
    with pytest.raises(ValueError, match=r"named \['input'\]"):  # no activation among integers
        checkpoint(lambda n: n * 1.0, offload=["input"])(jnp.arange(3))


def test_an_axis_that_cannot_split_the_activations_is_refused():
    params, batch, _ = oracle()
    mesh = zerojax.make_mesh(2, 4, model=2)
    layout = zerojax.partition(params, mesh, zerojax.ZeroConfig(stage=3, min_shard_size=0), specs=SPECS)
    stored = layout.shard(params)
    for axis, message in [
        ("expert", r"mesh in use has axes \('node', 'local', 'model'\)"),
        ("local", "is Manual here"),
    ]:
        with pytest.raises(ValueError, match=message):
            zerojax.value_and_grad(scanned({"partition_over": axis}), layout)(stored, batch)
    odd = checkpoint(lambda x: jnp.sin(x), partition_over="model")
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"argument 0\['h'\] of \(3, 5\) has no dim that divides by"),
    ):
        checkpoint(lambda t: t["h"], partition_over="model")({"h": jnp.ones((3, 5))})
    with pytest.raises(ValueError, match="mesh in use has axes"):
        odd(jnp.ones((4, 4)))
