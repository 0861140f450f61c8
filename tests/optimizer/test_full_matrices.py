"""Muon on sharded matrices: two collectives for a stack, one for a single matrix, none in an iteration; same values."""

import functools
import math

import jax
import jax.numpy as jnp
import models
import optax
import optax.contrib
import pytest

import zerojax
from zerojax.hlo.program import CompiledProgram, read_program
from zerojax.planner.gpus import target_mesh

# A matrix for every device or more, fewer matrices than devices, one whose columns need padding; tall, wide and padded.
SHAPES = {
    "looped": (32, 512, 512), "few": (6, 512, 1024), "padded": (3, 500, 1000),
    "wide": (512, 2048), "tall": (1024, 512), "odd": (1000, 509), "bias": (2048,),
}  # fmt: skip
DEVICES = 16


def dims(tree):
    """The last two dims of every leaf but the biases are a matrix."""
    return {k: None if k == "bias" else optax.contrib.MuonDimensionNumbers(-2, -1) for k in tree}


def muon(**options):
    return optax.contrib.muon(1e-2, muon_weight_dimension_numbers=dims, **options)


def kind(tree):
    return {name: name if name == "looped" else "others" for name in tree}


@functools.cache
def compiled() -> tuple[CompiledProgram, zerojax.Layout]:
    """One update on 2 x 8 H100. "looped" has coefficients for each step, and iterates in a loop; the others unroll."""
    mesh = target_mesh("h100", 2, 8)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    layout = zerojax.partition(params, mesh, zerojax.ZeroConfig(stage=3, min_shard_size=1024))
    tx = zerojax.zero(optax.partition({"looped": muon(ns_coeffs="dion"), "others": muon()}, kind), layout)
    stored = layout.param_shapes()
    step = jax.jit(lambda grads, state, params: tx.update(grads, state, params), donate_argnums=(0, 1))
    return read_program(step.lower(stored, tx.init(stored), stored).compile(), mesh), layout


def moved_elements(shape: tuple[int, ...]) -> int:
    return -(-shape[0] // DEVICES) * shape[1] * shape[2]


@pytest.mark.needs_cuda_plugin
def test_a_stack_of_matrices_is_dealt_out_and_taken_back_and_a_single_one_gathered():
    program, layout = compiled()
    padded = {p.path: p.padded_shape for p in layout.leaves}
    gathered = [r for one in program.select("all-gather") for r in one.results for _ in range(one.executions)]
    singles = [padded[f"['{name}']"] for name in ("wide", "tall", "odd")]
    assert sorted(math.prod(r.dims) for r in gathered) == sorted(map(math.prod, singles)), program.traffic()
    dealt = [r for one in program.select("all-to-all") for r in one.results for _ in range(one.executions)]
    stacks = [moved_elements(padded[f"['{name}']"]) for name in ("looped", "few", "padded")]
    assert sorted(math.prod(r.dims) for r in dealt) == sorted(2 * stacks), program.traffic()
    assert {one.kind for one in program.collectives} == {"all-gather", "all-to-all"}, program.traffic()
    elements = sum(map(math.prod, singles)) + 2 * sum(stacks)
    assert program.received_bytes() == 4 * elements * (DEVICES - 1) // DEVICES  # the 19 MB of matrices.py


@pytest.mark.needs_cuda_plugin
def test_no_collective_is_in_an_iteration():
    program, _ = compiled()
    assert not program.select(in_loop=True), program.traffic()


@pytest.mark.parametrize(("mesh", "stage"), [("2x4", 3), ("1x3", 1)])
def test_values_are_those_of_one_device(mesh, stage):
    shapes = {"looped": (3, 5, 16), "few": (8, 16, 6), "single": (16, 9), "bias": (7,)}
    keys = jax.random.split(jax.random.key(0), 3)
    params, *grads = (
        {name: jax.random.normal(jax.random.fold_in(key, i), s) for i, (name, s) in enumerate(shapes.items())}
        for key in keys
    )
    layout = models.make_layout(params, mesh, stage)
    plain = optax.partition({"looped": muon(ns_coeffs="dion"), "others": muon()}, kind)
    tx = zerojax.zero(plain, layout)
    state, want_state = tx.init(layout.shard(params)), plain.init(params)
    step = jax.jit(tx.update)
    for one in grads:
        updates, state = step(layout.shard(one), state, layout.shard(params))
        want, want_state = plain.update(one, want_state, params)
        # As in test_optimizers: five matrix polynomials amplify the rounding of a product.
        assert models.largest_error(layout.unshard(updates), want) < 5e-4
    assert step._cache_size() == 1

