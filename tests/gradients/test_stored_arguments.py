"""Stored parameters after the batch (teachers, target networks, GANs) reach the loss in full and without padding."""

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
from zerojax.layout.layout import StoredParams
from zerojax.planner.gpus import target_mesh

BATCH = models.dense_batches(1, 56)[0]


def predict(p, x):
    """A scanned model whose normalisation over features sees padding, if there is any."""

    def layer(h, one):
        return jax.nn.softmax(h @ one["w"] + one["b"]) * models.ramp(24), None

    h, _ = jax.lax.scan(layer, x @ p["first"], p["stack"])
    return jax.nn.softmax(h @ p["last"] * p["gain"])


def distill(p, batch, teacher, weight=1.0):
    """The student is drawn to the labels and to its teacher."""
    y = predict(p, batch["x"])
    return jnp.mean((y - batch["y"]) ** 2) + weight * jnp.mean((y - predict(teacher, batch["x"])) ** 2)


@pytest.fixture(scope="module")
def student():
    return models.dense_init(jax.random.key(1))


@pytest.fixture(scope="module")
def teacher():
    return models.dense_init(jax.random.key(2))


def average(old, new):
    return jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, old, new)


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.aot) for stage in (1, 2)), 3])
def test_an_average_of_the_parameters_teaches_at_every_stage(stage, student, teacher):
    mesh = "1x7" if stage in (0, 3) else "2x4"  # no leaf but one divides by seven
    layout = models.make_layout(student, mesh, stage)
    tx, plain = zerojax.zero(optax.sgd(0.5), layout), optax.sgd(0.5)
    step = zerojax.make_train_step(distill, tx, layout, microbatches=1 + stage // 3, donate=False)
    state, kept = zerojax.TrainState.create(layout.shard(student), tx), layout.shard(teacher)
    params, known = student, teacher
    for _ in range(2):
        state, metrics = step(state, BATCH, layout.stored(kept), jnp.float32(2))
        loss, grads = jax.value_and_grad(distill)(params, BATCH, known, 2.0)
        params = optax.apply_updates(params, plain.update(grads, plain.init(params))[0])
        np.testing.assert_allclose(metrics["loss"], loss, rtol=FLOAT32)
        kept, known = average(kept, state.params), average(known, params)
    assert step._cache_size() == 1
    assert models.largest_error(layout.unshard(state.params), params) < FLOAT32
    out = zerojax.apply(lambda p, b, t: predict(t, b["x"]) - predict(p, b["x"]), layout)
    got = jax.jit(out)(state.params, BATCH, layout.stored(kept))
    np.testing.assert_allclose(got, predict(known, BATCH["x"]) - predict(params, BATCH["x"]), atol=FLOAT32)


@pytest.mark.parametrize(("stages", "mesh"), [((3, 3), "1x7"), ((1, 3), "1x7"), ((3, 1), "2x4"), ((2, 2), "2x4")])
def test_each_half_of_a_gan_is_trained_against_the_other_under_its_own_layout(stages, mesh, student):
    """The gradient of one goes through the other, gathered again in the backward pass."""
    judge = {"w": jax.random.normal(jax.random.key(3), (5, 13)), "v": jax.random.normal(jax.random.key(4), (13,))}

    def decide(d, y):
        return jnp.mean(jnp.tanh(y @ d["w"]) @ d["v"])

    def generator_loss(g, batch, d):
        return -decide(d, predict(g, batch["x"]))

    def judge_loss(d, batch, g):
        return decide(d, predict(g, batch["x"])) - decide(d, batch["y"])

    of_g = models.make_layout(student, mesh, stages[0])
    of_d = models.make_layout(judge, mesh, stages[1], **({"quantize_weights": None} if stages[1] < 3 else {}))
    g, d = of_g.shard(student), of_d.shard(judge)
    for loss, layout, params, other, plain in (
        (generator_loss, of_g, g, of_d.stored(d), (student, judge)),
        (judge_loss, of_d, d, of_g.stored(g), (judge, student)),
    ):
        value, grads = jax.jit(zerojax.value_and_grad(loss, layout))(params, BATCH, other)
        want, wanted = jax.value_and_grad(loss)(plain[0], BATCH, plain[1])
        np.testing.assert_allclose(value, want, rtol=FLOAT32)
        assert models.largest_error(layout.unshard(grads), wanted) < FLOAT32


def test_marked_parameters_keep_their_dtype_and_may_be_what_the_optimizer_keeps(student):
    """A float32 average of bfloat16 parameters; at stage 1 the optimizer's is split and padded, the parameters not."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), student)
    layout = models.make_layout(narrow, "1x7", 1)
    tx = zerojax.zero(optax.adam(1e-3), layout)
    moments = layout.shard(narrow), tx.init(layout.shard(narrow)).inner[0].mu
    mu = jax.tree.map(lambda x: x + 0.25, moments[1])  # padding too: it must not be seen
    assert mu["first"].shape != student["first"].shape

    def total(p, batch, t):
        assert t["first"].dtype == jnp.float32
        return sum(jnp.sum(x) for x in jax.tree.leaves(t)) + 0 * jnp.mean(batch["x"])

    got = zerojax.apply(total, layout)(moments[0], BATCH, layout.stored(mu))
    np.testing.assert_allclose(got, 0.25 * sum(x.size for x in jax.tree.leaves(student)), rtol=FLOAT32)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_tree_of_all_padded_shapes_is_taken_for_what_it_is_with_a_notice(stage, student, teacher):
    layout = models.make_layout(student, "1x7", stage)
    stored = layout.shard(student)
    tree = layout.shard(teacher)
    if stage == 1:  # gradients have the padded form there
        tree = zerojax.value_and_grad(models.dense_loss, layout)(stored, BATCH)[1]
    grad_fn = jax.jit(zerojax.value_and_grad(lambda p, b, a: distill(p, b, a["t"]), layout))
    with pytest.warns(zerojax.ZeroNotice, match=r"argument \[0\]\['t'\] after the batch .* layout\.stored\(tree\)"):
        got, _ = grad_fn(stored, BATCH, {"t": tree})
    np.testing.assert_allclose(got, distill(student, BATCH, layout.unshard(tree)), rtol=FLOAT32)


def test_whole_arrays_after_the_batch_stay_as_they_are(student, teacher):
    layout = models.make_layout(student, "1x7", 3)
    got, _ = jax.jit(zerojax.value_and_grad(distill, layout))(layout.shard(student), BATCH, teacher)
    np.testing.assert_allclose(got, distill(student, BATCH, teacher), rtol=FLOAT32)


def test_what_is_marked_wrongly_or_is_a_part_of_the_parameters_is_refused(student):
    layout = models.make_layout(student, "1x7", 3)
    stored = layout.shard(student)
    grad_fn = zerojax.value_and_grad(lambda p, b, *rest: jnp.mean(b["x"]), layout)
    mark = layout.stored(stored)
    for message, args in (
        (r"argument \[1\]\['net'\] after the batch .* \(params\['stack'\]\['b'\], .* layout\.stored\(params\)",
         (BATCH, 1.0, {"net": stored["stack"]})),
        (r"the batch holds parameters marked by layout\.stored", ({**BATCH, "t": mark},)),
        (r"argument \[0\] after the batch is stored on mesh {'node': 2, 'local': 4}.*same mesh",
         (BATCH, models.make_layout(student, "2x4", 1).stored(student))),
        (r"argument \[0\] after the batch\['first'\] has shape \(9, 24\)",
         (BATCH, StoredParams(student, layout))),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            grad_fn(stored, *args)
    with pytest.raises(ValueError, match=r"stored params\['first'\] has shape \(9, 24\)"):
        layout.stored(student)
    bare = models.make_layout(student["first"], "1x7", 3)
    with pytest.raises(ValueError, match=r"argument \[0\] after the batch has the structure and the padded shapes"):
        zerojax.apply(lambda p, b, t: b["x"] @ t, bare)(bare.shard(student["first"]), BATCH, stored["first"])
    table = zerojax.apply(lambda p, b, t: b["x"] @ p + t[0].sum(), bare)
    assert table(bare.shard(student["first"]), BATCH, [jnp.ones((9, 28))]).shape == (56, 24)


def test_a_derivative_with_respect_to_marked_parameters_is_refused(student, teacher):
    layout = models.make_layout(student, "1x7", 3)
    stored = layout.shard(student)
    for run in (lambda *a: zerojax.value_and_grad(distill, layout)(*a)[0],
                zerojax.apply(distill, layout)):  # fmt: skip
        with pytest.raises(ValueError, match=r"nothing is differentiated with respect to .* layout\.stored"):
            jax.grad(lambda t: run(stored, BATCH, layout.stored(t)))(layout.shard(teacher))  # noqa: B023


@pytest.mark.needs_cuda_plugin
def test_a_scanned_teacher_is_gathered_one_layer_at_a_time():
    mesh = target_mesh("h100", 2, 8)
    layers, width = 4, 1024
    shapes = {"w": jax.ShapeDtypeStruct((layers, width, width), jnp.bfloat16)}
    layout = zerojax.partition(shapes, mesh, zerojax.ZeroConfig(stage=3))

    def forward(p, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0]

    def loss(p, x, teacher):
        return jnp.mean((forward(p, x) - forward(teacher, x)).astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((16 * 256, width), jnp.bfloat16, sharding=NamedSharding(mesh, P(("node", "local"))))
    params = layout.param_shapes()
    lowered = jax.jit(zerojax.value_and_grad(loss, layout)).lower(params, x, layout.stored(params))
    program = read_program(lowered.compile(), mesh)
    gathers = [c for c in program.collectives if c.kind == "all-gather" and c.payload_bytes > 64 * 1024]
    # Two first layers may share a message.
    assert max(array.num_bytes for c in gathers for array in c.results) == 2 * width * width
    # Each layer: once for the teacher, which nothing is differentiated with respect to, twice for the student.
    last_hop = sum(c.executions for c in gathers for array in c.results if array.num_bytes == 2 * width * width)
    assert last_hop == 3 * layers
