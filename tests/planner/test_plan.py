"""Plans from placements: what they hold and say, the advice, the time model, and what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from planned import plan_stack, stack_workload

import zerojax
from zerojax import ZeroConfig
from zerojax.hlo.collective import Traffic
from zerojax.planner.advice import comparison_configs
from zerojax.planner.gpus import PluginMissing, load_target
from zerojax.planner.models import GPT_SHAPES, GptShape, gpt
from zerojax.planner.plan import plan_workload
from zerojax.planner.time import Links, break_even, parse_bandwidth, step_time
from zerojax.planner.workload import Workload, trace_workload


def test_tracing_and_lowering_do_not_grow_with_the_layers():
    def lowered_lines(layers):
        workload = gpt(GptShape(layers, 64, 2, vocabulary=512, length=32)).with_examples(8)
        layout = zerojax.partition(workload.params, zerojax.make_mesh(2, 4), ZeroConfig(min_shard_size=0))
        tx = zerojax.zero(workload.tx, layout)
        state = zerojax.TrainState.create(layout.param_shapes(), tx)
        return len(
            zerojax.make_train_step(workload.loss_fn, tx, layout).lower(state, workload.batch).as_text().splitlines()
        )

    assert lowered_lines(4) == lowered_lines(40)


@pytest.mark.parametrize("name", GPT_SHAPES)
def test_built_in_models_have_the_size_of_their_name(name):
    nominal = {"7.5b": 7.5e9, "18b": 18e9, "128b": 128e9, "1t": 1e12}[name]
    found = plan_workload(gpt(GPT_SHAPES[name]), examples_per_device=1, compiles=False)
    # The papers' names round as well; embeddings are counted here.
    assert found.parameters == pytest.approx(nominal, rel=0.03)
    # 8 FLOP per parameter and token with recomputation (2 forward, 4 backward, 2 again), attention and logits on top.
    assert found.flops == pytest.approx(8 * found.parameters * 2048, rel=0.1)


def test_a_plan_from_placements_has_every_part_but_the_compilers():
    found = plan_stack(configs=comparison_configs(), compiles=False, width=2048)
    assert "placements alone" in found.lacking
    for one in found.configs:
        assert not one.is_compiled
        assert one.received_bytes == one.predicted_received > 0
        assert one.time.step > one.time.compute > 0
        assert one.largest is None
    stages = [one.memory.total for one in found.configs[:4]]
    assert stages == sorted(stages, reverse=True)
    assert json.loads(found.to_json())["configs"][3]["memory"]["fits"] is True
    assert "placements only" in str(found)


def test_what_is_replicated_is_listed_with_its_reason():
    loss = lambda p, x: jnp.mean(x @ p["w"] + p["b"])  # noqa: E731
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32), "b": jax.ShapeDtypeStruct((1024,), jnp.float32)}
    batch = jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    found = zerojax.plan(loss, params, batch, optax.adam(1e-3), num_nodes=2, devices_per_node=4, compiles=False,
                         configs=[ZeroConfig(stage=1), ZeroConfig(stage=3)])  # fmt: skip
    first, third = ({(r.what, r.path): r for r in one.replicated} for one in found.configs)
    assert first["params", "['w']"].bytes == 4 * 1024 * 1024
    assert "stage 3 splits them" in first["params", "['w']"].reason
    assert ("params", "['w']") not in third
    assert "fewer than min_shard_size" in third["params", "['b']"].reason


def test_error_feedback_has_a_class_of_its_own():
    config = ZeroConfig.zero_plus_plus(error_feedback=True)
    found = plan_stack(config=config, num_nodes=2, compiles=False).configs[0].memory.classes
    elements = 2 * 4 * 512 * 2048
    assert found["error_feedback"] == elements // 8 * 2  # bfloat16, 1/local on each device
    assert plan_stack(compiles=False).configs[0].memory.classes["error_feedback"] == 0


def test_the_replica_of_weight_deltas_has_a_class_of_its_own_in_place_of_the_secondary():
    found = plan_stack(config=ZeroConfig(weight_deltas="int4"), num_nodes=2, compiles=False).configs[0]
    elements = 2 * 4 * 512 * 2048
    assert found.memory.classes["replica"] == elements // 8 * 2  # bfloat16, 1/local on each device
    assert found.memory.classes["secondary"] == 0
    assert found.name == "stage 3 + weight deltas int4"


def test_techniques_without_effect_on_the_cluster_are_named():
    found = plan_stack(config=ZeroConfig(secondary=True), num_nodes=1, compiles=False)
    assert "secondary has no effect" in found.configs[0].notice
    advice = {t.name: t for t in found.techniques}
    assert advice["secondary"].decision == "no"
    assert "don't" in advice["secondary"].advice


def test_padding_that_costs_is_told():
    def notice(nodes):
        return plan_stack(num_nodes=nodes, devices_per_node=1, compiles=False).configs[0].notice

    assert notice(8) == ""
    # 2048 rows padded to 2100 for 75 shards, of every leaf.
    assert "padding to 75 shards adds 2.5%" in notice(75)


def test_quantised_gathers_are_not_advised_where_the_network_is_fast():
    # Long sequences: compute covers all communication, and quantising only adds passes over memory.
    loss, params, _, tx = stack_workload()
    batch = jax.ShapeDtypeStruct((1, 1 << 16, 512), jnp.bfloat16)
    found = zerojax.plan(loss, params, batch, tx, examples_per_device=1, compiles=False, bandwidth="10TB/s")
    weights = found.techniques[0]
    assert (weights.name, weights.decision) == ("quantize_weights", "no")
    assert weights.saved_seconds_hidden < 0 < weights.saved_node_bytes
    assert "don't" in weights.advice
    assert weights.break_even_hidden < found.links.node_bandwidth
    # Below its own break-even it saves time.
    slow = zerojax.plan(loss, params, batch, tx, examples_per_device=1, compiles=False,
                        bandwidth=0.5 * weights.break_even_hidden)  # fmt: skip
    assert slow.techniques[0].saved_seconds_hidden > 0


def test_when_nothing_fits_the_plan_says_so():
    tiny = dataclasses.replace(load_target("h100"), memory_bytes=100_000)
    found = plan_stack(target=tiny, configs=comparison_configs(), compiles=False)
    assert not found.fits
    assert found.recommended is None
    assert found.recommendation.startswith("nothing fits: the least is stage 3")


def test_progress_goes_from_nothing_to_all():
    seen = []
    plan_stack(configs=comparison_configs(), compiles=False, progress=lambda *step: seen.append(step))
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] == 8
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


@pytest.mark.parametrize("axes", [("data",), ("node", "local")])
def test_one_data_axis_or_two_are_planned(axes):
    found = plan_stack(config=ZeroConfig(axes=axes), num_nodes=3, devices_per_node=2, compiles=False)
    # Flat or by hops, two thirds of 3M come from other nodes.
    assert found.configs[0].predicted_node == pytest.approx(3 * found.model_bytes * 2 / 3, rel=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "h900"}, "unknown GPU 'h900'"),
        ({"num_nodes": 0}, "num_nodes=0"),
        ({"devices_per_node": 2.5}, "devices_per_node=2.5"),
        ({"bandwidth": "fast"}, "bandwidth 'fast'"),
        ({"bandwidth": -1.0}, "positive"),
        ({"efficiency": 2.0}, "efficiency=2.0"),
        ({"usable": 0.0}, "usable=0.0"),
        ({"configs": []}, "at least one"),
        ({"config": ZeroConfig(), "configs": [ZeroConfig()]}, "one of the two"),
        ({"examples_per_device": None}, "multiple of 384"),
        ({"examples_per_device": 0}, "examples_per_device=0"),
        ({"extra_axes": {"model": 3}}, "must divide by 3"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        plan_stack(**{"compiles": False, **options})
    assert len(str(caught.value).splitlines()) == 1


def test_shapes_that_cannot_be_traced_are_refused_in_one_line():
    _, params, batch, tx = stack_workload()
    with pytest.raises(ValueError, match="cannot be traced") as caught:
        zerojax.plan(lambda p, x: jnp.mean(x @ p["up"][0].T), params, batch, tx, examples_per_device=1, compiles=False)
    assert len(str(caught.value).splitlines()) == 1
    layout = zerojax.partition(params, zerojax.make_mesh(2, 4))
    with pytest.raises(ValueError, match="the optax transformation itself"):
        zerojax.plan(*stack_workload()[:3], zerojax.zero(tx, layout))
    with pytest.raises(ValueError, match="must hold arrays"):
        zerojax.plan(lambda p, x: 0.0, {"w": "text"}, batch, tx)


def test_without_the_plugin_the_plan_says_what_it_lacks(monkeypatch):
    def absent():
        raise PluginMissing("needs XLA's CUDA plugin: pip install --no-deps jax-cuda13-plugin")

    monkeypatch.setattr("zerojax.planner.workload.check_plugin", absent)
    found = plan_stack()
    assert "pip install" in found.lacking
    assert "without activations" in found.lacking
    assert found.configs[0].predicted_node > 0
    with pytest.raises(PluginMissing):
        plan_stack(compiles=True)


def test_the_time_model_is_the_one_that_is_stated():
    links = Links(node_bandwidth=100.0, link_bandwidth=50.0, memory_bandwidth=1000.0, flops=10.0)
    rows = [
        Traffic("forward", "all-gather", (), ("bf16",), True, "blocking", 1, 100, 400, pass_bytes=300),
        Traffic("forward", "all-gather", (), ("bf16",), True, "overlapped", 1, 200, 100, pass_bytes=200),
    ]
    found = step_time(30.0, rows, links)
    assert (found.compute, found.passes) == (3.0, 0.5)
    assert (found.between_nodes, found.inside_node) == (4.0, 4.0)
    assert found.hidden == 3.0  # of the asynchronous four seconds, as many as compute lasts
    assert found.step == 3.0 + 0.5 + 8.0 - 3.0
    limit = break_even(lambda at: 40 / at.node_bandwidth - 0.5, links)
    assert limit == 0.0  # below the smallest bandwidth that is tried
    assert break_even(lambda at: 4e9 / at.node_bandwidth - 0.5, links) == pytest.approx(8e9, rel=1e-9)
    assert break_even(lambda at: 1.0, links) == float("inf")


@pytest.mark.parametrize(("text", "value"), [("400GB/s", 4e11), ("3200 Gbit/s", 4e11), ("1.5TB/s", 1.5e12), (7, 7.0)])
def test_bandwidths_are_read_with_their_unit(text, value):
    assert parse_bandwidth(text) == value


@pytest.mark.parametrize("scope", ["flash_attention", "another"])
def test_scopes_of_fused_kernels_are_found_in_the_loss_wherever_they_stand(scope):
    def loss(w, x):
        @jax.checkpoint
        def layer(h, _):
            with jax.named_scope(scope):
                return jnp.tanh(h @ w), None

        return jnp.sum(jax.lax.scan(layer, x, None, length=2)[0])

    shapes = (jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((1, 8), jnp.float32))
    workload = Workload(loss, *shapes, optax.adam(1e-3))
    assert trace_workload(workload, 1, ["flash_attention"]).fused == ("flash_attention",) * (scope == "flash_attention")
