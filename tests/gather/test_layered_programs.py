"""No full stack is gathered in silence: layers inside branches, loops and rules of their own move one at a time.

Values and gradients are those of plain JAX on one device. What a program gathers is read from its jaxpr: no gather may
bring more than a layer, unless a `GatherWarning` says so.
"""

import functools
import math
import warnings
from typing import Any

import jax
import models
import numpy as np
import pytest
import stack_programs
from layered_programs import LAYERED, TOLD, inputs
from test_gather_on_use import W, walk, wanted
from tolerances import BFLOAT16_OF_4, FLOAT32
from weight_programs import MESH, examples

import zerojax

SETTINGS: dict[str, dict[str, Any]] = {
    "stage 3": {"stage": 3},
    "stage 3, gathered ahead": {"stage": 3, "prefetch_bytes": 2**30},
    "stage 2": {"stage": 2},
    "secondary": {"stage": 3, "secondary": True},
}


def is_first_tier(name: str, setting: str) -> bool:
    """Every sixth program at stage 3, and every third at stage 2: the others take a minute to compile."""
    return list(LAYERED).index(name) % {"stage 2": 3, "stage 3": 6}.get(setting, len(LAYERED)) == 0


# Nothing is gathered at stage 2: what decides where is the same at each program of a kind.
CASES = [
    (name, setting) for name, fn in LAYERED.items() for setting in SETTINGS
    if setting != "stage 2" or fn.__module__ != stack_programs.__name__
]  # fmt: skip


@functools.cache
def results(setting: str, first_tier: bool = True) -> dict[str, Any]:
    """(value, gradient) of the programs of a tier, compiled as one; all of plain JAX without a setting."""
    params, x = inputs(), examples()
    if not setting:
        names = {name for name, setting in CASES if is_first_tier(name, setting) == first_tier}
        return jax.jit(lambda p: {name: wanted(LAYERED[name])(p) for name in names})(params)
    config = SETTINGS[setting]
    layout = models.make_layout(params, MESH, **config)
    failures: dict[str, Any] = {}

    def everything(p, x):
        out = {}
        for name, fn in LAYERED.items():
            if (name, setting) not in CASES or is_first_tier(name, setting) != first_tier:
                continue
            try:
                out[name] = zerojax.value_and_grad(fn, layout)(p, x)
            except Exception as error:  # one program's failure is that program's alone
                failures[name] = error
        return out

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", zerojax.GatherWarning)
        out = jax.jit(everything)(layout.shard(params), x)
    return {**{name: (loss, layout.unshard(grads)) for name, (loss, grads) in out.items()}, **failures}


@pytest.mark.parametrize(
    ("name", "setting"), [pytest.param(*case, marks=[] if is_first_tier(*case) else pytest.mark.aot) for case in CASES]
)
def test_layers_inside_other_control_flow_have_their_values_and_gradients(name, setting):
    got, want = results(setting, is_first_tier(name, setting))[name], results("", is_first_tier(name, setting))[name]
    if isinstance(got, Exception):
        raise got
    tolerance = BFLOAT16_OF_4 if "narrow" in name else FLOAT32
    np.testing.assert_allclose(got[0], want[0], rtol=tolerance, atol=tolerance)
    assert models.largest_error(got[1], want[1]) < tolerance


@pytest.mark.parametrize("name", LAYERED)
def test_no_stack_is_gathered_whole_in_silence(name):
    params = jax.eval_shape(inputs)
    layout = models.make_layout(params, MESH, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = jax.make_jaxpr(zerojax.value_and_grad(LAYERED[name], layout))(
            layout.param_shapes(), jax.eval_shape(examples)
        )
    said = [str(w.message) for w in caught if w.category is zerojax.GatherWarning]
    assert bool(said) == (name in TOLD), said
    # The last hop doubles what is held: the operand of a gather is at most half of what it brings.
    largest = max(math.prod(m.shape) for m in walk(traced.jaxpr, 0) if m.kind == "all_gather")
    assert largest <= W // 2 or said, f"a gather brings {2 * largest} elements, a layer has {W}"
