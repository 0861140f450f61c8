"""Bytes of every class of state on each device: the formulas of arXiv 1910.02054, section 5, on real arrays."""

import re

import jax
import jax.numpy as jnp
import models
import optax
import pytest

import zerojax
from zerojax.optimizer.zero import ZeroState


def parameters(odd: bool):
    """Mixed-precision parameters; with `odd`, leaves that no number of devices above one divides."""
    extents = [(33, 17), (3, 31, 13)] if odd else [(168, 48), (3, 168, 24)]
    return {f"w{i}": jnp.ones(shape, jnp.bfloat16) for i, shape in enumerate(extents)}


def held(tree) -> int:
    """Bytes on the device that holds most."""
    totals: dict[int, int] = {}
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            totals[shard.device.id] = totals.get(shard.device.id, 0) + shard.data.nbytes
    return max(totals.values())


def loss_fn(params, batch):
    return sum(jnp.mean(w.astype(jnp.float32) ** 2) for w in params.values()) + jnp.mean(batch)


# Every stage meets leaves that divide and leaves that are padded, and every kind of mesh.
CASES = [
    (0, "2x4", True), (0, "1x1", False), (1, "2x4", False), (1, "1x7", True),
    (2, "1x3", False), (2, "2x4", True), (3, "1x1", False), (3, "2x4", False), (3, "1x7", True), (3, "1x3", True),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "mesh", "odd"), CASES)
def test_bytes_on_each_device_are_those_of_the_paper(stage, mesh, odd):
    params = parameters(odd)
    layout = models.make_layout(params, mesh, stage)
    n, psi = layout.num_shards, sum(x.size for x in params.values())
    stored = layout.shard(params)
    state = zerojax.zero(optax.adam(1e-3), layout).init(stored)
    assert isinstance(state, ZeroState)
    grads = zerojax.value_and_grad(loss_fn, layout)(stored, jnp.ones((n, 1)))[1]

    # What padding adds to a device, per parameter element: read from what describe() prints, 2 bytes an element.
    printed = re.findall(r"padded by \d+ to divide by \d+, ([\d,]+) bytes in all", layout.describe())
    waste = sum(int(p.replace(",", "")) for p in printed) // 2 / n
    assert (waste > 0) == (odd and n > 1), layout.describe()
    count = 4  # the step counter of Adam

    share = psi / n + waste
    assert held(stored) == 2 * (share if stage == 3 else psi)
    assert held((state.inner, state.master)) - count == 12 * (share if stage >= 1 else psi)
    assert held(grads) == 2 * (share if stage >= 1 else psi)

    total = held(stored) + held(grads) + held((state.inner, state.master)) - count
    formulas = {
        0: 16 * psi,
        # Stage 1 holds full gradients inside the step, but returns shards: 2 psi of them for a moment.
        1: 2 * psi + 14 * psi / n,
        2: 2 * psi + 14 * psi / n,
        3: 16 * psi / n,
    }
    padded_classes = {0: 0, 1: 14, 2: 14, 3: 16}
    assert total == formulas[stage] + padded_classes[stage] * waste


def test_stage_one_as_drop_in_holds_whole_gradients():
    """4 psi + 12 psi / N where the user's own `jax.grad` makes the gradients."""
    params = parameters(odd=False)
    layout = models.make_layout(params, "2x4", 1)
    stored = layout.shard(params)
    state = zerojax.zero(optax.adam(1e-3), layout).init(stored)
    grads = jax.jit(jax.grad(loss_fn))(stored, jnp.ones((8, 1)))
    psi = sum(x.size for x in params.values())
    assert held(stored) + held(grads) + held((state.inner, state.master)) - 4 == 4 * psi + 12 * psi / 8


def test_describe_lists_what_is_whole_and_what_is_padded():
    params = {"odd": jnp.ones((33, 17)), "small": jnp.ones((5,)), "even": jnp.ones((64, 64))}
    trainable = {"odd": False, "small": True, "even": True}
    layout = models.make_layout(params, "2x4", 3, min_shard_size=8, trainable=trainable)
    text = layout.describe()
    assert "sharded     2 leaves" in text
    assert "['small'] (5,) float32: replicated, 20 bytes: 5 elements, fewer than min_shard_size 8" in text
    # 33 rows become 40, or 17 columns 24: the first adds less, 7 x 17 x 4 bytes.
    assert "['odd'] (33, 17) float32: dim 0 of 33 padded by 7 to divide by 8, 476 bytes in all" in text
    assert "not trained: ['odd']" in text
