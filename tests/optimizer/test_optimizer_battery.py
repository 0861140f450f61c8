"""Every transformation of optax and optax.contrib: sharded it is the unsharded one, or it is refused with a reason.

The loss is a sum of squares, so that its gradient costs no compilation to speak of; a matrix, a vector and a scalar
need padding on three devices, the vector on eight too. The steps that zerojax.value_and_grad makes, and the optimizer
alone, are in test_optimizers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import optax_factories as table
import pytest
from tolerances import FLOAT32, MUON

import zerojax

STEPS = 3
TOLERANCE = {"contrib.muon": MUON, "contrib.scale_by_muon": MUON}
# All on two axes at stage 3; those whose states are unlike each other also where the matrix is padded, and at stage 1.
UNLIKE = ("adamw", "adafactor", "lamb", "noisy_sgd", "flatten", "contrib.muon", "contrib.galore", "lookahead")
# So many share a compile.
GROUP = 12
NAMES = tuple(table.TRANSFORMATIONS)
GROUPS = [
    *((NAMES[i : i + GROUP], "2x4", 3) for i in range(0, len(NAMES), GROUP)),
    *((UNLIKE, "1x3", stage) for stage in (1, 3)),
]


compilations: list[float] = []


def count_compilation(event: str, seconds: float, **unused: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        compilations.append(seconds)


jax.monitoring.register_event_duration_secs_listener(count_compilation)


@functools.cache
def problem(name: str) -> tuple[Any, Any, Any]:
    """Parameters, the point where the loss is least, and the curvature there."""
    shapes = {"matrix": (5, 8), "vector": (7,), "scalar": ()}
    if name in table.NO_SCALARS:
        del shapes["scalar"]

    def draw(key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        return {n: jax.random.normal(k, s) for (n, s), k in zip(shapes.items(), keys, strict=False)}

    params, goal, curve = map(draw, jax.random.split(jax.random.key(5), 3))
    curve = jax.tree.map(lambda c: 0.5 + c * c, curve)
    if name == "lookahead":
        params, goal, curve = (optax.LookaheadParams.init_synced(x) for x in (params, goal, curve))
    return params, goal, curve


def loss_fn(params, goal, curve):
    if isinstance(params, optax.LookaheadParams):
        params, goal, curve = params.fast, goal.fast, curve.fast
    terms = jax.tree.map(lambda p, g, c: 0.5 * jnp.sum(c * (p - g) ** 2), params, goal, curve)
    return sum(jax.tree.leaves(terms))


def take_step(name, tx, params, state, data, logical):
    """One update; `logical` is what the loss is made of where the optimizer calls it."""
    value, grads = jax.value_and_grad(loss_fn)(params, *data)

    def again(p):
        return loss_fn(p, *logical)

    known = {"value": value, "grad": grads, "value_fn": again, "obj_fn": again}
    asked = table.ASK_FOR_THE_LOSS[name][1].split() if name in table.ASK_FOR_THE_LOSS else ()
    updates, state = optax.with_extra_args_support(tx).update(grads, state, params, **{k: known[k] for k in asked})
    return optax.apply_updates(params, updates), state


@functools.cache
def oracle(group):
    """Parameters and states after some steps on one device, by name."""
    made = {name: (table.TRANSFORMATIONS[name](), *problem(name)) for name in group}
    trained = {name: (params, tx.init(params)) for name, (tx, params, *_) in made.items()}
    data = {name: both for name, (_, _, *both) in made.items()}

    @jax.jit
    def step(trained, data):
        return {n: take_step(n, made[n][0], *trained[n], data[n], data[n]) for n in group}

    for _ in range(STEPS):
        trained = step(trained, data)
    return trained


def logical_part(x, like):
    return np.asarray(x)[tuple(slice(0, n) for n in like.shape)]


@pytest.mark.filterwarnings("ignore:.*(deprecated|Specifying a key)")
@pytest.mark.parametrize(("group", "mesh", "stage"), GROUPS, ids=lambda x: x[0] if isinstance(x, tuple) else None)
def test_sharded_equals_unsharded_in_one_compilation_with_shardings_that_stay(group, mesh, stage):
    layouts = {name: models.make_layout(problem(name)[0], mesh, stage) for name in group}
    transformations = {name: zerojax.zero(table.TRANSFORMATIONS[name](), layouts[name]) for name in group}
    trained, data, stored = {}, {}, {}
    for name in group:
        params, *data[name] = problem(name)
        sharded = layouts[name].shard(params)
        trained[name] = sharded, transformations[name].init(sharded)
        stored[name] = [layouts[name].shard(x) for x in data[name]]

    def forms(trained):
        return {n: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), x) for n, x in trained.items()}

    @jax.jit
    def step(trained, stored):
        return {n: take_step(n, transformations[n], *trained[n], stored[n], data[n]) for n in group}

    born, counted = forms(trained), [len(compilations)]
    for _ in range(STEPS):
        trained = step(trained, stored)
        counted.append(len(compilations))
    assert counted[0] < counted[1] == counted[-1], "the first step is compiled, no other"
    after = forms(trained)
    assert [name for name in group if after[name] != born[name]] == []
    wanted = oracle(group)
    errors = {}
    for name, (sharded, state) in trained.items():
        # No device holds a full matrix of the state.
        matrices = [x for x in jax.tree.leaves(state) if x.ndim >= 2 and 0 not in x.shape]
        assert all(models.largest_shard(x) < x.nbytes for x in matrices), name
        want, want_state = wanted[name]
        errors[name] = models.largest_error(jax.tree.map(logical_part, sharded, want), want)
        assert jax.tree.structure(state.inner) == jax.tree.structure(want_state), name
    assert {n: error for n, error in errors.items() if error >= TOLERANCE.get(n, FLOAT32)} == {}


@pytest.mark.filterwarnings("ignore:.*(deprecated|Specifying a key)")
@pytest.mark.parametrize("name", table.REFUSED)
def test_what_cannot_be_sharded_is_refused_with_the_reason(name):
    make, reason = table.REFUSED[name]
    params = problem(name)[0]
    layout = models.make_layout(params, "2x4", 3)
    tx = zerojax.zero(make(), layout)
    stored = layout.shard(params)
    with pytest.raises(ValueError, match=reason):
        tx.update(stored, tx.init(stored), stored)


def test_the_tables_name_every_factory_once():
    listed = [*table.TRANSFORMATIONS, *table.REFUSED, *table.NO_FACTORIES]
    assert len(listed) == len(set(listed))
    found = table.found_factories() | set(table.FACTORIES_OF_FACTORIES)
    assert not found - set(listed), "give each new one a line in optax_factories, with its arguments or a refusal"
    assert not set(listed) - found, "optax has these no more"
    assert len(table.TRANSFORMATIONS) > 100
