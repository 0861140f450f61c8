"""Weight deltas: weights in compute stay next to the parameters, whatever happens to these; what travels is small."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from tolerances import FLOAT32

import zerojax
from zerojax.hlo.program import read_program

# Blocks and tiles are larger than the shards of these tiny leaves.
pytestmark = pytest.mark.filterwarnings("ignore::zerojax.ZeroNotice")
PARAMS, BATCH = jax.tree.map(jnp.asarray, models.dense_init(jax.random.key(4))), models.dense_batches(1, 24)[0]
MATRICES = (("first",), ("stack", "w"), ("last",))
# One rounding to bfloat16, of the largest value: 2^-9; relative to the norm of evenly spread values 0.0017.
CAST, CAST_RMS = 2.0**-9, 0.0019


def make_layout(mesh="2x4", deltas="int4", **options):
    return models.make_layout(PARAMS, mesh, 3, weight_deltas=deltas, min_quantize_size=0, **options)


def cast(x):
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))


def get(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def in_compute(wire, params):
    """The parameters, with what every node holds of the matrices; stacks of vectors travel as they are."""

    def one(path, x):
        names = tuple(entry.key for entry in path)
        return np.asarray(get(wire.replica, names), np.float32)[tuple(map(slice, x.shape))] if names in MATRICES else x

    return jax.tree_util.tree_map_with_path(one, params)


def distances(wire, params):
    """Of each matrix, how far what the nodes hold is from the parameter, relative to its norm."""
    held = in_compute(wire, params)
    pairs = [(get(held, path), np.asarray(get(params, path))) for path in MATRICES]
    return np.array([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs])


@functools.cache
def gradients(mesh, deltas, microbatches=1):
    layout = make_layout(mesh, deltas)
    return layout, jax.jit(zerojax.value_and_grad(models.dense_loss, layout, microbatches=microbatches))


# The table at a learning rate of 1e-3, whose change is a fiftieth of these weights: the cast's own error in 4
# bits; in 2 bits a third of the change stays behind.
@pytest.mark.parametrize(("mesh", "deltas", "bound"), [("2x4", "int4", 0.0025), ("3x2", "int2", 0.01)])
def test_a_step_computes_with_weights_next_to_the_parameters(mesh, deltas, bound):
    # One of them with gathers inside the node that travel a layer ahead, as on GPUs.
    layout = make_layout(mesh, deltas, prefetch_bytes=2**20 if deltas == "int2" else None)
    tx = zerojax.zero(optax.adam(1e-3), layout)
    step = zerojax.make_train_step(models.dense_loss, tx, layout)
    state = zerojax.TrainState.create(layout.shard(PARAMS), tx, layout)
    exact = jax.jit(jax.value_and_grad(models.dense_loss))
    for i, batch in enumerate(models.dense_batches(6, 24)):
        before = layout.unshard(state.params)
        state, metrics = step(state, batch)
        assert distances(state.wire, before).max() < (bound if i else CAST_RMS)
        # Loss and gradient are those of exactly the weights that the state remembers.
        loss, grads = exact(in_compute(state.wire, before), batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=FLOAT32)
        np.testing.assert_allclose(metrics["grad_norm"], optax.global_norm(grads), rtol=FLOAT32)
    for x in jax.tree.leaves(state.wire):
        assert x.dtype == jnp.bfloat16
        held = {shard.device.id: np.asarray(shard.data, np.float32) for shard in x.addressable_shards}
        nodes = layout.mesh.devices
        for other in nodes[1:]:
            for a, b in zip(nodes[0], other, strict=True):
                np.testing.assert_array_equal(held[a.id], held[b.id])
        assert models.largest_shard(x) == x.nbytes // nodes.shape[1]
    size = sum(x.nbytes for x in jax.tree.leaves(state.wire)) // layout.mesh.shape["local"]
    assert f"{size:,} on each device" in next(x for x in layout.describe().splitlines() if x.startswith("replicas"))


@pytest.mark.parametrize(("mesh", "deltas", "levels"), [("2x4", "int4", 7), ("3x2", "int2", 1.5)])
def test_a_jump_of_all_weights_is_forgotten_geometrically(mesh, deltas, levels):
    layout, fn = gradients(mesh, deltas)
    *_, wire = fn(layout.shard(PARAMS), BATCH, wire=zerojax.init_wire_state(layout))
    jumped = jax.tree.map(lambda x: x * 1.1, PARAMS)

    def farthest(wire):
        pairs = [(get(in_compute(wire, jumped), path), get(jumped, path)) for path in MATRICES]
        return np.array([np.abs(a - np.asarray(b)).max() / np.abs(b).max() for a, b in pairs])

    off = [farthest(wire)]
    for _ in range(12):
        *_, wire = fn(layout.shard(jumped), BATCH, wire=wire)
        off.append(farthest(wire))
        # Half a level is lost at most, of scales that are rounded up by up to an eighth, and twice the cast's error.
        assert (off[-1] < off[-2] * 1.125 / (2 * levels) + 2 * CAST).all()
    assert off[0].min() > 0.08
    for path in MATRICES:
        np.testing.assert_array_equal(get(in_compute(wire, jumped), path), cast(get(jumped, path)))


EDITS = {
    "restored": lambda p: jax.tree.map(jnp.asarray, models.dense_init(jax.random.key(5))),
    "one row": lambda p: {**p, "first": p["first"].at[3].set(p["first"][4] * 2)},
    "one layer": lambda p: {**p, "stack": {**p["stack"], "w": p["stack"]["w"].at[1].multiply(-1)}},
    "not finite": lambda p: {**p, "last": p["last"].at[2, 2].set(jnp.nan)},
    "finite again": lambda p: PARAMS,
    "scaled": lambda p: jax.tree.map(lambda x: x * 1.5, p),
}


def test_weights_that_were_edited_are_gathered_anew():
    layout, fn = gradients("2x4", "int4")
    params, wire = PARAMS, zerojax.init_wire_state(layout)
    *_, wire = fn(layout.shard(params), BATCH, wire=wire)
    for name, edit in EDITS.items():
        params = edit(params)
        *_, wire = fn(layout.shard(params), BATCH, wire=wire)
        for path in MATRICES:
            got, want = get(in_compute(wire, params), path), cast(get(params, path))
            near = np.isfinite(want)  # a block with what is not finite travels as such
            np.testing.assert_array_equal(got[near & np.isfinite(got)], want[near & np.isfinite(got)], err_msg=name)
            assert np.isfinite(got).all() == near.all(), name


def test_what_is_not_trained_is_sent_once_and_bit_for_bit():
    frozen = models.make_layout(
        PARAMS, "2x4", 3, weight_deltas="int4", min_quantize_size=0, trainable=lambda path, x: "last" in str(path)
    )
    fn = jax.jit(zerojax.value_and_grad(models.dense_loss, frozen))
    stored, wire = frozen.shard(PARAMS), zerojax.init_wire_state(frozen)
    program = read_program(fn.lower(stored, BATCH, wire=wire).compile(), frozen.mesh)
    always = [one for one in program.select("all-gather", axes="node") if not one.in_conditional]
    # Of the matrix that is trained, and a stack of vectors, which travels as it is.
    assert sorted(one.dtypes for one in always) == [("f32",), ("u8",)]
    params = PARAMS
    for _ in range(2):
        *_, wire = fn(stored, BATCH, wire=wire)
        np.testing.assert_array_equal(in_compute(wire, params)["first"], cast(params["first"]))
        params = {**PARAMS, "first": PARAMS["first"].at[0, 0].add(0.004)}  # less than a step would be
        stored = frozen.shard(params)


def test_one_exchange_serves_all_microbatches():
    found = []
    for count in (1, 3):
        layout, fn = gradients("2x4", "int4", count)
        stored, wire = layout.shard(PARAMS), zerojax.init_wire_state(layout)
        program = read_program(fn.lower(stored, BATCH, wire=wire).compile(), layout.mesh)
        between = [one for one in program.select("all-gather", dtype="u8") if not one.in_conditional]
        found.append(sum(one.executions for one in between))
        *_, grads, wire = fn(stored, BATCH, wire=wire)
        want = jax.jit(jax.grad(models.dense_loss))(in_compute(wire, PARAMS), BATCH)
        assert models.largest_error(layout.unshard(grads), want) < FLOAT32
    assert found == [len(MATRICES)] * 2


@pytest.mark.parametrize("form", ["in reverse", "cast before and checkpointed"])
def test_changes_of_many_layers_travel_in_the_loop_over_them(form):
    layers = 33
    keys = jax.random.split(jax.random.key(2), layers)
    stack = {"w": jax.vmap(lambda key: jax.random.normal(key, (24, 24)) / 5)(keys), "b": jnp.full((layers, 24), 0.1)}
    params = {**PARAMS, "stack": stack}

    def loss_fn(p, batch):
        dtype = jnp.float32 if form == "in reverse" else jnp.bfloat16
        stack = jax.tree.map(lambda x: x.astype(dtype), p["stack"])

        def layer(h, p):
            return h + jnp.tanh((h.astype(dtype) @ p["w"] + p["b"]).astype(h.dtype)) * models.ramp(24) * 0.2, None

        body = layer if form == "in reverse" else jax.checkpoint(layer)
        h, _ = jax.lax.scan(body, batch["x"] @ p["first"], stack, reverse=form == "in reverse")
        return jnp.mean((h @ p["last"] * p["gain"] - batch["y"]) ** 2)

    layout = models.make_layout(params, "2x4", 3, weight_deltas="int4", min_quantize_size=0)
    fn = jax.jit(zerojax.value_and_grad(loss_fn, layout))
    wire, plain = zerojax.init_wire_state(layout), models.make_layout(params, "2x4", 3)
    plain_fn = jax.jit(zerojax.value_and_grad(loss_fn, plain))
    program = read_program(fn.lower(layout.shard(params), BATCH, wire=wire).compile(), layout.mesh)
    (in_loop,) = program.select("all-gather", axes="node", in_loop=True, dtype="u8")
    assert in_loop.executions == layers
    for _ in range(3):
        *_, wire = result = fn(layout.shard(params), BATCH, wire=wire)
        assert distances(wire, params).max() < 0.004
        held = in_compute(wire, params)
        loss, grads = plain_fn(plain.shard(held), BATCH)
        np.testing.assert_allclose(result[0], loss, rtol=FLOAT32)
        # Activations that are computed again may be rounded to bfloat16 in other places.
        tolerance = FLOAT32 if form == "in reverse" else 2 * CAST
        assert models.largest_error(layout.unshard(result[1]), plain.unshard(grads)) < tolerance
        params = jax.tree.map(lambda x, g: x - 1e-3 * jnp.sign(g), params, plain.unshard(grads))


def test_it_goes_on_bit_for_bit_after_a_restore_and_next_to_the_parameters_on_another_layout(tmp_path):
    def train(layout, tx, state, steps):
        step = zerojax.make_train_step(models.dense_loss, tx, layout, donate=False, on_nonfinite="skip")
        for batch in steps:
            state, _ = step(state, batch)
        return state

    layout, batches = make_layout(), models.dense_batches(5, 24)
    tx = zerojax.zero(optax.adam(1e-3), layout)
    broken = {**batches[2], "x": batches[2]["x"] * jnp.nan}  # is skipped: parameters and replicas stay together
    batches[2] = broken
    state = train(layout, tx, zerojax.TrainState.create(layout.shard(PARAMS), tx, layout), batches[:3])
    assert int(state.skipped) == 1
    zerojax.save(tmp_path / "run", state, layout, tx)
    restored = zerojax.restore(tmp_path / "run", layout, tx)
    gone_on, resumed = (train(layout, tx, s, batches[3:]) for s in (state, restored))
    for a, b in zip(*(jax.tree.leaves((s.params, s.wire)) for s in (gone_on, resumed)), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    # What all nodes hold does not depend on how it is split: with the same padding it is kept, else gathered anew.
    other = make_layout("3x2")
    other_tx = zerojax.zero(optax.adam(1e-3), other)
    moved = zerojax.restore(tmp_path / "run", other, other_tx)
    before = other.unshard(moved.params)
    moved = train(other, other_tx, moved, batches[3:4])
    assert distances(moved.wire, before).max() < 0.0025
    without = make_layout(deltas=None)
    without_tx = zerojax.zero(optax.adam(1e-3), without)
    with pytest.warns(zerojax.ZeroNotice, match="of another layout"):
        assert zerojax.restore(tmp_path / "run", without, without_tx).wire is None


@pytest.mark.filterwarnings("error::zerojax.GatherWarning")
@pytest.mark.parametrize("form", ["scanned and tied", "stacked in the loss"])
def test_every_use_reads_the_replica_in_the_dtype_of_the_loss(form):
    if form == "scanned and tied":
        params = jax.jit(models.transformer_init)(jax.random.key(1))
        loss_fn = functools.partial(models.transformer_loss, compute=jnp.bfloat16, remat=True)
        batch = models.token_batches(1, 24)[0]
    else:
        params = {"first": PARAMS["first"], "last": PARAMS["last"], "gain": PARAMS["gain"],
                  "layers": [jax.tree.map(lambda x, i=i: x[i], PARAMS["stack"]) for i in range(2)]}  # fmt: skip
        batch = BATCH

        def loss_fn(params, batch):
            stack = jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])
            return models.dense_loss({**params, "stack": stack}, batch)

    layout = models.make_layout(params, "2x4", 3, weight_deltas="int4", min_quantize_size=0)
    fn = jax.jit(zerojax.value_and_grad(loss_fn, layout))
    loss, grads, wire = fn(layout.shard(params), batch, wire=zerojax.init_wire_state(layout))
    held = jax.tree.map(lambda x: cast(x) if len(x.shape) > 1 else x, params)
    # bfloat16 activations differ between programs by more than weights do: against the same stage without deltas, and
    # with each leaf by itself, since a gradient that is joined with others is rounded before.
    plain = models.make_layout(params, "2x4", 3, pack_bytes=0)
    want_loss, want = jax.jit(zerojax.value_and_grad(loss_fn, plain))(plain.shard(held), batch)
    np.testing.assert_allclose(loss, want_loss, rtol=FLOAT32)
    assert models.largest_error(layout.unshard(grads), plain.unshard(want)) < FLOAT32
    text = fn.lower(layout.shard(params), batch, wire=wire).compile()
    always = [one for one in read_program(text, layout.mesh).select("all-gather") if not one.in_conditional]
    # Between nodes nothing but changes, and vectors.
    assert {one.dtypes for one in always if one.axes == ("node",) and one.payload_bytes > 600} <= {("u8",)}


@pytest.mark.parametrize("extents", [(24, 16), (3, 16, 24)])
def test_replicas_that_travel_in_int8_inside_the_node_are_rounded_once(extents):
    w = jax.random.normal(jax.random.key(0), extents)
    layout = models.make_layout(
        {"w": w}, "2x4", 3, weight_deltas="int4", quantize_weights="int8", min_quantize_size=0
    )  # fmt: skip

    def loss(p, x):
        seen = p["w"] * x.mean()
        return jnp.mean(seen), seen

    fn = jax.jit(zerojax.value_and_grad(loss, layout, has_aux=True))
    (_, seen), _, wire = fn(layout.shard({"w": w}), jnp.ones((8, 1)), wire=zerojax.init_wire_state(layout))
    held = np.asarray(wire.replica["w"], np.float32)[tuple(map(slice, extents))]
    error = np.abs(np.asarray(seen) - held).max()
    assert 0 < error < np.abs(held).max() * (2 / 254 + CAST)  # half a step, scales rounded up, and the cast
