"""Are the default formats right outside of language? Gradient errors and short training of three other kinds of model.

    pip install scikit-learn
    python examples/beyond_text.py --seeds 3

- images: a convolutional network that classifies the 8 x 8 digits that come with scikit-learn;
- diffusion: a network that predicts the noise in noised digits, conditioned on the noise level (arXiv 2006.11239);
- audio: dilated causal convolutions (arXiv 1609.03499) that predict the next sample of plucked strings, synthesised
  here.

Each model is trained for a while on one device; then `zerojax.pilot` tries every technique alone on 2 nodes x 4
simulated devices: relative error of the mean gradient, raw and after Adam's preconditioner, and the relative difference
of the loss to the exact run from the same parameters with the same batches, as a mean over the seeds with its standard
error.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import zerojax

BATCH = 64
TECHNIQUES: dict[str, dict[str, Any]] = {
    "weights int8": {"quantize_weights": "int8"},
    "weights int4": {"quantize_weights": "int4"},
    "gradients int8, int4": {"quantize_gradients": ("int8", "int4")},
    "gradients int4 in both hops": {"quantize_gradients": "int4"},
    "ZeRO++ (default)": {"quantize_weights": "int8", "secondary": True, "quantize_gradients": ("int8", "int4")},
}


class Task(NamedTuple):
    """A model and its data.

    Attributes:
        init: from a key to parameters.
        loss: of parameters and a batch.
        batches: an endless iterator of batches, from a NumPy generator.
    """

    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    batches: Callable[[np.random.Generator], Iterator[Any]]


def _weights(key: jax.Array, shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    """Matrices and kernels (the last dim is that of the outputs) scaled by their number of inputs; biases of zero."""
    keys = jax.random.split(key, len(shapes))
    return {
        name: jnp.zeros(shape) if len(shape) == 1 else jax.random.normal(k, shape) * (2 / math.prod(shape[:-1])) ** 0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-not-found]
    except ModuleNotFoundError as error:
        raise SystemExit("the digits come with scikit-learn: pip install scikit-learn") from error
    found = load_digits()
    return (found.images / 8 - 1).astype(np.float32)[..., None], found.target.astype(np.int32)


def _conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def images() -> Task:
    """Classification of digits: two convolutions, a pooling, two dense layers."""
    pictures, labels = _digits()
    shapes = {
        "conv1": (3, 3, 1, 64), "b1": (64,), "conv2": (3, 3, 64, 128), "b2": (128,),
        "dense": (4 * 4 * 128, 128), "b3": (128,), "out": (128, 10), "b4": (10,),
    }  # fmt: skip

    def loss(p: Any, batch: Any) -> jax.Array:
        x = jax.nn.relu(_conv(batch["x"], p["conv1"]) + p["b1"])
        x = jax.nn.relu(_conv(x, p["conv2"]) + p["b2"])
        x = x.reshape(x.shape[0], 4, 2, 4, 2, 128).max(axis=(2, 4)).reshape(x.shape[0], -1)
        logits = jax.nn.relu(x @ p["dense"] + p["b3"]) @ p["out"] + p["b4"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def batches(rng: np.random.Generator) -> Iterator[Any]:
        while True:
            chosen = rng.integers(len(labels), size=BATCH)
            yield {"x": pictures[chosen], "y": labels[chosen]}

    return Task(lambda key: _weights(key, shapes), loss, batches)


def diffusion() -> Task:
    """Noise prediction on digits: a residual perceptron that is told the noise level by sines of it."""
    pictures, _ = _digits()
    width, waves = 256, 32
    shapes = {
        "in": (64, width), "time": (2 * waves, width), "up1": (width, width), "down1": (width, width),
        "up2": (width, width), "down2": (width, width), "out": (width, 64),
    }  # fmt: skip

    def loss(p: Any, batch: Any) -> jax.Array:
        angles = batch["level"][:, None] * jnp.exp(jnp.linspace(0, 5, waves))
        told = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1) @ p["time"]
        signal = jnp.cos(0.5 * jnp.pi * batch["level"])[:, None]
        noisy = signal * batch["x"] + jnp.sqrt(1 - signal**2) * batch["noise"]
        h = noisy @ p["in"] + told
        for up, down in (("up1", "down1"), ("up2", "down2")):
            h = h + jax.nn.silu(h @ p[up] + told) @ p[down]
        return jnp.mean((jax.nn.silu(h) @ p["out"] - batch["noise"]) ** 2)

    def batches(rng: np.random.Generator) -> Iterator[Any]:
        while True:
            x = pictures[rng.integers(len(pictures), size=BATCH)].reshape(BATCH, 64)
            noise, level = rng.normal(size=x.shape), rng.uniform(size=BATCH)
            yield {"x": x, "noise": noise.astype(np.float32), "level": level.astype(np.float32)}

    return Task(lambda key: _weights(key, shapes), loss, batches)


def audio() -> Task:
    """Prediction of the next sample: causal convolutions of two taps, dilated by 1 to 32, with gates."""
    width, layers, length = 64, 6, 128

    def init(key: jax.Array) -> Any:
        first, second, third, last = jax.random.split(key, 4)
        stacks = {"filter": (2 * width, width), "gate": (2 * width, width), "mix": (width, width)}
        every = [_weights(k, stacks) for k in jax.random.split(second, layers)]
        ends = _weights(first, {"in": (1, width)}) | _weights(third, {"hidden": (width, width)})
        return ends | _weights(last, {"out": (width, 1)}) | {"layers": every}

    def loss(p: Any, batch: Any) -> jax.Array:
        h = batch["x"][:, :-1, None] @ p["in"]
        skipped = jnp.zeros_like(h)
        for number, layer in enumerate(p["layers"]):
            past = jnp.pad(h, ((0, 0), (2**number, 0), (0, 0)))[:, : h.shape[1]]
            both = jnp.concatenate([past, h], axis=-1)
            new = (jnp.tanh(both @ layer["filter"]) * jax.nn.sigmoid(both @ layer["gate"])) @ layer["mix"]
            h, skipped = h + new, skipped + new
        found = jax.nn.relu(skipped @ p["hidden"]) @ p["out"]
        return jnp.mean((found[..., 0] - batch["x"][:, 1:]) ** 2)

    def batches(rng: np.random.Generator) -> Iterator[Any]:
        time, harmonics = np.arange(length) / 4000, np.arange(1, 6)
        while True:
            pitch, decay = rng.uniform(100, 400, size=(2, BATCH, 1, 1)) * [[[[1]]], [[[0.1]]]]
            phase, loud = rng.uniform(0, 2 * np.pi, size=(BATCH, 5, 1)), rng.exponential(size=(BATCH, 5, 1))
            angles = 2 * np.pi * pitch * harmonics[:, None] * time + phase
            sound = (loud / harmonics[:, None] * np.sin(angles) * np.exp(-decay * time)).sum(axis=1)
            yield {"x": (sound / np.abs(sound).max(axis=1, keepdims=True)).astype(np.float32)}

    return Task(init, loss, batches)


TASKS = {"images": images, "diffusion": diffusion, "audio": audio}


def partly_trained(task: Task, tx: optax.GradientTransformation, steps: int, seed: int) -> tuple[Any, Iterator[Any]]:
    """Parameters after some steps on one device, and the batches that follow."""
    batches = task.batches(np.random.default_rng(seed))
    params = jax.jit(task.init)(jax.random.key(seed))
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        updates, state = tx.update(jax.grad(task.loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state, next(batches))
    return params, batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    add("--seeds", type=int, default=3)
    add("--before", type=int, default=100, help="steps on one device before the trials")
    add("--steps", type=int, default=100, help="of each trial")
    flags = parser.parse_args()
    zerojax.simulate_devices(8)
    mesh, tx = zerojax.make_mesh(2, 4), optax.adamw(1e-3)
    print("| model | technique | gradient error: raw | preconditioned | difference of the loss |")
    print("|---|---|---|---|---|")
    for name in flags.tasks:
        task, found = TASKS[name](), {}
        for seed in range(flags.seeds):
            params, batches = partly_trained(task, tx, flags.before, seed)
            report = zerojax.pilot(
                task.loss, params, tx, batches, mesh=mesh, steps=flags.steps, techniques=TECHNIQUES, alone=True,
                config=zerojax.ZeroConfig(min_shard_size=1024, min_quantize_size=4096),
            )  # fmt: skip
            for trial in report.trials[1:]:
                assert trial.error is not None
                found.setdefault(trial.name, []).append((*trial.error, trial.loss_difference))
        for technique, rows in found.items():
            raw, preconditioned, difference = np.mean(rows, axis=0)
            error = np.std([row[2] for row in rows], ddof=1) / math.sqrt(len(rows)) if len(rows) > 1 else math.nan
            print(
                f"| {name} | {technique} | {raw:.4f} | {preconditioned:.4f} | {difference:+.2%} ± {error:.2%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
