"""The evaluator: any program over stored parameters has the values and gradients it has over full ones.

The oracle is `jax.value_and_grad` on one device of the mean over the devices' parts of the batch. Every program stands
for a primitive or a way of using a weight. What must be true of the way there (how often, in which dtype and where
a leaf is gathered and reduced) is read from the jaxpr, which is the same on every backend.
"""

import functools
import math
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from jax import lax
from tolerances import BFLOAT16_OF_4, FLOAT32
from weight_programs import (
    DEVICES,
    MESH,
    PROGRAMS,
    examples,
    layers_in_microbatches,
    layers_unrolled_by_index,
    mean,
    narrow_layers_unrolled_by_index,
    narrow_stack_scanned,
    narrow_stack_widened_and_scanned,
    one_use,
    parameters,
    scanned_layers,
    scanned_under_checkpoint,
    stack_reshaped_before_the_loop,
    stored_narrow_and_widened,
)

import zerojax

# At stage 2 weights are replicated and only the way of the gradient differs.
STAGE_TWO = (
    "tied_and_transposed", "static_slices", "slice_whose_place_differs_between_devices", "scanned_under_checkpoint",
    "narrow_stack_scanned", "layers_in_microbatches", "stack_scanned_and_used_whole", "stopped_gradients",
)  # fmt: skip


def narrow(name: str) -> bool:
    return "narrow" in name


def wanted(fn):
    """Loss and gradient on one device: the mean over the parts of the batch that the devices would get."""
    x = examples()

    def loss(p):
        return sum(fn(p, part) for part in x.reshape(DEVICES, -1, 12)) / DEVICES

    return jax.value_and_grad(loss)


@functools.cache
def results(stage: int) -> dict[str, Any]:
    """(value, gradient) of every program, on stored parameters (stages 2, 3) or by the oracle (0), compiled as one."""
    params, x = parameters(), examples()
    layout = models.make_layout(params, MESH, stage)
    failures: dict[str, Any] = {}

    def everything(p, x):
        out = {}
        for name, fn in PROGRAMS.items():
            if stage == 2 and name not in STAGE_TWO:
                continue
            try:
                out[name] = zerojax.value_and_grad(fn, layout)(p, x) if stage else wanted(fn)(p)
            except Exception as error:  # one program's failure is that program's alone
                failures[name] = error
        return out

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", zerojax.GatherWarning)
        out = jax.jit(everything)(layout.shard(params) if stage else params, x)
    return {**{name: (loss, layout.unshard(grads)) for name, (loss, grads) in out.items()}, **failures}


@pytest.mark.parametrize(("name", "stage"), [*((name, 3) for name in PROGRAMS), *((name, 2) for name in STAGE_TWO)])
def test_program_on_stored_parameters_equals_the_program_on_whole_ones(name, stage):
    got, want = results(stage)[name], results(0)[name]
    for result in (got, want):
        if isinstance(result, Exception):
            raise result
    tolerance = BFLOAT16_OF_4 if narrow(name) else FLOAT32
    np.testing.assert_allclose(got[0], want[0], rtol=tolerance, atol=tolerance)
    assert models.largest_error(got[1], want[1]) < tolerance


# ---------------------------------------------------------------- how it gets there, from the jaxpr


class Moved(NamedTuple):
    """One collective in a jaxpr: its primitive, operand, and the number of loops around it."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    loops: int


def collectives(fn, stage=3, **config) -> list[Moved]:
    params, x = jax.eval_shape(parameters), jax.eval_shape(examples)
    layout = models.make_layout(params, MESH, stage, **config)
    jaxpr = jax.make_jaxpr(zerojax.value_and_grad(fn, layout))(layout.param_shapes(), x)
    return list(walk(jaxpr.jaxpr, 0))


def walk(jaxpr, loops):
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in ("all_gather", "reduce_scatter", "psum", "psum_invariant"):
            for operand in eqn.invars:
                kind = "all_reduce" if "psum" in name else name
                yield Moved(kind, tuple(operand.aval.shape), operand.aval.dtype.name, loops)
        for inner in inner_jaxprs(eqn):
            yield from walk(inner, loops + (name in ("scan", "while")))


def inner_jaxprs(eqn):
    def is_jaxpr(x):
        return hasattr(x, "eqns") or hasattr(x, "jaxpr")

    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
        if is_jaxpr(value):
            yield getattr(value, "jaxpr", value)


def of_size(found, kind, elements):
    return [one for one in found if one.kind == kind and math.prod(one.shape) == elements]


W = 12 * 16  # elements of one layer of every large leaf


def test_a_use_gathers_once_forward_once_backward_and_reduces_once():
    found = collectives(one_use)
    # Two hops: a quarter of the weight over "node", then a half over "local"; the reduction is the mirror image.
    for size in (W // 4, W // 2):
        assert len(of_size(found, "all_gather", size)) == 2, found
    assert [len(of_size(found, "reduce_scatter", size)) for size in (W, W // 2)] == [1, 1]


def test_a_tied_weight_is_reduced_once():
    found = collectives(lambda p, x: mean(jnp.tanh(x @ p["w"]) @ p["w"].T))
    assert len(of_size(found, "reduce_scatter", W)) == 1


def test_layers_move_inside_the_loops_one_at_a_time():
    found = [m for m in collectives(scanned_layers) if m.kind != "all_reduce"]
    assert found
    assert {m.loops for m in found} == {1}
    # Two leaves, each gathered in the forward and the backward loop.
    assert len(of_size(found, "all_gather", W // 4)) == 4
    assert len(of_size(found, "reduce_scatter", W)) == 2


def test_microbatches_around_layers_move_in_the_inner_loop():
    found = [m for m in collectives(layers_in_microbatches) if m.kind != "all_reduce"]
    assert {m.loops for m in found} == {2}


@functools.cache
def compiled_text(fn) -> str:
    params, x = jax.eval_shape(parameters), jax.eval_shape(examples)
    layout = models.make_layout(params, MESH, 3)
    lowered = jax.jit(zerojax.value_and_grad(fn, layout)).lower(layout.param_shapes(), x)
    return lowered.compile().as_text() or ""


@pytest.mark.parametrize("fn", [scanned_layers, scanned_under_checkpoint, layers_in_microbatches])
def test_no_stack_of_whole_weights_is_in_the_compiled_program(fn):
    text = compiled_text(fn)
    assert "f32[3,12,4]" in text, "stacks of shards are"
    assert "f32[12,16]" in text, "single full weights are"
    assert "f32[3,12,16]" not in text
    assert "f32[3,16,12]" not in text


@pytest.mark.parametrize("fn", [narrow_stack_scanned, narrow_layers_unrolled_by_index])
def test_a_cast_is_made_before_the_gather(fn):
    found = [m for m in collectives(fn) if m.kind == "all_gather"]
    narrow_ones = [m for m in found if m.dtype == "uint16"]
    assert len(narrow_ones) >= len(found) // 2
    if fn is narrow_stack_scanned:
        assert {m.dtype for m in found} == {"uint16"}
        assert {m.dtype for m in collectives(fn) if m.kind == "reduce_scatter"} == {"bfloat16"}


def test_a_widening_is_made_after_the_gather():
    assert {m.dtype for m in collectives(stored_narrow_and_widened) if m.kind == "all_gather"} == {"uint16"}


def test_the_gradient_travels_in_the_configured_dtype():
    found = collectives(one_use, grad_dtype="bfloat16")
    assert {m.dtype for m in found if m.kind == "reduce_scatter"} == {"bfloat16"}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_complex_gradient_keeps_its_imaginary_part_whatever_the_configured_dtype(stage):
    params = {"c": jnp.arange(1.0, 9) + 1j * jnp.arange(8.0)}
    layout = models.make_layout(params, "2x4", stage, grad_dtype="bfloat16")

    def loss(params, batch):
        return jnp.mean(jnp.abs(batch @ params["c"]) ** 2)

    _, grads = zerojax.value_and_grad(loss, layout)(layout.shard(params), jnp.eye(8))
    want = jax.grad(loss)(params, jnp.eye(8))["c"]
    np.testing.assert_allclose(layout.unshard(grads)["c"], want, rtol=FLOAT32)


def test_stage_two_gathers_nothing_and_reduces_in_the_loop():
    found = collectives(scanned_layers, stage=2)
    assert not [m for m in found if m.kind == "all_gather"]
    assert {m.loops for m in found if m.kind == "reduce_scatter"} == {1}


def test_only_the_layer_in_use_is_gathered_from_an_indexed_stack():
    found = collectives(layers_unrolled_by_index)
    assert max(math.prod(m.shape) for m in found if m.kind == "all_gather") == W // 2


def test_a_stack_reshaped_before_the_loop_is_named_in_a_warning():
    with pytest.warns(zerojax.GatherWarning, match=r"params\['s'\].*reshaped before it is scanned"):
        collectives(stack_reshaped_before_the_loop)


def test_a_stack_sharded_along_its_layers_is_named_in_a_warning():
    params = {"stack": jax.ShapeDtypeStruct((8, 3), jnp.float32)}
    layout = models.make_layout(params, MESH, 3)

    def loss(p, x):
        return jnp.mean(lax.scan(lambda h, w: (h * w, None), x, p["stack"])[0])

    with pytest.warns(zerojax.GatherWarning, match=r"params\['stack'\] \(8, 3\) is sharded along dim 0"):
        jax.eval_shape(zerojax.value_and_grad(loss, layout), layout.param_shapes(), jnp.ones((4, 3)))


def test_a_narrow_stack_that_is_widened_enters_the_loop_narrow_and_layer_by_layer():
    with warnings.catch_warnings():
        warnings.simplefilter("error", zerojax.GatherWarning)
        found = collectives(narrow_stack_widened_and_scanned)
    gathers = [m for m in found if m.kind == "all_gather" and math.prod(m.shape) >= 144 // 2]
    assert gathers
    assert {math.prod(m.shape) for m in gathers} <= {144 // 2, 144}
    assert all(jnp.dtype(m.dtype).itemsize == 2 and m.loops for m in gathers)


def test_a_lookup_in_a_parameter_at_places_that_a_parameter_holds():
    params = {"table": jax.random.normal(jax.random.key(0), (24, 8)), "places": jnp.arange(16) * 5 % 24}

    def loss(p, x):
        return jnp.mean((x @ p["table"][p["places"]].T) ** 2)

    x = jax.random.normal(jax.random.key(1), (8, 8))
    layout = models.make_layout(params, "2x4", 3, trainable=lambda path, _: "table" in str(path))
    grads = layout.unshard(jax.jit(zerojax.value_and_grad(loss, layout))(layout.shard(params), x)[1])
    want = jax.grad(lambda table: loss({**params, "table": table}, x))(params["table"])
    assert models.largest_error(grads["table"], want) < 1e-5  # float32, summed in another order
