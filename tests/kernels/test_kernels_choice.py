"""Which implementation runs: decided at lowering, gated by the device, never a silent fallback."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kernel_formats import INT4_TILED

import pallas_kernels as pk
from pallas_kernels import _compat, backend, mosaic, survey, target_gpu

X = jnp.asarray(np.random.default_rng(0).standard_normal((16, 1024)), jnp.float32)
KERNEL_MARK = "mosaic_gpu"


@pytest.fixture(autouse=True)
def kernels_preferred():
    before = pk.prefer_kernels()
    yield
    pk.prefer_kernels(before)


def middle(x):
    """All kernels once: quantise, sum and quantise, sum."""
    q = pk.quantize_slices(x, dim=0, num_slices=(4, 2))
    return pk.dequantize_sum(pk.dequantize_sum_quantize(q, INT4_TILED))


def test_one_traced_program_runs_on_the_cpu_and_equals_the_reference():
    jaxpr = str(jax.make_jaxpr(middle)(X))
    assert "platform_index" in jaxpr
    xla = functools.partial(pk.quantize, implementation="xla")
    for a, b in zip(jax.tree.leaves(jax.jit(pk.quantize)(X)), jax.tree.leaves(jax.jit(xla)(X)), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    assert np.isfinite(np.asarray(jax.jit(middle)(X))).all()


def test_kernels_that_no_gpu_has_run_are_not_taken_unasked():
    pk.prefer_kernels(None)
    assert "platform_index" not in str(jax.make_jaxpr(lambda x: middle(x))(X))


@pytest.mark.needs_cuda_plugin
def test_the_same_program_compiles_to_kernels_for_an_target_gpu():
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    text = target_gpu.compile_for(middle, [shape], "h100").as_text()
    assert text.count(KERNEL_MARK) >= 3
    plain = target_gpu.compile_for(functools.partial(pk.quantize, implementation="xla"), [shape], "h100").as_text()
    assert KERNEL_MARK not in plain
    back = target_gpu.compile_for(lambda x: pk.dequantize(pk.quantize(x, implementation="xla")), [shape], "h100")
    assert KERNEL_MARK not in back.as_text()


@pytest.mark.needs_cuda_plugin
@pytest.mark.parametrize(
    ("nested", "check_vma"),
    [
        (True, True),
        *(pytest.param(*more, marks=pytest.mark.aot) for more in ((True, False), (False, True), (False, False))),
    ],
)
def test_kernels_compile_inside_shard_map_for_target_gpus(nested, check_vma):
    topology = target_gpu.topology("h100", "1x2x4")
    mesh = jax.sharding.Mesh(np.array(topology.devices).reshape(4, 2), ("d", "model"))

    def exchange(x):
        q = pk.quantize_slices(x, dim=0, num_slices=4)
        received = jax.lax.all_to_all(pk.pack_bytes(q), "d", 0, 0, tiled=True)
        return pk.dequantize_sum(pk.unpack_bytes(received, q), mean=True)

    def program(x):
        if not nested:
            return exchange(x)
        spec = P(None, "model")
        return jax.shard_map(exchange, in_specs=spec, out_specs=spec, axis_names={"model"}, check_vma=check_vma)(x)

    names = {"d"} if nested else {"d", "model"}
    specs = P("d", None) if nested else P("d", "model")
    mapped = jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=specs, axis_names=names, check_vma=check_vma)
    sharding = jax.sharding.NamedSharding(mesh, P("d", "model"))
    x = jax.ShapeDtypeStruct((64, 2048), jnp.bfloat16, sharding=sharding)
    text = jax.jit(mapped).lower(x).compile().as_text() or ""
    assert text.count(KERNEL_MARK) >= 2
    # One message per destination, in bytes; nothing gathered over the model axis.
    assert "all-to-all" in text
    assert "all-gather" not in text
    payload = [line for line in text.splitlines() if "all-to-all" in line and " = " in line]
    assert all("u8[" in line or "s8[" in line for line in payload if "all-to-all(" in line or "start(" in line)


@pytest.mark.needs_cuda_plugin
def test_a_gpu_that_mosaic_does_not_know_gets_the_reference_not_an_abort():
    with _compat.assume_compute_capability(12, 0):
        assert backend.device_problems()
        text = str(jax.make_jaxpr(pk.quantize)(X))
        assert "mosaic" not in text
        with pytest.raises(NotImplementedError, match=r"12\.0 is not supported"):
            jax.eval_shape(functools.partial(pk.quantize, implementation="mosaic_gpu"), X)


def test_an_explicit_kernel_on_a_cpu_is_an_error_that_says_what_to_do():
    with pytest.raises(NotImplementedError, match="interpret=True"):
        pk.quantize(X, implementation="mosaic_gpu")
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    mapped = jax.shard_map(
        functools.partial(pk.quantize, implementation="mosaic_gpu"), mesh=mesh, in_specs=P("d"), out_specs=P("d")
    )
    with pytest.raises(NotImplementedError, match="runs on a CPU"):
        jax.eval_shape(mapped, X)


def test_every_reason_is_listed_at_once():
    x = jnp.ones(1000)
    with pytest.raises(NotImplementedError) as caught:
        pk.quantize(x, implementation="mosaic_gpu")
    assert "1000" in str(caught.value)
    assert "CPU" in str(caught.value)


def test_dequantize_has_no_kernel_and_says_so():
    with pytest.raises(NotImplementedError, match="XLA already moves the ideal bytes"):
        pk.dequantize(pk.quantize(X), implementation="mosaic_gpu")


@pytest.mark.skipif(_compat.MOSAIC_INTERPRETS, reason="this JAX interprets Mosaic kernels")
def test_interpreting_on_an_old_jax_is_refused_with_the_version():
    with pytest.raises(NotImplementedError, match=r"0\.11"):
        pk.quantize(X, implementation="mosaic_gpu", interpret=True)


def test_a_call_the_kernel_cannot_do_runs_on_the_reference_by_default():
    x = jnp.arange(1000.0)
    assert "platform_index" not in str(jax.make_jaxpr(lambda x: pk.quantize(x).qvalue)(x))
    assert pk.dequantize(jax.jit(pk.quantize)(x)).shape == (1000,)


def test_every_format_has_a_kernel_for_a_large_leaf_and_every_pair_one_or_a_reason():
    formats, elements = list(survey.formats()), 1 << 16
    for fmt in formats:
        for stochastic, residual in itertools.product((False, True), repeat=2):
            plan = mosaic.plan_quantize((elements,), "bfloat16", None, (), fmt, stochastic, residual)
            assert not plan.problems, (fmt, plan.problems)
            assert plan.programs.count * plan.programs.elements >= elements
        assert not mosaic.plan_sum((3,), (elements,), fmt, jnp.dtype("float32"), 1.0).problems, fmt
    for source, fmt in itertools.product(formats, repeat=2):
        plan = mosaic.plan_sum_quantize((3,), (elements,), source, fmt, 1.0, False, None, False)
        if plan.problems:
            assert all("block" in problem or "program" in problem for problem in plan.problems), (source, fmt, plan)
        else:
            assert plan.programs.count * plan.programs.elements >= elements


def test_blocks_larger_than_a_tile_go_into_tiles_by_the_reference():
    q = pk.quantize_slices(X, pk.QuantFormat(8, 2048), dim=0, num_slices=4)
    wanted = jax.jit(functools.partial(pk.dequantize_sum_quantize, fmt=INT4_TILED, implementation="xla"))(q)
    got = jax.jit(functools.partial(pk.dequantize_sum_quantize, fmt=INT4_TILED))(q)
    np.testing.assert_array_equal(got.qvalue, wanted.qvalue)
    with pytest.raises(NotImplementedError, match="blocks of 2048 are larger than the tile of 1024"):
        pk.dequantize_sum_quantize(q, INT4_TILED, implementation="mosaic_gpu")
