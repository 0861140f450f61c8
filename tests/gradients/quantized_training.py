"""A small model under quantised movement, and what its gradients must be; shared by the tests of ZeRO++.

One compiled program gives loss and gradient of each example at any weights. The loss being a mean over examples, all
else follows from them: the exact gradient, what each device or microbatch contributes, and so the bound of a reduction.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from quantization_bounds import as_gathered, reduction_bound
from tolerances import FLOAT32_QUANTIZED

import zerojax

BATCH = 24
PAIR = {"quantize_gradients": ("int8", "int4")}
EVERYTHING = {"quantize_weights": "int8", "secondary": True, **PAIR, "min_quantize_size": 0}
# These programs take seconds to compile and milliseconds to run.


@functools.cache
def example(dtype: str = "float32") -> tuple[Any, Any]:
    """Parameters and a batch of the transformer."""
    params = jax.jit(functools.partial(models.transformer_init, dtype=jnp.dtype(dtype)))(jax.random.key(1))
    return params, models.token_batches(1, BATCH)[0]


def layout_of(mesh: str, stage: int = 3, **options: Any) -> zerojax.Layout:
    """A layout of the transformer in which every matrix travels quantised where a technique quantises."""
    params, _ = example(options.pop("dtype", "float32"))
    return models.make_layout(params, mesh, stage, **{"min_quantize_size": 0, **options})


def whole(tree: Any, layout: zerojax.Layout) -> list[Any]:
    """The logical values of each leaf of a parameter-like tree in stored form; None stays."""
    return [
        None if x is None else np.asarray(x)[tuple(map(slice, p.shape))]
        for x, p in zip(layout.leaves_of(tree), layout.leaves, strict=True)
    ]


_of_examples = jax.jit(jax.vmap(jax.value_and_grad(models.transformer_loss), in_axes=(None, 0)))


def of_examples(params: Any, count: int = BATCH) -> tuple[float, Any]:
    """The loss of the first so many examples, and the gradients of each, stacked, float64."""
    _, batch = example()
    losses, grads = _of_examples(params, jax.tree.map(lambda x: x[:, None], batch))
    return float(np.asarray(losses, np.float64)[:count].mean()), jax.tree.map(
        lambda g: np.asarray(g, np.float64)[:count], grads
    )


@functools.cache
def weights_as_gathered(mesh: str, fmt: zerojax.QuantFormat) -> Any:
    """The parameters as every device sees them; a stack that is scanned over is gathered layer by layer."""
    params, _ = example()
    placements = layout_of(mesh).placements

    def one(path: Any, x: jax.Array, placement: zerojax.Placement) -> jax.Array:
        if "layers" not in jax.tree_util.keystr(path):
            return as_gathered(x, placement, fmt)
        return jax.lax.map(lambda part: as_gathered(part, placement.without_leading_dim(), fmt), x)

    return jax.jit(lambda tree: jax.tree_util.tree_map_with_path(one, tree, placements))(params)


def check_exact(got: Any, grads: Any, layout: zerojax.Layout) -> None:
    """Gradients that must equal the mean over the examples but for the order of sums."""
    assert models.largest_error(whole(got, layout), jax.tree.leaves(means(grads))) < FLOAT32_QUANTIZED


def means(grads: Any) -> Any:
    """Exact gradients of the mean over the examples."""
    return jax.tree.map(lambda g: g.mean(axis=0), grads)


def check_within_bounds(got: Any, grads: Any, layout: zerojax.Layout, microbatches: int = 1) -> None:
    """Every leaf within the bound of its reductions, and the quantised ones not exact; None where nothing is trained.

    Each microbatch is reduced by itself: the bound of a sum is the sum of the bounds of its parts.
    """
    nodes, local = (layout.mesh.shape[axis] for axis in layout.config.axes)
    formats: Any = layout.config.quantize_gradients
    inexact = 0
    for g, of_each, p in zip(whole(got, layout), jax.tree.leaves(grads), layout.leaves, strict=True):
        assert (g is None) == (not p.trainable), p.path
        if g is None:
            continue
        count, *shape = of_each.shape
        # Device by device, in it microbatch by microbatch.
        parts = of_each.reshape(layout.num_shards, microbatches, count // layout.num_shards // microbatches, *shape)
        parts = parts.sum(axis=2) / count
        error = np.abs(g - of_each.mean(axis=0)).max(initial=0.0)
        exact = FLOAT32_QUANTIZED * np.abs(of_each.mean(axis=0)).max(initial=0.0)
        quantized = p.is_quantized and len(shape) - ("layers" in p.path) >= 2  # a stack of vectors is no matrix
        bounds = [reduction_bound(parts[:, i], nodes, local, formats) for i in range(microbatches)]
        assert error <= (sum(bounds) if quantized else 0.0) + exact, (p.path, error, bounds)
        inexact += error > exact
    assert inexact >= 4


def check_spoilt_everywhere(got: Any, layout: zerojax.Layout) -> None:
    """Every device sees in all of its part of every leaf that one device's gradient was not finite."""
    for g, logical, p in zip(layout.leaves_of(got), whole(got, layout), layout.leaves, strict=True):
        for part in [logical] if p.padding else models.values_on_devices(g):
            assert not np.isfinite(part).any(), p.path


def check_loss(got: float, want: float) -> None:
    """The mean of a few hundred float32 terms in another order."""
    assert got == pytest.approx(want, rel=FLOAT32_QUANTIZED)
