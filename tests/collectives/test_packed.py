"""Small leaves travel together: fewer messages, the same values and bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.collectives.packed import Pack
from zerojax.hlo.program import read_program
from zerojax.planner.gpus import target_mesh

BLOCKS = {"min_quantize_size": 0, "quantize_gradients": ("int8", "int4")}
CONFIGS = {
    "stage 1": {"stage": 1},
    "stage 1, quantised gradients": {"stage": 1, **BLOCKS},
    "stage 3": {"stage": 3},
    "stage 3, in order": {"stage": 3, "prefetch_bytes": 2**18},
    "ZeRO++": {"stage": 3, "quantize_weights": "int8", "secondary": True, "error_feedback": True, **BLOCKS},
}


def layers(params: dict, x: jax.Array) -> jax.Array:
    """Three layers that differ, one frozen leaf, one leaf used twice, extents that 8 devices do not divide."""
    for name in ("a", "b", "c"):
        x = jnp.tanh(x @ params[name]["w"].astype(x.dtype) + params[name]["b"].astype(x.dtype)) * params["scale"]
    return jnp.mean((x @ params["a"]["w"].astype(x.dtype)) ** 2)


def make_params(dtype: str) -> dict:
    keys = iter(jax.random.split(jax.random.key(0), 8))
    params = {
        name: {"w": jax.random.normal(next(keys), (128, 128)) / 8, "b": jax.random.normal(next(keys), (128,)) / 8}
        for name in ("a", "b", "c")
    }
    return jax.tree.map(lambda x: x.astype(dtype), params | {"scale": jax.random.normal(next(keys), (1, 1)) + 1})


def trained(config: dict, dtype: str, pack_bytes: int) -> tuple[list[np.ndarray], zerojax.hlo.program.CompiledProgram]:
    mesh, params = zerojax.make_mesh(num_nodes=2, devices_per_node=4), make_params(dtype)
    frozen = jax.tree.map(lambda _: True, params)
    frozen["b"]["b"] = False
    layout = zerojax.partition(
        params, mesh, zerojax.ZeroConfig(min_shard_size=64, pack_bytes=pack_bytes, **config), trainable=frozen
    )
    tx = zerojax.zero(optax.sgd(0.1), layout)
    state = zerojax.TrainState.create(layout.shard(params), tx, layout=layout)
    batch = jax.random.normal(jax.random.key(1), (16, 128))
    step = zerojax.make_train_step(layers, tx, layout).lower(state, batch).compile()
    program = read_program(step, mesh)
    for _ in range(2):
        state, _ = step(state, batch)
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(layout.unshard(state.params))], program


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in CONFIGS), ("stage 1", "bfloat16")])
def test_values_and_bytes_are_those_of_leaves_that_travel_by_themselves(name: str, dtype: str) -> None:
    together, packed = trained(CONFIGS[name], dtype, 2**20)
    apart, single = trained(CONFIGS[name], dtype, 0)
    assert len(packed.collectives) < len(single.collectives) * 2 / 3
    assert packed.received_bytes() <= single.received_bytes()
    for a, b in zip(together, apart, strict=True):
        # In bfloat16 the compiler may keep more than 8 bits of a gradient where nothing is joined: a rounding of each
        # summand and of the sum.
        np.testing.assert_allclose(a, b, rtol=0, atol=0 if dtype == "float32" else 2.0**-7 * np.abs(b).max())


@pytest.mark.needs_cuda_plugin
@pytest.mark.parametrize(("pack_bytes", "messages"), [(2**20, 1), (0, 3)])
def test_quantised_gradients_of_small_layers_are_one_message_a_hop_on_gpus(pack_bytes: int, messages: int) -> None:
    mesh, params = target_mesh("h100", 2, 4), jax.eval_shape(lambda: make_params("bfloat16"))
    config = zerojax.ZeroConfig.zero_plus_plus(min_quantize_size=0, min_shard_size=2**14, pack_bytes=pack_bytes)
    layout = zerojax.partition(params, mesh, config)
    placed = NamedSharding(mesh, PartitionSpec(("node", "local")))
    batch = jax.ShapeDtypeStruct((16, 128), jnp.bfloat16, sharding=placed)
    step = jax.jit(zerojax.value_and_grad(layers, layout)).lower(layout.param_shapes(), batch).compile()
    program = read_program(step, mesh)
    for axis in ("node", "local"):
        assert len(program.select("all-to-all", axes=axis)) == messages


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_biases_of_vectors_travel_together_and_are_not_gathered_for_the_backward_pass(dtype: str) -> None:
    mesh, batch = zerojax.make_mesh(num_nodes=2, devices_per_node=4), jnp.ones((16, 16))

    def loss(params: list, x: jax.Array) -> jax.Array:
        x = x.astype(dtype)
        for layer in params:
            x = jnp.tanh(x @ layer["w"].astype(dtype) + layer["b"].astype(dtype))
        return jnp.mean(x.astype("float32") ** 2)

    def program(num_layers: int, pack_bytes: int) -> zerojax.hlo.program.CompiledProgram:
        params = [{"w": jax.ShapeDtypeStruct((16, 16), "float32"), "b": jax.ShapeDtypeStruct((16,), "float32")}]
        layout = zerojax.partition(
            params * num_layers, mesh, zerojax.ZeroConfig(stage=3, min_shard_size=0, pack_bytes=pack_bytes)
        )
        step = jax.jit(zerojax.value_and_grad(loss, layout)).lower(layout.param_shapes(), batch).compile()
        return read_program(step, mesh)

    few, more, apart = program(2, 2**20), program(4, 2**20), program(4, 0)
    assert len(few.collectives) == len(more.collectives) < len(apart.collectives) / 3
    # The first weight's value is needed by no derivative: it travels with the biases, which none needs either.
    assert more.received_bytes() == apart.received_bytes()


@pytest.mark.parametrize(("extents", "dim"), [((3, 4), 1), ((4, 3), 0), ((2, 6, 3), 1)])
def test_a_leaf_on_two_devices_is_its_two_halves_one_after_the_other(extents, dim):
    mesh = zerojax.make_mesh(num_nodes=1, devices_per_node=2, devices=jax.devices()[:2])
    x = jnp.arange(float(np.prod(extents))).reshape(extents)
    (placement,) = zerojax.partition([x], mesh, zerojax.ZeroConfig(min_shard_size=0)).leaves
    placement = dataclasses.replace(placement, dim=dim)
    slices = np.asarray(Pack((placement, placement)).join([x, x]))
    halves = [np.asarray(half).ravel() for half in np.split(np.asarray(x), 2, axis=dim)]
    np.testing.assert_array_equal(slices.reshape(2, -1), [np.tile(half, 2) for half in halves])


def test_a_joined_leaf_has_as_many_elements_as_its_members():
    mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    members = zerojax.partition([jnp.ones((64, 16))] * 3, mesh, zerojax.ZeroConfig(min_shard_size=0)).leaves
    for unit in (1, 32):
        assert np.prod(Pack(tuple(members), unit).placement.shape) == 3 * 64 * 16
