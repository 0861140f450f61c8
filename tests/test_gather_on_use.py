"""The evaluator: any program over stored parameters has the values and gradients it has over whole ones.

The oracle is `jax.value_and_grad` on one device of the mean over the devices' parts of the batch. Every program stands
for a primitive or a manner of using a weight. What must be true of the way there (how often, in which dtype and where
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
from jax.ad_checkpoint import checkpoint_name
from models import ramp

import zerojax

MESH, DEVICES = "2x2", 4
# Programs that round to bfloat16 (unit roundoff 2^-9) sum gradients of 4 devices in it: 5 roundings.
NARROW = 5 * 2.0**-9
# As in test_oracle: another order of float32 sums over few elements.
FLOAT32 = 1e-5

PROGRAMS: dict[str, Any] = {}


def program(fn):
    PROGRAMS[fn.__name__] = fn
    return fn


def parameters():
    keys = iter(jax.random.split(jax.random.key(3), 8))
    shapes = {"w": (12, 16), "v": (16, 12), "s": (3, 12, 16), "t": (3, 16, 12), "b": (16,), "odd": (11, 7)}
    params = {name: jax.random.normal(next(keys), shape) / 2 for name, shape in shapes.items()}
    return {**params, "half": jax.random.normal(next(keys), (16, 12), jnp.bfloat16)}


def examples():
    return jax.random.normal(jax.random.key(5), (4 * DEVICES, 12))


def layers(h, s, t, wrap=lambda f: f, **kwargs):
    def layer(h, st):
        return jnp.tanh(h @ st[0] @ st[1]) * ramp(12, h.dtype), None

    return lax.scan(wrap(layer), h, (s, t), **kwargs)[0]


def mean(y):
    """Mean with a different factor for each column."""
    return jnp.mean(y.astype(jnp.float32) * ramp(y.shape[-1]))


@program
def one_use(p, x):
    return mean(x @ p["w"])


@program
def weight_used_twice_and_squared(p, x):
    return mean(x @ (p["w"] * p["w"]) + p["w"].sum() + x @ p["w"])


@program
def tied_and_transposed(p, x):
    return mean(jnp.tanh(x @ p["w"]) @ p["w"].T) + mean(p["odd"].T.reshape(-1))


@program
def unused(p, x):
    return mean(x)


@program
def value_of_the_weight_alone(p, x):
    return jnp.mean(p["w"]) + p["b"][3] + p["w"][3, 5] + p["s"][1, 2, 3]


@program
def static_slices(p, x):
    strided = mean(p["w"][:, 2:9:3]) + mean(p["s"][::2, 1]) + mean(p["w"][::-1]) + mean(p["s"][1:3, 2:5])
    return strided + mean(x[:, :4] @ p["w"][3:7])


@program
def layers_unrolled_by_index(p, x):
    for i in range(3):
        x = jnp.tanh(x @ p["s"][i] @ p["t"][i]) * ramp(12)
    return mean(x)


@program
def narrow_layers_unrolled_by_index(p, x):
    s = p["s"].astype(jnp.bfloat16)
    for i in range(3):
        x = jnp.tanh(x @ s[i].astype(jnp.float32) @ p["t"][i]) * ramp(12)
    return mean(x)


@program
def slice_whose_place_differs_between_devices(p, x):
    i = (x[0, 0] > 0).astype(jnp.int32)
    picked = lax.dynamic_index_in_dim(p["s"], i, keepdims=False)
    return mean(jnp.tanh(x @ picked)) + mean(lax.dynamic_slice(p["odd"], (i, i), (3, 4)))


@program
def rows_looked_up(p, x):
    return mean(p["odd"][jnp.argmax(x, -1) % 11])


@program
def scanned_layers(p, x):
    return mean(layers(x, p["s"], p["t"]))


@program
def scanned_in_reverse_and_unrolled(p, x):
    return mean(layers(x, p["s"], p["t"], reverse=True, unroll=3))


@program
def scanned_under_checkpoint(p, x):
    return mean(layers(x, p["s"], p["t"], jax.checkpoint))


@program
def narrow_stack_scanned(p, x):
    bf16 = jnp.bfloat16
    return mean(layers(x.astype(bf16), p["s"].astype(bf16), p["t"].astype(bf16)))


@program
def layers_in_microbatches(p, x):
    def micro(total, part):
        return total + mean(layers(part, p["s"], p["t"])), None

    return lax.scan(micro, 0.0, x.reshape(2, -1, 12))[0]


@program
def layers_in_microbatches_under_checkpoints(p, x):
    @jax.checkpoint
    def micro(total, part):
        return total + mean(layers(part, p["s"], p["t"], jax.checkpoint)), None

    return lax.scan(micro, 0.0, x.reshape(2, -1, 12))[0]


@program
def loop_constants_beside_layers(p, x):
    @jax.checkpoint
    def layer(h, st):
        return jnp.tanh(h @ st[0] @ st[1] + h @ p["w"] @ p["v"]) * ramp(12), None

    return mean(lax.scan(layer, x, (p["s"], p["t"]))[0])


@program
def stack_scanned_and_used_whole(p, x):
    return mean(layers(x, p["s"], p["t"])) + mean(p["s"] ** 2)


@program
def stack_reshaped_before_the_loop(p, x):
    return mean(layers(x, p["s"].reshape(3, 16, 12).reshape(3, 12, 16), p["t"]))


@program
def weight_in_the_carry(p, x):
    def body(carry, _):
        h, w = carry
        return (jnp.tanh(h @ w) @ p["v"] * ramp(12), w * 1.1), None

    (h, w), _ = lax.scan(body, (x, p["w"]), None, length=2)
    return mean(h) + mean(w)


@program
def layers_returned_by_the_loop(p, x):
    def body(h, w):
        return h @ w[:, :12] * ramp(12), w

    h, ws = lax.scan(body, x, p["s"])
    return mean(h) + mean(ws)


@program
def scanned_but_not_read(p, x):
    return mean(x @ p["w"]) * lax.scan(lambda c, _: (c + 1, None), 0.0, p["s"])[0]


@program
def fori_loop_with_index(p, x):
    return mean(lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["s"][i] @ p["t"][i]) * ramp(12), x))


@program
def while_loop_over_a_stopped_weight(p, x):
    w = lax.stop_gradient(p["w"])
    count, _ = lax.while_loop(lambda c: c[1] < 1e3, lambda c: (c[0] + 1, c[1] + jnp.abs(w).sum()), (0, jnp.zeros(())))
    return mean(x @ p["w"]) * count


@program
def cond_that_differs_between_devices(p, x):
    return mean(lax.cond(x[0, 0] > 0, lambda w: x @ w * 2, lambda w: jnp.sin(x @ w), p["w"]))


@program
def switch_in_a_loop(p, x):
    def body(h, ist):
        i, s, t = ist
        return lax.switch(i, [lambda h: h @ s @ t, lambda h: jnp.tanh(h @ s) @ t * ramp(12), lambda h: h], h), None

    return mean(lax.scan(body, x, (jnp.arange(3), p["s"], p["t"]))[0])


@program
def stopped_gradients(p, x):
    stopped = lax.stop_gradient(p["w"].astype(jnp.float16)).astype(jnp.float32)
    return mean(x @ lax.stop_gradient(p["w"]) @ p["v"]) + mean(x @ p["w"]) + mean(x @ stopped * p["b"])


@program
def custom_vjp_of_its_own(p, x):
    @jax.custom_vjp
    def f(w, x):
        return x @ w

    f.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (kept[1].T @ g * 2, g @ kept[0].T * 3))
    return mean(f(p["w"], x))


@program
def custom_jvp_of_a_weight(p, x):
    return mean(jax.nn.silu(p["w"])) + mean(jax.nn.relu(x @ p["w"])) + mean(jax.nn.logsumexp(p["w"], -1))


@program
def checkpoint_policies(p, x):
    def f(x, w, v):
        return jnp.tanh(checkpoint_name(jnp.tanh(x @ checkpoint_name(w, "w")), "h") @ v) * ramp(12)

    saved = jax.checkpoint_policies
    for policy in (None, saved.dots_saveable, saved.everything_saveable, saved.save_only_these_names("h")):
        x = jax.checkpoint(f, policy=policy)(x, p["w"], p["v"])
    return mean(x)


@program
def vmapped_over_examples_and_over_layers(p, x):
    rows = jax.vmap(lambda row, factor: row @ p["w"] * factor, in_axes=(0, None))(x, 2.0)
    return mean(rows) + mean(jax.vmap(lambda s, t: x @ s @ t)(p["s"], p["t"]))


@program
def jit_inside(p, x):
    return mean(jax.jit(lambda w, x: x @ jnp.tanh(w))(p["w"], x))


@program
def gradient_inside(p, x):
    of_input = jax.grad(lambda x: mean(jnp.tanh(x @ p["w"])))(x)
    of_weight = jax.grad(lambda w: mean(jnp.tanh(x @ w)))(p["w"])
    _, tangent = jax.jvp(lambda x: jnp.tanh(x @ p["w"]), (x,), (x,))
    return mean(of_input**2) + mean(jnp.tanh(x @ (p["w"] - of_weight))) + mean(tangent)


@program
def stored_narrow_and_widened(p, x):
    return mean(jnp.tanh(x @ p["half"].astype(jnp.float32).T))


@program
def narrowed_widened_and_narrowed_again(p, x):
    twice = p["w"].astype(jnp.bfloat16).astype(jnp.float32).T.astype(jnp.bfloat16).T
    return mean(x.astype(jnp.bfloat16) @ twice)


@program
def used_as_an_integer_and_in_a_comparison(p, x):
    return mean(x @ p["w"] * jnp.sum((p["b"] * 9).astype(jnp.int32))) + mean(jnp.where(p["w"] > 0, p["w"], 0))


@program
def joined_with_others(p, x):
    return mean(jnp.concatenate([x @ p["w"], p["w"], p["v"].T])) + mean(jnp.cumsum(p["w"], 0))


@program
def matrix_functions(p, x):
    square = p["odd"] @ p["odd"].T / 10 + 3 * jnp.eye(11)
    solved = jnp.linalg.solve(square, ramp(11))
    iterated, _ = jax.scipy.sparse.linalg.cg(lambda v: square @ v, ramp(11), maxiter=30)
    return mean(solved) + mean(iterated) + mean(jnp.linalg.norm(p["w"], axis=0)) * mean(x)


@program
def convolution(p, x):
    kernel = p["s"].transpose(1, 0, 2)[:2, :1]
    return mean(lax.conv_general_dilated(x[:, None, :], kernel, (1,), "SAME"))


@program
def callback_with_a_weight(p, x):
    jax.debug.callback(lambda w: None, p["w"])
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    total = jax.pure_callback(lambda w: np.asarray(w).sum(), shape, lax.stop_gradient(p["w"]), vmap_method="sequential")
    return mean(x @ p["w"]) * total


# At stage 2 weights are whole and only the way of the gradient differs.
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
        out = jax.jit(everything, compiler_options=models.QUICKLY)(layout.shard(params) if stage else params, x)
    return {**{name: (loss, layout.unshard(grads)) for name, (loss, grads) in out.items()}, **failures}


@pytest.mark.parametrize(("name", "stage"), [*((name, 3) for name in PROGRAMS), *((name, 2) for name in STAGE_TWO)])
def test_program_on_stored_parameters_equals_the_program_on_whole_ones(name, stage):
    got, want = results(stage)[name], results(0)[name]
    for result in (got, want):
        if isinstance(result, Exception):
            raise result
    tolerance = NARROW if narrow(name) else FLOAT32
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
    return lowered.compile(compiler_options=models.QUICKLY).as_text()


def test_recomputation_and_gradient_share_one_gather_under_checkpoint():
    text = compiled_text(scanned_under_checkpoint)
    # Two leaves, forward and backward, two hops each; the compiler has merged what the recomputation repeats.
    gathers = text.count(" all-gather(") + text.count(" all-gather-start(")
    assert gathers == 8, gathers


@pytest.mark.parametrize("fn", [scanned_layers, scanned_under_checkpoint, layers_in_microbatches])
def test_no_stack_of_whole_weights_is_in_the_compiled_program(fn):
    text = compiled_text(fn)
    assert "f32[3,12,4]" in text, "stacks of shards are"
    assert "f32[12,16]" in text, "single whole weights are"
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
