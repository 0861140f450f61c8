"""The order of gathers: values stay exact, bytes stay as they are, and memory does not grow with unrolled layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.models import largest_error, make_layout
from zerojax.hlo.program import read_program
from zerojax.planner.gpus import TARGETS, target_mesh
from zerojax.planner.replay import replay_text

WIDTH = 512


def unrolled_loss(remat, width=WIDTH, **options):
    def layer(h, p):
        return h + jnp.tanh((h * p["scale"]) @ p["up"]) @ p["down"]

    run = jax.checkpoint(layer, **options) if remat else layer

    def loss(params, x):
        h = x @ params["first"] if "first" in params else x
        for p in params["layers"]:
            h = run(h, p)
        out = h @ params["first"].T if "first" in params else h
        return jnp.mean((out.astype(jnp.float32) - 1) ** 2)

    loss.one = run
    return loss


def small_params(layers=4, width=16):
    keys = jax.random.split(jax.random.key(0), 2 * layers + 1)
    return {
        "first": jax.random.normal(keys[-1], (9, width)) / 3,
        "layers": [
            {
                "up": jax.random.normal(keys[2 * i], (width, 3 * width)) / 4,
                "down": jax.random.normal(keys[2 * i + 1], (3 * width, width)) / 7,
                "scale": jnp.linspace(0.5, 1.5, width),
            }
            for i in range(layers)
        ],
    }


SAVE_PRODUCTS = {"policy": jax.checkpoint_policies.dots_saveable}


@pytest.mark.parametrize(
    ("remat", "options"), [(False, {}), (True, {}), (True, {"prevent_cse": False}), (True, SAVE_PRODUCTS)]
)
@pytest.mark.parametrize("window", [0, 5000, 2**29])
def test_ordered_gradients_equal_plain_ones(remat, options, window):
    # Windows of nothing, of less than a layer's 9 kB, and of more than the model.
    params, loss = small_params(), unrolled_loss(remat, **options)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 9)), jnp.float32)
    layout = make_layout(params, "2x4", 3, prefetch_bytes=window)
    value, grads = jax.jit(zerojax.value_and_grad(loss, layout))(layout.shard(params), x)
    expected, expected_grads = jax.value_and_grad(loss)(params, x)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert largest_error(layout.unshard(grads), expected_grads) < 1e-5  # float32, summed in another order


def test_a_window_is_bytes_and_needs_stage_3():
    for window in (-1, 1.5, True):
        with pytest.raises(ValueError, match="prefetch_bytes"):
            zerojax.ZeroConfig(prefetch_bytes=window)
    with pytest.raises(ValueError, match=r"prefetch_bytes.*stage 3"):
        zerojax.ZeroConfig(stage=2, prefetch_bytes=0)


def scanned_loss(remat, **options):
    layers = unrolled_loss(remat, **options)

    def loss(params, x):
        h, _ = jax.lax.scan(lambda h, p: (layers.one(h, p), None), x, params["layers"])
        return jnp.mean((h.astype(jnp.float32) - 1) ** 2)

    return loss


def compiled_for_gpus(layers, remat, window, *, scanned=False, **options):
    """A gradient compiled for 4 x 8 H100, with the options that a step passes."""
    extents = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH), "scale": (WIDTH,)}
    lead = (layers,) if scanned else ()
    one = {name: jax.ShapeDtypeStruct((*lead, *extent), jnp.bfloat16) for name, extent in extents.items()}
    params = {"layers": one if scanned else [one] * layers}
    layout = zerojax.partition(params, target_mesh("h100", 4, 8), zerojax.ZeroConfig(prefetch_bytes=window))
    over = jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec(("node", "local")))
    x = jax.ShapeDtypeStruct((layout.mesh.size * 256, WIDTH), jnp.bfloat16, sharding=over)
    loss = (scanned_loss if scanned else unrolled_loss)(remat, **options)
    step = jax.jit(zerojax.value_and_grad(loss, layout), compiler_options=zerojax.compiler_options(layout))
    compiled = step.lower(layout.param_shapes(), x).compile()
    return compiled, read_program(compiled, layout.mesh, node_axes=("node",))


LAYER_BYTES = 2 * 2 * 4 * WIDTH * WIDTH
KEPT = {True: 2 * 256 * WIDTH, False: 2 * 256 * (2 * WIDTH + 4 * WIDTH)}  # bytes of activations a layer keeps
CSE = {"prevent_cse": False}


@pytest.mark.aot
@pytest.mark.needs_cuda_plugin
@pytest.mark.parametrize(
    ("scanned", "remat", "options"),
    [(False, True, {}), (False, True, CSE), (False, False, {}), (True, True, CSE), (True, False, {})],
)
def test_memory_grows_by_what_layers_keep_and_no_gather_is_merged_or_doubled(scanned, remat, options):
    window, found = LAYER_BYTES if scanned else LAYER_BYTES // 2, {}
    for layers in (4, 8, 12):
        compiled, program = compiled_for_gpus(layers, remat, window, scanned=scanned, **options)
        found[layers] = compiled.memory_analysis().temp_size_in_bytes
        assert gathered_bytes(program) == 2 * layers * LAYER_BYTES
    for few in (4, 8):
        growth = (found[few + 4] - found[few]) / 4
        # A scan keeps what is between its products before and after the activation, whatever gathers its weights.
        kept = KEPT[remat] + (2 * 256 * 4 * WIDTH if scanned and not remat else 0)
        assert growth < kept + LAYER_BYTES / 20, (growth, kept, LAYER_BYTES)


@pytest.mark.aot
@pytest.mark.needs_cuda_plugin
def test_a_checkpointed_layer_travels_in_one_message_that_no_other_layer_shares():
    """A message of two layers would start as late as one needs it and be waited for by the other."""
    layers = 6
    for layers_ahead in (1, 4):  # more than one fit into the window
        _, program = compiled_for_gpus(layers, True, layers_ahead * LAYER_BYTES)
        gathers = program.select("all-gather", axes=("node", "local"))
        assert [len(one.results) for one in gathers] == [2] * 2 * layers  # forward, and again behind it
        for axis in ("node", "local"):
            reductions = program.select("reduce-scatter", axes=(axis,))
            assert [len(one.results) for one in reductions] == [2] * layers


@pytest.mark.aot
@pytest.mark.needs_cuda_plugin
@pytest.mark.parametrize(("remat", "hidden"), [(True, 0.65), (False, 0.4)])
def test_unrolled_layers_hide_their_communication(remat, hidden):
    """Six layers of a GPT of 7.5 billion, 4 x 8 H100, 400 GB/s into a node: replayed, 76 % is behind compute where
    layers are checkpointed, 48 % and more where they are not.

    What is not are the gather of the first layer and the last reductions, the less the more layers.
    """
    width, heads, layers = 4096, 32, 6
    extents = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    one = {name: jax.ShapeDtypeStruct(extent, jnp.bfloat16) for name, extent in extents.items()}

    def layer(h, p):
        q, k, v = jnp.split((h @ p["qkv"]).reshape(*h.shape[:2], 3 * heads, -1), 3, axis=2)
        h = h + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(h.shape) @ p["out"]
        return h + jax.nn.gelu(h @ p["up"]) @ p["down"]

    def loss(params, x):
        for p in params:
            x = (jax.checkpoint(layer) if remat else layer)(x, p)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    mesh = target_mesh("h100", 4, 8)
    layout = zerojax.partition([one] * layers, mesh, zerojax.ZeroConfig())
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("node", "local")))
    x = jax.ShapeDtypeStruct((mesh.size, 2048, width), jnp.bfloat16, sharding=over)
    step = jax.jit(zerojax.value_and_grad(loss, layout), compiler_options=zerojax.compiler_options(layout))
    compiled = step.lower(layout.param_shapes(), x).compile()
    assert replay_text(compiled, mesh, TARGETS["h100"], bandwidth="400GB/s").hidden_share > hidden


def gathered_bytes(program):
    """Bytes of the full weights that come out of gathers, which run over both axes."""
    gathers = program.select("all-gather", axes=("node", "local"))
    return sum(array.num_bytes * one.executions for one in gathers for array in one.results)
