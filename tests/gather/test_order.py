"""The order of gathers: values stay exact, bytes stay as they are, and memory does not grow with unrolled layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.models import largest_error, make_layout
from zerojax.hlo.program import read_program
from zerojax.planner.gpus import absent_mesh

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


def compiled_for_gpus(layers, remat, window, **options):
    shape = jax.ShapeDtypeStruct
    params = {
        "layers": [
            {
                "up": shape((WIDTH, 4 * WIDTH), jnp.bfloat16), "down": shape((4 * WIDTH, WIDTH), jnp.bfloat16),
                "scale": shape((WIDTH,), jnp.bfloat16),
            }
            for _ in range(layers)
        ]
    }  # fmt: skip
    layout = zerojax.partition(params, absent_mesh("h100", 2, 4), zerojax.ZeroConfig(prefetch_bytes=window))
    over = jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec(("node", "local")))
    x = shape((8 * 256, WIDTH), jnp.bfloat16, sharding=over)
    step = jax.jit(zerojax.value_and_grad(unrolled_loss(remat, **options), layout))
    compiled = step.lower(layout.param_shapes(), x).compile()
    return compiled, read_program(compiled, layout.mesh, node_axes=("node",))


LAYER_BYTES = 2 * 2 * 4 * WIDTH * WIDTH
KEPT = {True: 2 * 256 * WIDTH, False: 2 * 256 * (2 * WIDTH + 4 * WIDTH)}  # bytes of activations a layer keeps


@pytest.mark.needs_cuda_plugin
@pytest.mark.parametrize(("remat", "options"), [(True, {}), (True, {"prevent_cse": False}), (False, {})])
def test_memory_of_unrolled_layers_grows_by_what_they_keep_and_no_gather_is_merged_or_doubled(remat, options):
    temporaries, received = {}, {}
    for layers in (4, 8):
        compiled, program = compiled_for_gpus(layers, remat, LAYER_BYTES // 2, **options)
        temporaries[layers] = compiled.memory_analysis().temp_size_in_bytes
        received[layers] = program
    growth = (temporaries[8] - temporaries[4]) / 4
    assert growth < KEPT[remat] + LAYER_BYTES / 20, (growth, KEPT[remat], LAYER_BYTES)
    for layers, program in received.items():
        assert gathered_bytes(program) == 2 * layers * LAYER_BYTES


def gathered_bytes(program):
    """Bytes of the full weights that come out of gathers, by those over the inner axis."""
    return sum(
        sum(s.num_bytes for s in c.results) for c in program.collectives if c.kind == "all-gather" and is_inner(c)
    )


def is_inner(collective):
    return tuple(collective.axes) == ("node", "local")
