"""A GPU's first use of a variant decides whether its kernel runs; here a CPU stands in for the GPU and interprets."""

import dataclasses
import functools
import json
import warnings

import jax
import jax.numpy as jnp
import pytest
from kernel_formats import INT4_TILED, INT8

import pallas_kernels as pk
import zerojax
from pallas_kernels import _compat, backend, choice, selfcheck
from pallas_kernels.variants import Variant

GPU = choice.Probe("a GPU of the tests", "1.0", (1 << 14, 1 << 15), {"implementation": "mosaic_gpu", "interpret": True})
LEAF = Variant("quantize", INT8, "float32")
X = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
needs_interpreter = pytest.mark.skipif(not _compat.MOSAIC_INTERPRETS, reason="JAX 0.10 cannot interpret the kernels")


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """A GPU to be asked, a cache of its own, and no verdicts yet."""
    monkeypatch.setattr(choice, "probe", lambda: GPU)
    monkeypatch.setattr(choice, "_verdicts", {})
    monkeypatch.setenv(choice.CACHE_VARIABLE, str(tmp_path / "deep" / "verdicts.json"))
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    return tmp_path / "deep" / "verdicts.json"


@pytest.fixture
def checks(monkeypatch):
    """The variants that were checked, each found equal at 0.5 of the time."""
    seen = []

    def check(variant, device):
        seen.append(str(variant))
        return choice.Verdict(True, "equal", 0.5)

    monkeypatch.setattr(selfcheck, "check", check)
    return seen


def takes_kernels(**how):
    """Whether a traced program holds the kernel beside the reference."""
    return "platform_index" in str(jax.make_jaxpr(functools.partial(pk.quantize, **how))(X))


@needs_interpreter
@pytest.mark.parametrize(
    "variant",
    [
        LEAF,
        Variant("quantize", INT4_TILED, stochastic=True, residual=True, slices=True),
        Variant("sum", INT8, "float32", source=INT8, count=3),
        Variant("sum_quantize", INT4_TILED, "float32", residual=True, source=INT8, count=2, addend=True),
    ],
    ids=str,
)
def test_equal_kernels_are_taken_where_they_are_not_slower(variant, monkeypatch):
    for kernel_seconds, taken in ((1.0, True), (1.1, False))[: 2 if variant == LEAF else 1]:
        times = iter([kernel_seconds, 1.0] * 2)  # the kernel is timed first, at either size
        monkeypatch.setattr(selfcheck, "seconds", lambda function, arguments, times=times: next(times))
        found = selfcheck.check(variant, GPU)
        assert (found.takes_kernel, found.ratio, found.faulty) == (taken, kernel_seconds, False), found


@needs_interpreter
def test_a_kernel_that_differs_is_never_taken_and_named_in_a_notice(monkeypatch):
    real = pk.ops.mosaic.plan_quantize

    def off_by_one(*args):
        plan = real(*args)

        def run(*operands, interpret):
            qvalue, *rest = plan.run(*operands, interpret=interpret)
            return (qvalue.at[5].add(1), *rest)

        return dataclasses.replace(plan, run=run)

    monkeypatch.setattr(pk.ops.mosaic, "plan_quantize", off_by_one)
    with pytest.warns(pk.KernelNotice, match=r"quantize-int8/128-float32 is not taken on a GPU of the tests.*report"):
        assert not takes_kernels()
    (found,) = pk.verdicts().values()
    assert "differs from the reference in 128 of 16384 elements of result 0" in found.reason
    assert not takes_kernels()


def test_a_check_that_fails_is_a_notice_and_no_abort(monkeypatch):
    monkeypatch.setattr(selfcheck, "inputs", lambda variant: 1 / 0)
    with pytest.warns(pk.KernelNotice, match="it failed at .*ZeroDivisionError"):
        assert not takes_kernels()


def test_a_variant_is_checked_once_a_process_outside_of_what_is_traced(checks):
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    assert takes_kernels()
    assert takes_kernels()
    assert checks == ["quantize-int8/128-float32"]
    assert takes_kernels(fmt=INT4_TILED)
    assert checks == ["quantize-int8/128-float32", "quantize-int4/32-e4m3-float32"]
    assert mesh.size == 2


def test_a_variant_whose_kernel_is_slower_is_left_to_xla_without_a_word(monkeypatch):
    monkeypatch.setattr(selfcheck, "check", lambda variant, device: choice.Verdict(False, "1.2 of XLA's time", 1.2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not takes_kernels()


def test_verdicts_of_the_file_spare_the_next_process_the_check(checks, here, monkeypatch):
    assert takes_kernels()
    monkeypatch.setattr(choice, "_verdicts", {})
    assert takes_kernels()
    assert len(checks) == 1
    (identity,) = json.loads(here.read_text())
    assert GPU.kind in identity
    assert jax.__version__ in identity
    assert [path.name for path in here.parent.iterdir()] == [here.name]  # nothing half-written is left


@pytest.mark.parametrize("changed", [{"driver": "2.0"}, {"kind": "another"}])
def test_verdicts_of_another_device_or_driver_are_not_trusted(changed, checks, monkeypatch):
    assert takes_kernels()
    monkeypatch.setattr(choice, "probe", lambda: dataclasses.replace(GPU, **changed))
    assert takes_kernels()
    assert len(checks) == 2


def test_verdicts_of_other_sources_are_not_trusted(checks, monkeypatch):
    assert takes_kernels()
    monkeypatch.setattr(choice, "_sources", lambda: "another")
    assert takes_kernels()
    assert len(checks) == 2


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"x": 1}'])
def test_a_file_that_cannot_be_read_is_replaced(text, checks, here):
    here.parent.mkdir()
    here.write_text(text)
    assert takes_kernels()
    assert len(checks) == 1
    assert len(json.loads(here.read_text())) == 1


def test_a_place_that_cannot_be_written_is_left_alone(checks, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(choice.CACHE_VARIABLE, str(tmp_path / "file" / "verdicts.json"))
    assert takes_kernels()


def test_the_first_process_decides_for_all(checks, monkeypatch):
    shared = {}

    class Client:
        def key_value_set(self, key, value):
            shared[key] = value

        def blocking_key_value_get(self, key, timeout):
            return shared[key]

    from jax._src import distributed

    monkeypatch.setattr(distributed.global_state, "client", Client())
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for index in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        monkeypatch.setattr(choice, "_verdicts", {})
        monkeypatch.setattr(choice, "read_cache", dict)
        assert takes_kernels()
    assert len(checks) == 1
    monkeypatch.setattr(choice, "_verdicts", {})
    shared.clear()
    with pytest.raises(RuntimeError, match=r"the first process has not said.*PALLAS_KERNELS"):
        takes_kernels()


def test_policies_of_environment_process_and_configuration_force_or_forbid(checks, monkeypatch):
    monkeypatch.setenv(choice.VARIABLE, "never")
    assert not takes_kernels()
    before = pk.prefer_kernels()
    assert takes_kernels()
    with pk.kernel_policy("never"):
        assert not takes_kernels()
    pk.prefer_kernels(before)
    with pk.kernel_policy("always"):
        assert takes_kernels()
        with pk.kernel_policy("auto"):
            assert takes_kernels()
    assert not checks
    monkeypatch.setenv(choice.VARIABLE, "yes")
    with pytest.raises(ValueError, match=r"PALLAS_KERNELS must be one of .*'yes'"):
        takes_kernels()


@pytest.mark.parametrize(("kernels", "taken"), [("always", True), ("never", False), ("auto", True)])
def test_a_configuration_says_who_quantises(kernels, taken, checks, monkeypatch):
    monkeypatch.setattr(backend, "device_problems", list)  # a mesh of CPUs is known to be one
    mesh = zerojax.make_mesh(devices=jax.devices()[:4], num_nodes=2)
    config = zerojax.ZeroConfig.zero_plus_plus(kernels=kernels)
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    layout = zerojax.partition(params, mesh, config)
    fn = zerojax.value_and_grad(lambda params, batch: jnp.mean((batch @ params["w"]) ** 2), layout)
    program = str(jax.make_jaxpr(fn)(layout.param_shapes(), jax.ShapeDtypeStruct((8, 1024), jnp.float32)))
    assert ("platform_index" in program) == taken
    assert bool(checks) == (kernels == "auto")


def test_kernels_of_a_configuration_that_cannot_take_effect_are_refused():
    with pytest.raises(ValueError, match="kernels must be 'auto', 'always' or 'never'"):
        zerojax.ZeroConfig.zero_plus_plus(kernels="fast")
    with pytest.raises(ValueError, match=r"kernels.*neither quantize_weights nor quantize_gradients"):
        zerojax.ZeroConfig(kernels="always")
