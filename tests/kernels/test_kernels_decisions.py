"""A GPU's first use of a variant decides whether its kernel runs; here a CPU stands in for the GPU and interprets."""

import dataclasses
import functools
import json
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from kernel_formats import INT4_TILED, INT8

import pallas_kernels as pk
import zerojax
from pallas_kernels import _compat, backend, choice, selfcheck
from pallas_kernels.variants import Variant

sys.path.append(str(Path(__file__).parents[1] / "hosts"))
from processes import finish, start

GPU = choice.Probe("a GPU of the tests", "1.0", (1 << 14, 1 << 15), {"implementation": "mosaic_gpu", "interpret": True})
LEAF = Variant("quantize", INT8, "float32")
X = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
needs_interpreter = pytest.mark.skipif(not _compat.MOSAIC_INTERPRETS, reason="JAX 0.10 cannot interpret the kernels")


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """A GPU to be asked, a cache of its own, and no decisions yet."""
    monkeypatch.setattr(choice, "probe", lambda: GPU)
    monkeypatch.setattr(choice, "_decisions", {})
    monkeypatch.setattr(choice, "_agreed", {})
    monkeypatch.setenv(choice.CACHE_VARIABLE, str(tmp_path / "deep" / "decisions.json"))
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    return tmp_path / "deep" / "decisions.json"


@pytest.fixture
def checks(monkeypatch):
    """The variants that were checked, each found equal at 0.5 of the time."""
    seen = []

    def check(variant, device):
        seen.append(str(variant))
        return choice.Decision(True, "equal", 0.5)

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
        real = GPU.sizes[1] if not variant.count else max(GPU.sizes[0], GPU.sizes[1] // 4)
        assert found.bytes_per_second <= variant.ideal_bytes * real / kernel_seconds


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
    (found,) = pk.decisions().values()
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
    monkeypatch.setattr(selfcheck, "check", lambda variant, device: choice.Decision(False, "1.2 of XLA's time", 1.2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not takes_kernels()


def test_decisions_of_the_file_spare_the_next_process_the_check(checks, here, monkeypatch):
    assert takes_kernels()
    monkeypatch.setattr(choice, "_decisions", {})
    assert takes_kernels()
    assert len(checks) == 1
    (identity,) = json.loads(here.read_text())
    assert GPU.kind in identity
    assert jax.__version__ in identity
    assert [path.name for path in here.parent.iterdir()] == [here.name]  # nothing half-written is left


@pytest.mark.parametrize("changed", [{"driver": "2.0"}, {"kind": "another"}])
def test_decisions_of_another_device_or_driver_are_not_trusted(changed, checks, monkeypatch):
    assert takes_kernels()
    monkeypatch.setattr(choice, "probe", lambda: dataclasses.replace(GPU, **changed))
    assert takes_kernels()
    assert len(checks) == 2


@pytest.mark.parametrize(
    ("place", "name", "value"), [(choice, "_sources", lambda: "another"), (jax, "__version__", "9.9")]
)
def test_decisions_of_other_sources_or_another_jax_are_not_trusted(place, name, value, checks, monkeypatch):
    assert takes_kernels()
    monkeypatch.setattr(place, name, value)
    assert takes_kernels()
    assert len(checks) == 2


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"x": 1}'])
def test_a_file_that_cannot_be_read_is_replaced(text, checks, here):
    here.parent.mkdir()
    here.write_text(text)
    assert takes_kernels()
    assert len(checks) == 1
    assert len(json.loads(here.read_text())) == 1


@pytest.mark.parametrize(
    "written",
    [
        {"takes_kernel": "no"}, {"takes_kernel": 1}, {"ratio": "0.5"}, {"reason": None}, {"faulty": "yes"},
        {"faulty": True}, {"another": 1}, 3, None,
    ],
    ids=str,
)  # fmt: skip
def test_a_decision_of_the_file_that_is_none_decides_nothing(written, checks, here, monkeypatch):
    assert takes_kernels()
    whole = json.loads(here.read_text())
    ((identity, kept),) = whole.items()
    ((name, entry),) = kept.items()
    whole[identity][name] = entry | written if isinstance(written, dict) else written
    here.write_text(json.dumps(whole))
    monkeypatch.setattr(choice, "_decisions", {})
    assert takes_kernels()
    assert len(checks) == 2
    assert json.loads(here.read_text())[identity][name] == entry


def test_a_faulty_decision_of_the_file_is_said_again_and_not_taken(here, monkeypatch):
    monkeypatch.setattr(selfcheck, "check", lambda *_: choice.Decision(False, "it differs", faulty=True))
    for _ in range(2):
        with pytest.warns(pk.KernelNotice, match="it differs"):
            assert not takes_kernels()
        monkeypatch.setattr(choice, "_decisions", {})
        monkeypatch.setattr(selfcheck, "check", lambda *_: 1 / 0)  # not asked again


def test_a_full_disk_leaves_neither_half_a_file_nor_an_error(checks, here, monkeypatch):
    real = type(here).write_text

    def half(path, text):
        real(path, text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(here), "write_text", half)
    assert takes_kernels()
    assert list(here.parent.iterdir()) == []


def test_a_place_that_cannot_be_written_is_left_alone(checks, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(choice.CACHE_VARIABLE, str(tmp_path / "file" / "decisions.json"))
    assert takes_kernels()


@pytest.fixture
def job(monkeypatch):
    """What two processes tell each other, with a way to become one of them."""
    shared = {}
    jax.devices()  # a backend that started now would ask the client below

    class Client:
        def key_value_set(self, key, value):
            shared[key] = value

        def blocking_key_value_get(self, key, timeout):
            return shared[key]

    from jax._src import distributed

    monkeypatch.setattr(distributed.global_state, "client", Client())
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(choice, "read_cache", dict)

    def become(index):
        monkeypatch.setattr(jax, "process_index", lambda: index)
        monkeypatch.setattr(choice, "_decisions", {})
        monkeypatch.setattr(choice, "_agreed", {})

    return shared, become


@pytest.mark.parametrize("taken", [True, False])
def test_the_first_process_decides_for_all(taken, job, monkeypatch):
    shared, become = job
    for index, found in ((0, taken), (1, not taken)):
        become(index)
        monkeypatch.setattr(selfcheck, "check", lambda *_, found=found: choice.Decision(found, "timed", 1.0))
        assert takes_kernels() == taken
    monkeypatch.setattr(choice, "_decisions", {})
    shared.clear()
    with pytest.raises(RuntimeError, match=r"the first process has not said.*kernel_policy"):
        takes_kernels()


@pytest.mark.aot
def test_real_processes_with_other_clocks_and_other_environments_choose_alike(tmp_path):
    script = f"""
import os
from pallas_kernels import choice, selfcheck
choice.probe = lambda: choice.Probe("a GPU of the tests", "1.0")
selfcheck.check = lambda variant, device: choice.Decision(RANK == 0, "timed", 0.9 + RANK)
os.environ["PALLAS_KERNELS_CACHE"] = {str(tmp_path)!r} + f"/{{RANK}}.json"
first = choice.takes_kernel("one")
os.environ["PALLAS_KERNELS"] = "auto" if RANK == 0 else "never"
choice.prefer_kernels(None)
print("chose", first, choice.takes_kernel("two"), os.path.exists(os.environ["PALLAS_KERNELS_CACHE"]))
"""
    (first, said), (second, heard) = finish(start(script, 2, 1))
    assert (first, second) == (0, 0), said + heard
    assert "chose True True True" in said
    assert "chose True True False" in heard  # the first process alone checks, and keeps what it found


@pytest.mark.parametrize(("first", "other"), [("never", "always"), ("always", "never"), ("never", "auto")])
def test_an_environment_that_differs_from_the_first_process_gives_way_with_a_notice(
    first, other, job, checks, monkeypatch
):
    _, become = job
    become(0)
    monkeypatch.setenv(choice.VARIABLE, first)
    assert takes_kernels() == (first == "always")
    become(1)
    monkeypatch.setenv(choice.VARIABLE, other)
    with pytest.warns(pk.KernelNotice, match=f"process 1 has kernels '{other}'.*the first process '{first}'"):
        assert takes_kernels() == (first == "always")
    with pk.kernel_policy(other if other != "auto" else "always"):  # the program's own word is the same everywhere
        assert takes_kernels() == (other != "never")
    assert not checks


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
