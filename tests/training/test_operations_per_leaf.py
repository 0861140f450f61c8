"""What one more small leaf adds to a step: a fixed number of operations to compile, and no message."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax

LEAVES = 2
# Constraints of a leaf: its gradient, its two new moments, its update (at stage 3) or itself (stages 1 and 2).
CONSTRAINTS = 4
# Operations beside those of plain JAX, as counted: the constraints, and where a leaf is joined and cut out, twice.
# Without common messages they are 16 at stage 3, of which 5 are messages.
MORE_THAN_PLAIN = {1: 15, 2: 16, 3: 21}


def lowered(stage: int | None, num_layers: int) -> Counter[str]:
    """Operations of a step of small dense layers with Adam, by name, as the compiler gets them; None: plain JAX."""
    layer = {"w": jax.ShapeDtypeStruct((16, 16), "float32"), "b": jax.ShapeDtypeStruct((16,), "float32")}
    params = [layer] * num_layers

    def loss(params: list, x: jax.Array) -> jax.Array:
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean(x * x)

    grad_fn, tx = jax.value_and_grad(loss), optax.adam(1e-3)
    state = jax.eval_shape(tx.init, params)
    if stage is not None:
        mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
        layout = zerojax.partition(params, mesh, zerojax.ZeroConfig(stage=stage, min_shard_size=0))
        grad_fn, tx, params = zerojax.value_and_grad(loss, layout), zerojax.zero(tx, layout), layout.param_shapes()
        state = tx.init(params)

    def step(params: list, state: optax.OptState, x: jax.Array) -> tuple:
        value, grads = grad_fn(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    text = jax.jit(step).lower(params, state, jax.ShapeDtypeStruct((16, 16), "float32")).as_text()
    return Counter(re.findall(r"= \"?((?:stablehlo|sdy)\.\w+)", text))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_more_leaf_is_a_few_operations_and_no_message(stage: int) -> None:
    some, more, most = (lowered(stage, num_layers) for num_layers in (3, 5, 7))
    assert most.total() - more.total() == more.total() - some.total()  # it grows with the leaves, not with their square
    plain = (lowered(None, 5).total() - lowered(None, 3).total()) / (2 * LEAVES)
    each = {name: (count - some[name]) / (2 * LEAVES) for name, count in more.items()}
    messages = [name for name in each if re.search("all_gather|reduce_scatter|all_reduce|all_to_all", name)]
    assert messages
    assert not any(each[name] for name in messages)
    assert each["sdy.sharding_constraint"] <= CONSTRAINTS
    assert sum(each.values()) <= plain + MORE_THAN_PLAIN[stage]
