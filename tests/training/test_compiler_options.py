"""Compiler options: every one is taken by the compiler at hand, none reaches a CPU, and the step passes them itself."""

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.models import make_layout
from tests.planned import stack_workload
from zerojax.planner.compile import lower_step
from zerojax.planner.gpus import target_mesh
from zerojax.planner.workload import Workload
from zerojax.training import step as step_module
from zerojax.training.compiler_options import OPTIONS


def layout_of_target_gpus(params, nodes=2, local=2):
    return zerojax.partition(params, target_mesh("h100", nodes, local), zerojax.ZeroConfig(min_shard_size=0))


def test_no_option_is_given_to_a_cpu_and_an_unknown_name_is_refused():
    layout = make_layout({"w": jnp.ones((8, 8))}, "2x4", 3)
    assert zerojax.compiler_options(layout, experimental=list(OPTIONS)) == {}
    with pytest.raises(ValueError, match=r"pipelined_gather'.*'pipelined_gathers'"):
        zerojax.compiler_options(layout, experimental=["pipelined_gather"])


@pytest.mark.needs_cuda_plugin
@pytest.mark.parametrize("name", OPTIONS)
def test_the_compiler_takes_every_option(name):
    layout = layout_of_target_gpus({"w": jnp.ones((256, 256), jnp.bfloat16)})
    options = zerojax.compiler_options(layout, experimental=[name])
    assert OPTIONS[name].safe or len(options) > len(zerojax.compiler_options(layout))
    jax.jit(lambda w: w @ w, compiler_options=options).lower(layout.param_shapes()["w"]).compile()


@pytest.mark.needs_cuda_plugin
@pytest.mark.filterwarnings("ignore:stage 3 has no effect")
def test_one_device_has_nothing_to_overlap():
    assert zerojax.compiler_options(layout_of_target_gpus({"w": jnp.ones((256, 256))}, 1, 1)) == {}


@pytest.mark.needs_cuda_plugin
def test_the_step_and_the_plan_pass_the_options_but_not_within_another_jit(monkeypatch):
    loss, params, batch, tx = stack_workload(1)
    workload = Workload(loss, params, batch, tx).with_examples(4)
    layout = layout_of_target_gpus(params)
    monkeypatch.setattr(step_module, "compiler_options", lambda layout: {"xla_no_such_option": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        lower_step(workload, layout, microbatches=1).compile()
    step = zerojax.make_train_step(loss, zerojax.zero(tx, layout), layout)
    state = zerojax.TrainState.create(layout.param_shapes(), zerojax.zero(tx, layout), layout)
    jax.jit(lambda state, batch: step(state, batch)).lower(state, workload.batch).compile()
