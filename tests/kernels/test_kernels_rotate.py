"""Rotations in the kernels: the network of butterflies against the reference, thread by thread."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_formats import assert_same_bits, quick

from pallas_kernels import reference
from pallas_kernels.mosaic import rotate
from pallas_kernels.mosaic.layout import layout, split_threads

# Dims of a part, consecutive elements, parts, rotated block, width: what plans of the kernels come to.
CASES = [
    ((32, 128), 8, 1, 128, 32),
    ((16, 64), 4, 2, 128, 64),
    ((64, 32), 8, 2, 64, 32),
    ((4, 1024), 8, 2, 2048, 32),
    ((4, 32, 16), 8, 2, 32, 32),
    ((2, 8, 4, 16), 8, 2, 128, 32),
    ((8, 8, 4, 16), 16, 2, 128, 64),
]


@pytest.mark.parametrize(("dims", "vec", "num_parts", "block", "width"), CASES)
def test_the_network_equals_the_reference(dims, vec, num_parts, block, width, rng):
    plan = rotate.stages(dims, vec, num_parts, block, width)
    assert plan is not None
    parts = [jnp.asarray(rng.standard_normal(dims), jnp.float32) for _ in range(num_parts)]

    def both(parts):
        rows = jnp.concatenate(parts, axis=-1)
        wanted = reference.rotate(rows.reshape(-1, block), width, 1 / 3).reshape(rows.shape)
        got = rotate.rotate_parts(parts, dims, vec, plan, 1 / 3, before_addition=True, interpret=True)
        return wanted, jnp.concatenate(got, axis=-1)

    assert_same_bits(*quick(both)(parts))


@pytest.mark.parametrize(("dims", "vec"), sorted({case[:2] for case in CASES}))
def test_arrays_are_cut_as_the_compilers_layout_cuts_them(dims, vec):
    """Which thread and register holds an element, from the layout that the compiler is given."""
    tiled = layout(dims, vec).to_mgpu()
    rank, index = len(dims), np.arange(np.prod(dims)).reshape(dims)
    for tile in tiled.tiling.tiles:
        *_, = tile
        kept = index.shape[: index.ndim - len(tile)]
        split = [n for size, t in zip(index.shape[len(kept) :], tile, strict=True) for n in (size // t, t)]
        axes = [len(kept) + 2 * i + k for k in (0, 1) for i in range(len(tile))]
        index = index.reshape(*kept, *split).transpose(*range(len(kept)), *axes)
    threads = [*tiled.warp_dims, *tiled.lane_dims]
    rest = [d for d in range(-index.ndim, 0) if d not in threads and d != tiled.vector_dim]
    ordered = index.transpose(*(d % index.ndim for d in (*rest, tiled.vector_dim, *threads)))
    cut = np.asarray(rotate.to_threads(jnp.arange(np.prod(dims)).reshape(dims), vec))
    assert cut.ndim == rank + 2
    np.testing.assert_array_equal(ordered.reshape(cut.shape), cut)
    back = rotate.from_threads(jnp.asarray(cut), dims, vec)
    np.testing.assert_array_equal(np.asarray(back), np.arange(np.prod(dims)).reshape(dims))


@pytest.mark.parametrize(("dims", "vec", "num_parts", "block", "width"), CASES)
def test_stages_stay_within_a_thread_or_a_warp(dims, vec, num_parts, block, width):
    plan = rotate.stages(dims, vec, num_parts, block, width)
    assert plan is not None
    assert len(plan) == np.log2(width)
    assert all(stage.distance < 32 for stage in plan if stage.axis is None)


def test_a_rotation_across_warps_has_no_stages():
    warps, _ = split_threads((2, 1024), 8)
    assert warps[-1] > 1
    assert rotate.stages((2, 1024), 8, 1, 1024, 64) is None
    assert functools.partial(rotate.stages, (4, 1024), 8, 1, 1024)(64) is not None
