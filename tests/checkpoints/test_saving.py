"""Checkpoints hold logical values: they continue a run bitwise, and are read into any other layout."""

import functools
import sys

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding

import zerojax
from zerojax.checkpoints import saving

# Values restored into another layout are the same; the two steps after it sum 168 float32 gradients in another order,
# which moves a leaf by about sqrt(168) * 6e-8 = 8e-7 of its largest gradient, times a learning rate of 1e-2 at most.
ACROSS = 1e-6

OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "masked": optax.masked(optax.sgd(1e-2, momentum=0.9), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "every second": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}


@functools.cache
def parameters(dtype="float32"):
    return jax.tree.map(lambda x: x.astype(dtype), models.dense_init(jax.random.key(0)))


def loss(params, batch):
    return models.dense_loss(jax.tree.map(lambda x: x.astype(jnp.float32), params), batch)


def make(mesh, stage, optimizer="adam", dtype="float32", **options):
    layout = models.make_layout(parameters(dtype), mesh, stage, **options)
    tx = zerojax.zero(OPTIMIZERS[optimizer], layout)
    return layout, tx, zerojax.make_train_step(loss, tx, layout, donate=False)


def trained(layout, tx, step, count=2, state=None):
    if state is None:
        state = zerojax.TrainState.create(layout.shard(jax.device_get(parameters(layout.leaves[0].dtype.name))), tx)
    for batch in models.dense_batches(4)[int(state.step) :][:count]:
        state, _ = step(state, batch)
    return state


def logical(state, layout, tx):
    """Every leaf as the unsharded program would hold it."""
    places = tx.state_placements()
    cut = lambda x, p: np.asarray(x)[tuple(slice(0, n) for n in p.shape)]  # noqa: E731
    return {
        "params": jax.tree.map(cut, state.params, layout.placements),
        "opt_state": [cut(x, p) for x, p in zip(*map(jax.tree.leaves, (state.opt_state, places)), strict=True)],
        "step": np.asarray(state.step),
    }


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(as_bits, a), jax.tree.map(as_bits, b))


def as_bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}") if x.dtype.kind in "fV" else x


@pytest.mark.parametrize(
    ("mesh", "stage", "optimizer", "dtype"),
    [
        ("1x1", 3, "adam", "float32"), ("1x7", 3, "adafactor", "float32"), ("2x4", 3, "adam", "bfloat16"),
        ("3x2", 1, "every second", "float32"), ("data", 2, "masked", "bfloat16"),
    ],
)  # fmt: skip
def test_a_run_that_stopped_and_was_restored_goes_on_bitwise_as_if_it_had_not(tmp_path, mesh, stage, optimizer, dtype):
    layout, tx, step = make(mesh, stage, optimizer, dtype)
    before = trained(layout, tx, step)
    zerojax.save(tmp_path / "run", before, layout, tx)
    restored = zerojax.restore(tmp_path / "run", layout, tx)
    assert jax.tree.structure(restored) == jax.tree.structure(before)
    same(restored, before)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, before)
    compiled = step._cache_size()
    same(trained(layout, tx, step, state=restored), trained(layout, tx, step, state=before))
    assert step._cache_size() == compiled, "a restored state compiles nothing anew"


@pytest.mark.parametrize(
    ("written", "read", "optimizer", "dtype"),
    [
        (("2x4", 1, {}), ("3x2", 3, {}), "adam", "bfloat16"),  # 8 -> 6 devices, stage 1 -> 3, master weights
        (("1x7", 3, {}), ("2x4", 3, {"min_shard_size": 128}), "adafactor", "float32"),
        (("3x2", 3, {}), ("1x1", 0, {}), "every second", "float32"),
        (("1x3", 0, {}), ("1x7", 2, {}), "masked", "bfloat16"),
    ],
)
def test_a_checkpoint_is_read_into_another_layout(tmp_path, written, read, optimizer, dtype):
    (mesh, stage, options), (other_mesh, other_stage, other_options) = written, read
    layout, tx, step = make(mesh, stage, optimizer, dtype, **options)
    before = trained(layout, tx, step)
    zerojax.save(tmp_path, before, layout, tx, step=2)
    other, other_tx, other_step = make(other_mesh, other_stage, optimizer, dtype, **other_options)
    restored = zerojax.restore(tmp_path, other, other_tx)
    same(logical(restored, other, other_tx), logical(before, layout, tx))
    expected = zerojax.TrainState.create(other.param_shapes(), other_tx)
    assert restored.opt_state.layout_id == expected.opt_state.layout_id
    for value, shape in zip(*map(jax.tree.leaves, (restored, expected)), strict=True):
        assert (value.shape, value.dtype, value.sharding) == (shape.shape, shape.dtype, shape.sharding)
    if dtype == "float32":  # bfloat16 parameters may round the other way
        went_on = logical(trained(other, other_tx, other_step, state=restored), other, other_tx)["params"]
        unstopped = logical(trained(layout, tx, step, state=before), layout, tx)["params"]
        assert models.largest_error(went_on, unstopped) < ACROSS


def test_error_feedback_of_another_layout_starts_from_zero_and_says_so(tmp_path):
    def make_state(mesh):
        pair = {"quantize_gradients": ("int8", "int4"), "min_quantize_size": 0, "error_feedback": True}
        layout = models.make_layout(parameters(), mesh, 3, **pair)
        tx = zerojax.zero(OPTIMIZERS["adam"], layout)
        return layout, tx, zerojax.TrainState.create(layout.shard(parameters()), tx, layout)

    layout, tx, state = make_state("2x4")
    state = state._replace(wire=jax.tree.map(lambda x: x + 1, state.wire))
    zerojax.save(tmp_path / "run", state, layout, tx)
    same(zerojax.restore(tmp_path / "run", layout, tx), state)
    other, other_tx, fresh = make_state("3x2")
    with pytest.warns(zerojax.ZeroNotice, match="wire remembers in the checkpoint .* is of another layout"):
        restored = zerojax.restore(tmp_path / "run", other, other_tx)
    same(restored.wire, fresh.wire)
    plain, plain_tx, _ = make("2x4", 1)
    with pytest.warns(zerojax.ZeroNotice, match="wire remembers in the checkpoint"):
        assert zerojax.restore(tmp_path / "run", plain, plain_tx).wire is None


def test_feedback_under_its_earlier_name_starts_anew_whatever_its_shape():
    params = {"w": jnp.ones((64, 32))}
    pair = {"quantize_gradients": ("int8", "int4"), "min_quantize_size": 0, "error_feedback": True}
    layout = models.make_layout(params, "2x4", 3, **pair)
    tx = zerojax.zero(optax.sgd(0.1), layout)
    held = zerojax.init_wire_state(layout, abstract=True).feedback["w"]
    about = {"leaves": {"feedback.w": (held.dtype.name, held.shape)}}
    with pytest.warns(zerojax.ZeroNotice, match="starts anew"):
        assert saving._train_state_like(about, layout, tx).wire is None



def test_padding_is_not_in_the_checkpoint_and_other_tools_read_it(tmp_path):
    layout, tx, step = make("1x7", 3)
    state = trained(layout, tx, step, count=1)
    assert any(p.padding for p in layout.leaves)
    zerojax.save(tmp_path / "run 1", state, layout, tx)  # a path with a space
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(tmp_path / "run 1").item_metadata.tree
        plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        read = checkpointer.restore(tmp_path / "run 1", ocp.args.PyTreeRestore(restore_args=plain))
    assert jax.tree.map(lambda x: x.shape, read["params"]) == jax.tree.map(lambda x: x.shape, parameters())
    same(read["params"], logical(state, layout, tx)["params"])
    same(read["opt_state"]["inner"]["0"]["mu"], layout.unshard(state.opt_state.inner[0].mu))


def test_every_device_reads_its_own_slices_only(tmp_path, monkeypatch):
    layout, tx, _ = make("2x4", 3)
    zerojax.save(tmp_path / "run", zerojax.TrainState.create(layout.shard(parameters()), tx), layout, tx)
    largest = []
    make_array = jax.make_array_from_single_device_arrays

    def watched(shape, sharding, arrays, **rest):
        whole = arrays[0].dtype.itemsize * np.prod(shape)
        largest.append((sharding.is_fully_replicated, max(x.nbytes for x in arrays), whole))
        return make_array(shape, sharding, arrays, **rest)

    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", watched)
    zerojax.restore(tmp_path / "run", layout, tx)
    split = [(part, whole) for replicated, part, whole in largest if not replicated]
    assert len(split) == 3 * sum(p.is_sharded for p in layout.leaves)  # parameters and both moments
    assert all(part * 8 == whole for part, whole in split)


def test_parameters_alone_come_from_a_train_state_or_from_parameters(tmp_path):
    layout, tx, step = make("2x4", 3)
    state = trained(layout, tx, step, count=1)
    zerojax.save(tmp_path / "state", state, layout, tx)
    zerojax.save(tmp_path / "params", state.params, layout)
    other, _, _ = make("1x3", 1)
    for name in ("state", "params"):
        same(zerojax.restore(tmp_path / name, other), layout.unshard(state.params))


def test_any_tree_with_keys_counters_and_averages_comes_back_like_the_one_given(tmp_path):
    layout, tx, step = make("3x2", 3)
    state = trained(layout, tx, step, count=1)
    tree = {
        "loop": (state.params, state.opt_state), "average": jax.tree.map(lambda x: x / 2, state.params),
        "key": jax.random.split(jax.random.key(5), 3), "old": jax.random.PRNGKey(1), "seen": 7, "odd": np.arange(13),
    }  # fmt: skip
    zerojax.save(tmp_path / "run", tree, layout, tx)
    back = zerojax.restore(tmp_path / "run", layout, tx, like=tree)
    same(jax.tree.map(lambda x: x, {**back, "key": jax.random.key_data(back["key"])}),
         {**tree, "key": jax.random.key_data(tree["key"])})  # fmt: skip
    assert back["key"].dtype == tree["key"].dtype
    assert all(isinstance(x.sharding, NamedSharding) for x in jax.tree.leaves(back))


@pytest.mark.parametrize("dtype", ["bool", "int4", "uint8", "float8_e4m3fn", "float16", "complex64"])
def test_frozen_leaves_of_any_dtype_and_leaves_without_elements(tmp_path, dtype):
    params = {"w": jnp.ones((13, 3)), "empty": jnp.zeros((0, 4)), "frozen": jnp.arange(-8, 5).astype(dtype)}
    trainable = {"w": True, "empty": True, "frozen": False}
    layout, other = (models.make_layout(params, *where, trainable=trainable) for where in (("2x4", 3), ("1x3", 1)))
    state = zerojax.TrainState.create(layout.shard(params), zerojax.zero(optax.adam(0.1), layout))
    zerojax.save(tmp_path / "run", state, layout, zerojax.zero(optax.adam(0.1), layout))
    back = zerojax.restore(tmp_path / "run", other, zerojax.zero(optax.adam(0.1), other))
    same(other.unshard(back.params), params)
    assert back.opt_state.inner[0].mu["empty"].shape == (0, 4)


def test_explicit_axes_are_kept(tmp_path):
    layout, tx, _ = make("2x4", 3, axis_types=AxisType.Explicit)
    state = zerojax.TrainState.create(layout.shard(parameters()), tx)
    zerojax.save(tmp_path / "run", state, layout, tx)
    back = zerojax.restore(tmp_path / "run", layout, tx)
    assert back.params["first"].sharding.mesh.axis_types == (AxisType.Explicit,) * 2
    assert jax.tree.map(jax.typeof, back.params) == jax.tree.map(jax.typeof, state.params)


def test_steps_are_kept_apart_and_nothing_is_overwritten_unasked(tmp_path):
    layout, _, _ = make("2x4", 3)
    for step in (5, 40):
        params = layout.shard({**parameters(), "gain": jnp.float32(step)})
        zerojax.save(tmp_path, params, layout, step=step)
    (tmp_path / "notes").mkdir()
    assert float(zerojax.restore(tmp_path, layout)["gain"]) == 40
    assert float(zerojax.restore(tmp_path, layout, step=5)["gain"]) == 5
    with pytest.raises(ValueError, match="exists; pass overwrite=True"):
        zerojax.save(tmp_path, layout.shard(parameters()), layout, step=5)
    zerojax.save(tmp_path, layout.shard(parameters()), layout, step=5, overwrite=True)
    assert float(zerojax.restore(tmp_path, layout, step=5)["gain"]) == 1
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*7"):
        zerojax.restore(tmp_path, layout, step=7)


def layout_of(params, mesh="2x4", stage=3):
    return models.make_layout(params, mesh, stage)


def test_another_model_shape_or_dtype_is_refused_by_key_path(tmp_path):
    layout, tx, _ = make("2x4", 3)
    zerojax.save(tmp_path / "run", layout.shard(parameters()), layout)
    restore = functools.partial(zerojax.restore, tmp_path / "run")
    wider = {**parameters(), "first": jnp.ones((10, 24))}  # padded to the same 16 rows or not: 9 and 10 differ
    with pytest.raises(ValueError, match=r"\['first'\] has shape \(10, 24\), but .*run holds \(9, 24\)"):
        restore(layout_of(wider))
    narrow = {**parameters(), "last": parameters()["last"].astype(jnp.bfloat16)}
    with pytest.raises(ValueError, match=r"\['last'\] has dtype bfloat16, but .*run holds float32: restore into"):
        restore(layout_of(narrow))
    more = {**parameters(), "second": {"w": jnp.ones((9, 24))}}
    with pytest.raises(ValueError, match=r"another model.* it lacks \['second'\]\['w'\] and has nothing"):
        restore(layout_of(more))
    less = {k: v for k, v in parameters().items() if k != "gain"}
    with pytest.raises(ValueError, match=r"it lacks nothing and has gain"):
        restore(layout_of(less))
    with pytest.raises(ValueError, match=r"it lacks \.step, \.params.*and [0-9]+ more"):
        restore(layout, tx)


def test_a_state_of_another_optimizer_is_refused(tmp_path):
    layout, tx, _ = make("2x4", 3)
    zerojax.save(tmp_path / "run", zerojax.TrainState.create(layout.shard(parameters()), tx), layout, tx)
    with pytest.raises(ValueError, match=r"lacks .*\.trace\['first'\].* has opt_state"):
        zerojax.restore(tmp_path / "run", layout, zerojax.zero(optax.sgd(0.1, momentum=0.9), layout))


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    layout, tx, _ = make("2x4", 3)
    state = zerojax.TrainState.create(layout.shard(parameters()), tx)
    other, other_tx, _ = make("1x7", 3)
    for arguments, message in [
        ((state, layout), "pass the optimizer too"),
        ((state, layout, other_tx), "for another layout"),
        ((state.params, other), r"params\['first'\] lives on mesh .* but the layout is for"),
        (({"loss": jnp.ones(3)}, layout), "nothing in this tree"),
        (({"p": state.params, "name": "run 7"}, layout), r"\['name'\] is a str"),
        (({"p": state.params, "a": {"b": 1, "b.c": 2}, "a.b": 3}, layout), "same name"),
    ]:
        with pytest.raises(ValueError, match=message):
            zerojax.save(tmp_path / "run", *arguments)
    assert not list(tmp_path.iterdir())


def test_a_missing_orbax_is_named_with_the_command_that_adds_it(tmp_path, monkeypatch):
    layout, _, _ = make("2x4", 3)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match="pip install orbax-checkpoint"):
        zerojax.save(tmp_path / "run", layout.shard(parameters()), layout)


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "float8_e4m3", "float4_e2m1fn", "uint4"])
def test_narrow_numbers_come_back_bit_for_bit_padding_or_not(tmp_path, dtype):
    numbers = np.random.default_rng(0).uniform(1, 3, (7, 5))  # needs a row of padding on eight devices
    params = {"scales": jnp.asarray(numbers, jnp.float32).astype(dtype), "w": jnp.ones((8,))}
    layout = models.make_layout(params, "2x4", 3, trainable=lambda path, x: "w" in str(path))
    for given in (params, jax.device_get(params)):
        stored = layout.shard(given)
        zerojax.save(tmp_path / "params", stored, layout, overwrite=True)
        back = layout.unshard(zerojax.restore(tmp_path / "params", layout, like=layout.param_shapes()))
        assert jax.device_get(back["scales"]).tobytes() == jax.device_get(params["scales"]).tobytes()
