"""Nothing that outlives a trace holds on to its arrays: every program traces under `jax.checking_leaks()`.

JAX keeps the rules of custom derivatives and the bodies of checkpointed regions in the equations of what it traces.
"""

import functools
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import models
import pytest
import stack_programs  # noqa: F401 (adds its programs to LAYERED)
from layered_programs import LAYERED, inputs
from weight_programs import MESH, PROGRAMS, examples, parameters

import zerojax

SETTINGS: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3, "prefetch_bytes": 1000},
    "zero++": {
        "stage": 3, "quantize_weights": "int8", "secondary": True, "quantize_gradients": "int8", "min_quantize_size": 0,
    },
}  # fmt: skip
EVERY = {**PROGRAMS, **LAYERED}
# One for each rule of the evaluator and each way of a parameter into it.
CHOSEN = (
    "tied_and_transposed", "narrow_layers_unrolled_by_index", "scanned_layers", "scanned_under_checkpoint",
    "loop_constants_beside_layers", "weight_in_the_carry", "fori_loop_with_index", "while_loop_over_a_stopped_weight",
    "switch_in_a_loop", "custom_vjp_of_its_own", "custom_jvp_of_a_weight", "checkpoint_policies", "gradient_inside",
    "rule_of_its_own_around_the_layers", "loop_that_stops_early_on_each_device", "stack_made_of_its_own_layers",
    "normalised_stack", "masked_stack_over_an_index", "groups_of_layers", "layers_taken_by_an_index",
    "low_rank_updates_made_before_the_loop",
)  # fmt: skip


@pytest.fixture(autouse=True)
def fast_collections() -> Iterator[None]:
    """JAX collects garbage at the end of each trace: what is there already need not be looked through."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@functools.cache
def layout_of(name: str, setting: str) -> zerojax.Layout:
    shapes = jax.eval_shape(parameters if name in PROGRAMS else inputs)
    return models.make_layout(shapes, MESH, **SETTINGS[setting])


@pytest.mark.parametrize("setting", ["stage 2", "stage 3", pytest.param("zero++", marks=pytest.mark.aot)])
@pytest.mark.parametrize("name", CHOSEN)
def test_no_rule_holds_on_to_the_arrays_of_its_trace(name, setting):
    layout = layout_of(name, setting)
    traced = zerojax.value_and_grad(EVERY[name], layout)
    with warnings.catch_warnings(), jax.checking_leaks():
        warnings.simplefilter("ignore", zerojax.GatherWarning)
        jax.make_jaxpr(traced)(layout.param_shapes(), jax.eval_shape(examples))
