"""How much of a gradient each format loses, measured on the gradients of a partly trained model.

    python examples/gradient_error.py

trains the byte-level transformer on one device for a while, takes the gradients that 2 nodes x 4 simulated devices
would reduce, lets zerojax reduce them in every format, and compares with their mean. Relative L2 errors over the
quantised leaves: raw, and after Adam's preconditioner 1 / (sqrt(v) + eps), which is what an Adam user feels. Numbers
are means over several batches.
"""

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpt import GPTConfig, init_params, make_loss
from jax.sharding import NamedSharding, PartitionSpec
from quantized_variants import GRADIENT_VARIANTS, ORIGINAL, is_stacked, reduce_as_original
from simulated import simulate_devices
from stdlib_text import read_stdlib, sample_batch

import zerojax

CONFIG = GPTConfig(layers=2, d_model=128, heads=4, sequence=64, dtype=jnp.float32)
WINDOWS = 2  # in each device's part of a batch


def partly_trained(steps: int, num_batches: int, seed: int = 0) -> tuple[Any, Any, list[Any]]:
    """Parameters, Adam's second moments, and for each batch the gradients of the eight devices, stacked on dim 0."""
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
    return params, optax.tree.get(state, "nu"), grads


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
    """Mean gradients as zerojax reduces them, and bits per element between nodes."""
    layout = _layout(params, stage=3, **options)
    stored, fn = layout.shard(params), jax.jit(zerojax.value_and_grad(inner_product, layout))
    means = [layout.unshard(fn(stored, _put(g, layout))[1]) for g in grads]
    between: Any = layout.config.quantize_gradients[1]  # type: ignore[index]
    tile = 16 / 1024 if between.scale_dtype != "bfloat16" else 0.0
    return means, between.bits + (8 if tile else 16) / between.block_size + tile


def reduced_as_original(params: Any, grads: list[Any]) -> list[Any]:
    """Mean gradients as the original system's scheme gives them."""
    layout = _layout(params, stage=0)
    data = PartitionSpec(layout.config.axes)
    fn = jax.jit(jax.shard_map(
        lambda g: reduce_as_original(jax.tree.map(lambda x: x[0], g), layout),
        mesh=layout.mesh, in_specs=data, out_specs=PartitionSpec(), check_vma=False,
    ))  # fmt: skip
    return [fn(_put(g, layout)) for g in grads]


def relative_errors(got: Any, grads: Any, moments: Any) -> tuple[float, float]:
    """Relative L2 error over the quantised leaves: raw, and after Adam's preconditioner."""
    wrong, right = np.zeros(2), np.zeros(2)
    tree = jax.tree_util.tree_leaves_with_path(got)
    for (path, g), all_g, v in zip(tree, jax.tree.leaves(grads), jax.tree.leaves(moments), strict=True):
        if g.size // (g.shape[0] if is_stacked(path) else 1) < zerojax.ZeroConfig().min_quantize_size:
            continue
        mean = np.asarray(all_g, np.float64).mean(axis=0)
        for i, weight in enumerate((1.0, 1 / (np.sqrt(np.asarray(v, np.float64)) + 1e-8))):
            wrong[i] += np.sum(((np.asarray(g, np.float64) - mean) * weight) ** 2)
            right[i] += np.sum((mean * weight) ** 2)
    raw, preconditioned = np.sqrt(wrong / right)
    return float(raw), float(preconditioned)


def _layout(params: Any, **options: Any) -> zerojax.Layout:
    return zerojax.partition(params, zerojax.make_mesh(2, 4), zerojax.ZeroConfig(**options))


def _put(grads: Any, layout: zerojax.Layout) -> Any:
    return jax.device_put(grads, NamedSharding(layout.mesh, PartitionSpec(layout.config.axes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="of training before the gradients are taken")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of gradient_error.json")
    flags = parser.parse_args()
    simulate_devices(8)
    params, moments, grads = partly_trained(flags.steps, flags.batches)
    rows = []

    def add(name: str, means: list[Any], bits: float) -> None:
        errors = np.mean([relative_errors(m, g, moments) for m, g in zip(means, grads, strict=True)], axis=0)
        rows.append({"format": name, "bits": bits, "raw": errors[0], "preconditioned": errors[1]})
        print(f"| {name} | {bits:.2f} | {errors[0]:.3f} | {errors[1]:.3f} |", flush=True)

    print("| gradient reduction | bits per element between nodes | raw error | after Adam's preconditioner |")
    print("|---|---|---|---|")
    add(ORIGINAL, reduced_as_original(params, grads), 4 + 32 / CONFIG.d_model)
    for name, options in GRADIENT_VARIANTS.items():
        add(name, *reduced_by_zerojax(params, grads, options))
    flags.out.mkdir(parents=True, exist_ok=True)
    (flags.out / "gradient_error.json").write_text(json.dumps({"steps": flags.steps, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
