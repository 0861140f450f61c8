"""How much of a gradient each technique and format loses, measured on the gradients of a partly trained model.

    python examples/gradient_error.py

trains the byte-level transformer on one device for a while, takes the gradients that 2 nodes x 4 simulated devices
would reduce, lets zerojax reduce them in every format, and compares with their mean; and takes the gradients at weights
that travel in every format, and compares with those of plain stage 3. Relative L2 errors over the quantised leaves,
raw, and after Adam's preconditioner 1 / (sqrt(v) + eps), which is what an Adam user feels. Both for the gradient of one
step (a mean over several batches) and for the sum over these batches, since what error feedback takes from one step it
gives back in the next.

Measured with JAX 0.12.0.1 on 2026-11-29. Weights are float32, so a plain gather has 32 bits:

| technique | bits on the wire (between nodes) | one step: raw | preconditioned | eight: raw | preconditioned |
|---|---|---|---|---|---|
| hpZ: secondary partition | 32 | 0 | 0 | 0 | 0 |
| **qwZ: weights int8, blocks of 256** (default) | 8.06 | 0.012 | 0.016 | 0.013 | 0.017 |
| qwZ: weights int4, blocks of 64, rotated by 32 | 4.25 | 0.247 | 0.331 | 0.277 | 0.388 |
| qwZ: weights int4, blocks of 64 | 4.25 | 0.203 | 0.265 | 0.233 | 0.292 |
| original scheme: symmetric 2^b/2, shape-sized blocks, int4 both hops | 4.25 | 0.138 | 0.207 | 0.078 | 0.118 |
| int8 inside; int8, blocks of 128 | 8.12 | 0.009 | 0.015 | 0.005 | 0.008 |
| int8 inside; int4, blocks of 128 | 4.12 | 0.114 | 0.190 | 0.060 | 0.108 |
| int8 inside; int4, blocks of 128, rotated by 32 | 4.12 | 0.107 | 0.168 | 0.056 | 0.093 |
| int8 inside; int4, blocks of 32 | 4.50 | 0.093 | 0.137 | 0.049 | 0.077 |
| int8 inside; int4, blocks of 64, e4m3 scales | 4.14 | 0.107 | 0.165 | 0.057 | 0.094 |
| **int8 inside; int4, blocks of 32, e4m3 scales** (default) | 4.27 | 0.097 | 0.143 | 0.052 | 0.081 |
| int8 inside; int4, blocks of 32, e4m3 scales, rotated by 32 | 4.27 | 0.097 | 0.130 | 0.051 | 0.072 |
| int8 inside; int4, blocks of 16, e4m3 scales | 4.52 | 0.086 | 0.121 | 0.046 | 0.068 |
| int8 inside; e2m1, blocks of 32, e4m3 scales | 4.27 | 0.099 | 0.116 | 0.052 | 0.064 |
| int8 inside; e2m1, blocks of 16, e4m3 scales | 4.52 | 0.094 | 0.107 | 0.049 | 0.060 |
| int8 inside; int4, blocks of 32, e4m3 scales, stochastic | 4.27 | 0.138 | 0.205 | 0.072 | 0.114 |
| int8 inside; int4, blocks of 32, e4m3 scales, error feedback | 4.27 | 0.134 | 0.197 | 0.018 | 0.030 |
| int8 inside; int4, blocks of 128, error feedback | 4.12 | 0.159 | 0.261 | 0.021 | 0.041 |
| int4, blocks of 32, e4m3 scales, inside; int8 between | 8.12 | 0.091 | 0.134 | 0.047 | 0.076 |
| int4, blocks of 32, e4m3 scales, both hops | 4.27 | 0.133 | 0.195 | 0.071 | 0.110 |

A secondary partition moves the same values by another route: not one bit differs. Rotation helps these gradients a
little and these weights not at all. Error feedback makes each step worse and the sum over steps three times better.
Stochastic rounding costs two fifths more in both.
"""

import argparse
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpt import GPTConfig, init_params, make_loss
from jax.sharding import NamedSharding, PartitionSpec
from quantized_variants import GRADIENT_VARIANTS, ORIGINAL, WEIGHT_VARIANTS, is_stacked, reduce_as_original
from stdlib_text import read_stdlib, sample_batch

import zerojax

CONFIG = GPTConfig(layers=2, d_model=128, heads=4, sequence=64, dtype=jnp.float32)
WINDOWS = 2  # in each device's part of a batch


class Trained(NamedTuple):
    """A partly trained model and what its next step would be made of."""

    params: Any
    moments: Any  # Adam's second moments
    batches: list[np.ndarray]
    grads: list[Any]  # for each batch the gradients of the eight devices, stacked on dim 0


def partly_trained(steps: int, num_batches: int, seed: int = 0) -> Trained:
    loss_fn, text, rng = make_loss(CONFIG), read_stdlib(), np.random.default_rng(seed)
    params = jax.jit(functools.partial(init_params, CONFIG))(jax.random.key(seed))
    tx = optax.adamw(1e-3)
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any]:
        updates, state = tx.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state, sample_batch(text.train, rng, 8 * WINDOWS, CONFIG.sequence))
    of_devices = jax.jit(jax.vmap(jax.grad(loss_fn), in_axes=(None, 0)))
    batches = [sample_batch(text.train, rng, 8 * WINDOWS, CONFIG.sequence) for _ in range(num_batches)]
    grads = [of_devices(params, b.reshape(8, WINDOWS, -1)) for b in batches]
    return Trained(params, optax.tree.get(state, "nu"), batches, grads)


def inner_product(params: Any, grads: Any) -> jax.Array:
    """A loss whose gradient on each device is what is given: the reduction is zerojax's own, layer by layer."""
    leaves = list(zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(grads), strict=True))
    stacks = [(p, g[0]) for (path, p), g in leaves if is_stacked(path)]
    rest = [(p, g[0]) for (path, p), g in leaves if not is_stacked(path)]

    def product(pairs: Any) -> jax.Array:
        return sum((jnp.vdot(p, g) for p, g in pairs), jnp.zeros(()))

    _, products = jax.lax.scan(lambda _, layer: (None, product(layer)), None, stacks)
    return product(rest) + products.sum()


def reduced_by_zerojax(params: Any, grads: list[Any], options: dict[str, Any]) -> tuple[list[Any], float]:
    """Mean gradients as zerojax reduces them step after step, and bits per element between nodes."""
    layout = _layout(params, stage=3, **options)
    stored, fn, means, carried = layout.shard(params), jax.jit(zerojax.value_and_grad(inner_product, layout)), [], {}
    if layout.config.error_feedback:
        carried["wire"] = zerojax.init_wire_state(layout)
    for g in grads:
        _, mean, *lost = fn(stored, _put(g, layout), **carried)
        carried = dict.fromkeys(carried, *lost)
        means.append(layout.unshard(mean))
    return means, bits_per_element(layout.config.quantize_gradients[1])  # type: ignore[index]


def at_weights_as_they_travel(trained: Trained, options: dict[str, Any]) -> tuple[list[Any], float]:
    """Mean gradients of stage 3 with a technique for weights, and bits per element of a gather."""
    layout = _layout(trained.params, stage=3, **options)
    stored, fn = layout.shard(trained.params), jax.jit(zerojax.value_and_grad(make_loss(CONFIG), layout))
    means = [layout.unshard(fn(stored, _put(b, layout))[1]) for b in trained.batches]
    return means, bits_per_element(layout.config.quantize_weights)


def bits_per_element(fmt: Any) -> float:
    """What an element and its share of the scales take on the wire.

    >>> bits_per_element(zerojax.QuantFormat(4, 32, "float8_e4m3fn"))
    4.265625
    """
    if fmt is None:
        return 8.0 * jnp.dtype(CONFIG.dtype).itemsize
    return fmt.bits_per_element


def reduced_as_original(params: Any, grads: list[Any]) -> list[Any]:
    """Mean gradients as the original system's scheme gives them."""
    layout = _layout(params, stage=0)
    data = PartitionSpec(layout.config.axes)
    fn = jax.jit(jax.shard_map(
        lambda g: reduce_as_original(jax.tree.map(lambda x: x[0], g), layout),
        mesh=layout.mesh, in_specs=data, out_specs=PartitionSpec(), check_vma=False,
    ))  # fmt: skip
    return [fn(_put(g, layout)) for g in grads]


def means_of(grads: list[Any]) -> list[Any]:
    """The exact means over the devices."""
    return [jax.tree.map(lambda g: np.asarray(g, np.float64).mean(axis=0), each) for each in grads]


def relative_errors(got: Any, exact: Any, moments: Any) -> tuple[float, float]:
    """Relative L2 error over the quantised leaves: raw, and after Adam's preconditioner."""
    wrong, right = np.zeros(2), np.zeros(2)
    tree = jax.tree_util.tree_leaves_with_path(got)
    for (path, g), mean, v in zip(tree, jax.tree.leaves(exact), jax.tree.leaves(moments), strict=True):
        if g.size // (g.shape[0] if is_stacked(path) else 1) < zerojax.ZeroConfig().min_quantize_size:
            continue
        error = np.asarray(g, np.float64) - np.asarray(mean, np.float64)
        for i, weight in enumerate((1.0, 1 / (np.sqrt(np.asarray(v, np.float64)) + 1e-8))):
            wrong[i] += np.sum((error * weight) ** 2)
            right[i] += np.sum((mean * weight) ** 2)
    raw, preconditioned = np.sqrt(wrong / right)
    return float(raw), float(preconditioned)


def errors_of(got: list[Any], exact: list[Any], moments: Any) -> tuple[float, ...]:
    """Relative errors of one step (raw, preconditioned; means over the steps), then of the sum over the steps."""
    one = np.mean([relative_errors(g, e, moments) for g, e in zip(got, exact, strict=True)], axis=0)
    sums = [jax.tree.map(lambda *xs: sum(np.asarray(x, np.float64) for x in xs), *steps) for steps in (got, exact)]
    return (*map(float, one), *relative_errors(sums[0], sums[1], moments))


def _layout(params: Any, **options: Any) -> zerojax.Layout:
    return zerojax.partition(params, zerojax.make_mesh(2, 4), zerojax.ZeroConfig(**options))


def _put(grads: Any, layout: zerojax.Layout) -> Any:
    return jax.device_put(grads, NamedSharding(layout.mesh, PartitionSpec(layout.config.axes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="of training before the gradients are taken")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of gradient_error.json")
    flags = parser.parse_args()
    zerojax.simulate_devices(8)
    trained, rows = partly_trained(flags.steps, flags.batches), []

    def add(name: str, got: list[Any], bits: float, exact: list[Any]) -> None:
        errors = errors_of(got, exact, trained.moments)
        names = ("raw", "preconditioned", "raw of the sum", "preconditioned of the sum")
        rows.append({"format": name, "bits": bits, **dict(zip(names, errors, strict=True))})
        cells = [name, f"{bits:.2f}", *("0" if e == 0 else f"{e:.3f}" for e in errors)]
        print("| " + " | ".join(cells), "|", flush=True)

    print(f"| technique | bits | raw | preconditioned | sum of {flags.batches}: raw | preconditioned |")
    print("|---|---|---|---|---|---|")
    stage_3, _ = at_weights_as_they_travel(trained, {})
    for name, options in WEIGHT_VARIANTS.items():
        add(name, *at_weights_as_they_travel(trained, options), stage_3)
    means = means_of(trained.grads)
    add(ORIGINAL, reduced_as_original(trained.params, trained.grads), 4 + 32 / CONFIG.d_model, means)
    for name, options in GRADIENT_VARIANTS.items():
        add(name, *reduced_by_zerojax(trained.params, trained.grads, options), means)
    flags.out.mkdir(parents=True, exist_ok=True)
    record = {"steps": flags.steps, "batches": flags.batches, "jax": jax.__version__, "rows": rows}
    (flags.out / "gradient_error.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
