"""The README's training loops run as they are printed, and each pair of loops gives the same losses."""

import re
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from tolerances import FLOAT32

import zerojax

README = (Path(__file__).parents[1] / "README.md").read_text()
INPUTS, HIDDEN, CLASSES = 32, 1024, 8  # the first matrix has twice the elements from which leaves are sharded


def section(heading: str) -> str:
    return README.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def code(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def blocks(framework: str) -> list[str]:
    """The blocks between a bold name and the next."""
    after = section("From your loop to this one").split(f"\n**{framework}")[1]
    return code(after.split("\n**")[0])


def before(block: str) -> str:
    """The loop as it was: without the lines marked "new", with what "was" there."""
    kept = [line for line in block.splitlines() if not re.search(r"# new\s*$", line)]
    return "\n".join(re.sub(r"^(\s*\w+(?:, \w+)* = ).*?\s+# was: (.*)$", r"\1\2", line) for line in kept)


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits * models.ramp(CLASSES), batch["y"]).mean()


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(INPUTS, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.gelu(self.first(x) * models.ramp(HIDDEN)))


class NormalisedModel(NnxModel):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(INPUTS, rngs=rngs)

    def __call__(self, x):
        return super().__call__(self.norm(x))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(nn.gelu(nn.Dense(HIDDEN)(x) * models.ramp(HIDDEN)))


class EquinoxModel(eqx.Module):
    layers: list[Any]

    def __init__(self, key):
        first, last = jax.random.split(key)
        self.layers = [eqx.nn.Linear(INPUTS, HIDDEN, key=first), eqx.nn.Linear(HIDDEN, CLASSES, key=last)]

    def __call__(self, x):
        return self.layers[1](jax.nn.gelu(self.layers[0](x) * models.ramp(HIDDEN)))


def init(key):
    first, last = jax.random.split(key)
    return {"w": jax.random.normal(first, (INPUTS, HIDDEN)) / 6, "v": jax.random.normal(last, (HIDDEN, CLASSES)) / 32}


def plain_loss(params, batch):
    return cross_entropy(jax.nn.gelu(batch["x"] @ params["w"] * models.ramp(HIDDEN)) @ params["v"], batch)


LINEN = LinenModel()
THEIRS = {
    "Flax NNX": {"Model": NnxModel, "loss_fn": lambda model, b: cross_entropy(model(b["x"]), b)},
    "Flax Linen": {
        "model": LINEN, "loss_fn": lambda params, b: cross_entropy(LINEN.apply({"params": params}, b["x"]), b)
    },
    "Equinox": {"Model": EquinoxModel, "loss_fn": lambda model, b: cross_entropy(jax.vmap(model)(b["x"]), b)},
}  # fmt: skip


def names(**more) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    batches = [
        {"x": jnp.asarray(draw.normal(size=(16, INPUTS)), jnp.float32), "y": jnp.asarray(draw.integers(0, CLASSES, 16))}
        for _ in range(3)
    ]
    common = {"jax": jax, "optax": optax, "zerojax": zerojax, "nnx": nnx, "eqx": eqx, "train_state": train_state}
    return {**common, "batches": batches, **more}


@pytest.mark.parametrize("framework", THEIRS)
def test_both_loops_of_a_framework_give_the_same_losses(framework):
    (theirs,) = blocks(framework)
    (ours,) = blocks("All of them")
    here = names(**THEIRS[framework])
    exec(theirs, here)  # their loop, and their model as a pure function
    exec(ours, here)
    # The loss of the third step, after two updates.
    np.testing.assert_allclose(here["metrics"]["loss"], here["loss"], rtol=FLOAT32)
    large = [x for x in jax.tree.leaves(here["state"].params) if x.size > 2**14]
    assert large
    assert all(models.largest_shard(x) == x.nbytes // 8 for x in large)


@pytest.mark.filterwarnings("ignore::zerojax.ZeroNotice")
def test_batch_statistics_of_an_nnx_model_follow_its_own_loop():
    """On one device, where this device's examples are all examples."""
    (theirs,) = blocks("Flax NNX")
    (statistics,) = blocks("Batch statistics")
    here = names(**{**THEIRS["Flax NNX"], "Model": NormalisedModel})
    exec(theirs.split("# the same model")[0], here)
    want = nnx.state(here["model"], nnx.BatchStat)
    model, step = statistics.split("# and in the loop of all frameworks: step(state, batch, key)\n")
    (ours,) = blocks("All of them")
    exec(model, here)
    exec(ours.split("step =")[0].replace("make_mesh()", "make_mesh(1, 1, jax.devices()[:1])"), here)
    exec(step, here)
    state = here["state"]
    for batch in here["batches"]:
        state, metrics = here["step"](state, batch, here["key"])
    np.testing.assert_allclose(metrics["loss"], here["loss"], rtol=FLOAT32)
    assert models.largest_error(state.model_state, want) < FLOAT32
    assert not np.allclose(state.model_state["norm"]["mean"][...], 0)


def test_the_marked_loop_with_and_without_its_marks():
    (loop,) = code(section("What changes in a training loop"))
    run = names(key=jax.random.key(0), init_fn=init, loss_fn=plain_loss)
    marked, was = dict(run), dict(run)
    exec(loop, marked)
    plain = before(loop)
    assert "zerojax" not in plain
    assert len(loop.splitlines()) - len(plain.splitlines()) == 4  # new lines
    exec(plain, was)
    np.testing.assert_allclose(marked["loss"], was["loss"], rtol=FLOAT32)
    assert models.largest_error(marked["layout"].unshard(marked["params"]), was["params"]) < FLOAT32


def test_the_readme_is_short_and_every_file_it_links_to_exists():
    assert len(README.splitlines()) <= 250
    linked = re.findall(r"\]\(([^)#:]+)\)", README)
    assert linked
    assert not [path for path in linked if not (Path(__file__).parents[1] / path).exists()]
