"""The stored form: in and out of it, born in it, described, with leaves of every sort."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.hlo.program import memory_figures


def mixed_tree():
    """Every dtype and extent that needs care."""
    return {
        "bf16": jnp.arange(33 * 17, dtype=jnp.bfloat16).reshape(33, 17),
        "f16": (jnp.arange(64.0).reshape(8, 8).astype(jnp.float16),),
        "complex": jnp.arange(24.0).reshape(4, 6) * (1 + 2j),
        "bytes": jnp.arange(35, dtype=jnp.uint8).reshape(5, 7),
        "flags": jnp.arange(12).reshape(3, 4) % 2 == 0,
        "scalar": jnp.float32(3),
        "empty": jnp.zeros((0, 5)),
        "vector": jnp.arange(13.0),
        "stack": [jnp.arange(3 * 5 * 7.0).reshape(3, 5, 7), None],
    }


def trainable(path, leaf):
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("mesh", ["1x1", "1x3", "3x2", "1x7", "2x4"])
@pytest.mark.parametrize("stage", [1, 3])
def test_shard_and_unshard_are_inverse(stage, mesh, kind):
    params = mixed_tree()
    layout = models.make_layout(params, mesh, stage, trainable=trainable, axis_types=kind)
    stored = layout.shard(params)
    for x, p in zip(jax.tree.leaves(stored), layout.leaves, strict=True):
        assert x.shape == layout.param_shape(p)
        assert x.sharding == layout.param_sharding(p)
        wanted = p.shard_shape if stage == 3 else p.shape
        assert {s.data.shape for s in x.addressable_shards} == {wanted}
    whole = layout.unshard(stored)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(params), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_shard_leaves_its_input_alive_under_donation():
    params = {"w": jnp.ones((16, 8)), "small": jnp.ones((3,))}
    negate = jax.jit(lambda p: jax.tree.map(jnp.negative, p), donate_argnums=0)
    for stage in (1, 3):
        layout = models.make_layout(params, "2x4", stage, min_shard_size=20)
        stored = layout.shard(params)
        for given in (params, stored):  # also where nothing has to move
            negate(layout.shard(given))
            assert float(sum(x.sum() for x in jax.tree.leaves(given))) == 131


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("mesh", ["1x7", "2x4"])
def test_init_gives_the_values_of_the_plain_initialiser(mesh, stage):
    key = jax.random.key(4)
    layout = models.make_layout(jax.eval_shape(models.transformer_init, key), mesh, stage)
    stored = layout.init(models.transformer_init, key)
    assert jax.tree.map(lambda x: x.sharding, stored) == layout.param_shardings()
    # The same program compiled for shards: contractions of multiply and add may be fused otherwise, one ulp.
    assert models.largest_error(layout.unshard(stored), models.transformer_init(key)) < 2.0**-22


def test_init_makes_no_full_copy_on_any_device():
    def init(key):
        return {"w": jax.random.normal(key, (1024, 512)), "v": jax.random.normal(key, (333, 515))}

    key = jax.random.key(0)
    layout = models.make_layout(jax.eval_shape(init, key), "2x4", 3)
    stored = layout.init(init, key)
    assert max(models.largest_shard(x) for x in jax.tree.leaves(stored)) == 1024 * 512 * 4 // 8
    captured, real = [], jax.jit

    def spy(fn, **options):
        jitted = real(fn, **options)

        def call(*args):
            captured.append(memory_figures(jitted.lower(*args).compile()))
            return jitted(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", spy)
        layout.init(init, key)
    (figures,) = captured
    assert figures is not None
    # Random bits and the result of a shard need a few times the shard; the whole leaf has 8 times the shard.
    assert figures.temp + figures.output < 1024 * 512 * 4


def test_abstract_parameters_are_those_that_shard_makes():
    params = mixed_tree()
    layout = models.make_layout(params, "2x4", 3, trainable=trainable)
    for a, b in zip(jax.tree.leaves(layout.param_shapes()), jax.tree.leaves(layout.shard(params)), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)


def test_frozen_leaves_are_sharded_like_the_others():
    params = {"w": jnp.ones((16, 8)), "frozen": jnp.ones((16, 8))}
    layout = models.make_layout(params, "2x4", 3, trainable={"w": True, "frozen": False})
    assert layout.placements["frozen"].dim == layout.placements["w"].dim == 0
    assert layout.shard(params)["frozen"].addressable_shards[0].data.shape == (2, 8)


def test_a_leaf_s_own_sharding_over_other_axes_is_kept():
    mesh = zerojax.make_mesh(2, 4, model=2)
    w = jax.device_put(jnp.arange(16.0 * 8).reshape(16, 8), NamedSharding(mesh, P(None, "model")))
    layout = zerojax.partition({"w": w}, mesh, zerojax.ZeroConfig(min_shard_size=0))
    stored = layout.shard({"w": w})["w"]
    assert stored.sharding.spec == P(("local", "node"), "model")
    assert stored.addressable_shards[0].data.shape == (4, 4)
    np.testing.assert_array_equal(layout.unshard({"w": stored})["w"], w)


def test_a_bare_array_is_a_tree_too():
    layout = models.make_layout(jnp.ones((16, 8)), "2x4", 3)
    assert layout.shard(jnp.ones((16, 8))).addressable_shards[0].data.shape == (2, 8)


def test_numpy_s_double_precision_is_the_float32_that_jax_makes_of_it():
    params = {"w": np.arange(35.0).reshape(7, 5), "n": np.arange(6)}
    layout = models.make_layout(params, "2x4", 3, trainable={"w": True, "n": False})
    assert {name: p.dtype.name for name, p in layout.placements.items()} == {"w": "float32", "n": "int32"}
    np.testing.assert_array_equal(layout.unshard(layout.shard(params))["w"], params["w"])


def test_gradients_moments_and_masters_with_holes_come_back_whole():
    """Frozen leaves have no gradient, masked ones no moment, float32 ones no master."""
    params = {"a": jnp.ones((13, 4), jnp.bfloat16), "b": jnp.ones((16, 4)), "frozen": jnp.ones((16, 4))}
    layout = models.make_layout(params, "2x4", 3, trainable=lambda path, x: "frozen" not in path)
    mask = {"a": True, "b": False, "frozen": None}
    state = zerojax.zero(optax.masked(optax.trace(0.9), mask), layout).init(layout.shard(params))
    grads = {"a": layout.shard(params)["a"], "b": layout.shard(params)["b"], "frozen": None}
    for tree, kept in ((grads, {"a", "b"}), (state.master, {"a"}), (state.inner.inner_state.trace, {"a"})):
        whole = layout.unshard(tree)
        assert {k for k, x in whole.items() if jax.tree.leaves(x)} == kept
        assert whole["a"].shape == (13, 4)
        assert jax.tree.structure(whole) == jax.tree.structure(tree)
    with pytest.raises(ValueError, match=r"params do not have the structure"):
        layout.unshard({"a": grads["a"]})
    with pytest.raises(ValueError, match=r"params\['b'\] has shape \(3,\)"):
        layout.unshard({**grads, "b": jnp.ones(3)})


@pytest.mark.parametrize("dtype", ["int2", "uint2", "int4", "uint4"])
def test_integers_of_a_few_bits_are_gathered_and_saved(tmp_path, dtype):
    """XLA's own gather of two-bit integers ends the process on the CPU; zarr has no unsigned ones."""
    values = np.arange(13 * 12).reshape(13, 12) % 2
    params = {"q": jnp.asarray(values, dtype), "w": jnp.ones((12, 8))}
    layout = models.make_layout(params, "2x4", 3, trainable=lambda path, x: "w" in path)
    stored = layout.shard(params)
    out = zerojax.apply(lambda p, x: x @ p["q"].astype(jnp.float32), layout)(stored, jnp.ones((8, 13)))
    np.testing.assert_array_equal(out[0], np.sum(np.asarray(params["q"]).astype(np.float32), 0))
    zerojax.save(tmp_path / "it", stored, layout)
    for q in (layout.unshard(stored)["q"], layout.unshard(zerojax.restore(tmp_path / "it", layout))["q"]):
        assert q.dtype == dtype
        np.testing.assert_array_equal(np.asarray(q).astype(int), np.asarray(params["q"]).astype(int))


def test_a_bare_array_is_restored_alone_from_a_train_state(tmp_path):
    params = jnp.arange(13.0 * 4).reshape(13, 4)
    layout = models.make_layout(params, "2x4", 3)
    tx = zerojax.zero(optax.adam(1e-3), layout)
    zerojax.save(tmp_path / "it", zerojax.TrainState.create(layout.shard(params), tx), layout, tx)
    np.testing.assert_array_equal(layout.unshard(zerojax.restore(tmp_path / "it", layout)), params)


def test_a_layout_shows_its_first_line_every_leaf_on_request_and_a_table_in_a_notebook():
    params = {"<odd>": jnp.ones((13, 4)), "even": jnp.ones((16, 8)), "one": jnp.ones(())}
    layout = models.make_layout(params, "2x4", 3, trainable=lambda path, x: "one" not in path)
    first, *_ = layout.describe().splitlines()
    assert repr(layout) == first
    assert "['even']" not in layout.describe()
    for path in ("['<odd>']", "['even']", "['one']"):
        assert path in layout.describe(every_leaf=True)
    table = layout._repr_html_()
    assert table.count("<tr>") == 1 + 3
    assert "[&#x27;&lt;odd&gt;&#x27;]" in table
    assert "<odd>" not in table
