"""Small programs with every sort of communication, and the compiled texts of them kept beside this file.

`python tests/hlo/programs/build.py` compiles them ahead of time for 2 x 8 H100 with the JAX at hand and writes
`NAME.jax-VERSION.txt.gz`; the reader of programs is then tested on the texts of versions that are not installed.
"""

import functools
import gzip
import os
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

FOLDER = Path(__file__).parent
BOTH = ("local", "node")
NUM_LAYERS, BATCH, WIDTH = 6, 256, 1024


def shape(mesh: Mesh, dims: tuple[int, ...], dtype: str, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))


def compiled(
    mesh: Mesh, function: Callable, in_specs: tuple, out_specs: P, *arrays: tuple, options: dict | None = None
) -> jax.stages.Compiled:
    """Compiles a function that is manual over the whole mesh, for arrays given as (dims, dtype)."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    shapes = [shape(mesh, dims, dtype, spec) for (dims, dtype), spec in zip(arrays, in_specs, strict=True)]
    return jax.jit(mapped).lower(*shapes).compile(compiler_options=options)


def gather(weight: jax.Array, *axes: str) -> jax.Array:
    for axis in axes:
        weight = jax.lax.all_gather(weight, axis, axis=0, tiled=True)
    return weight


def layers(mesh: Mesh, rows: int = WIDTH, options: dict | None = None) -> jax.stages.Compiled:
    """Gradient of layers in a scan: gathered over "node", then "local"; recomputed and reduce-scattered backward."""

    def layer(x: jax.Array, shard: jax.Array) -> tuple[jax.Array, None]:
        weight = gather(shard, "node", "local")
        return jnp.tanh(x @ weight @ weight.T), None

    def loss(shards: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, shards)[0].astype(jnp.float32) ** 2)

    weights = (NUM_LAYERS, rows, WIDTH), "bfloat16"
    specs = P(None, BOTH), P()
    return compiled(mesh, jax.grad(loss), specs, P(None, BOTH), weights, ((BATCH, rows), "bfloat16"), options=options)


def nested(mesh: Mesh) -> jax.stages.Compiled:
    """A gather over "local" in a scan of 5 in a scan of 3, and a sum over "node" in a branch of the outer one."""

    def inner(x: jax.Array, shard: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ gather(shard, "local")), None

    def outer(x: jax.Array, shards: jax.Array) -> tuple[jax.Array, None]:
        x, _ = jax.lax.scan(inner, x, shards)
        return jax.lax.cond(x[0, 0] > 0, lambda x: jax.lax.psum(x, "node"), lambda x: x, x), None

    def function(shards: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(outer, x, shards)[0]

    weights = (3, 5, WIDTH, WIDTH), "bfloat16"
    return compiled(mesh, function, (P(None, None, "local"), P()), P(), weights, ((BATCH, WIDTH), "bfloat16"))


def kinds(mesh: Mesh) -> jax.stages.Compiled:
    """One collective of each kind, over one axis or both."""
    num_nodes = mesh.shape["node"]
    ring = [(node, (node + 1) % num_nodes) for node in range(num_nodes)]

    def function(a: jax.Array, b: jax.Array, c: jax.Array) -> tuple[jax.Array, ...]:
        return (
            jax.lax.psum(a, ("node", "local")),
            jax.lax.psum_scatter(a, "local", scatter_dimension=0, tiled=True),
            jax.lax.all_to_all(b, "local", 0, 0, tiled=True),
            jax.lax.ppermute(c, "node", ring),
            jax.lax.pmax(c, "node"),
            jax.lax.psum(c, "local"),
        )

    arrays = ((1024, 1024), "bfloat16"), ((64, 1024), "int8"), ((128,), "float32")
    return compiled(mesh, function, (P(), P(), P()), P(None), *arrays)


def combined(mesh: Mesh) -> jax.stages.Compiled:
    """Three gathers over the whole mesh, which the compiler makes one."""
    specs = (P(("node", "local")),) * 3

    def function(*shards: jax.Array) -> list[jax.Array]:
        return [jax.lax.all_gather(shard, ("node", "local"), axis=0, tiled=True) for shard in shards]

    arrays = ((64, 64), "bfloat16"), ((128, 64), "int8"), ((128,), "float32")
    return compiled(mesh, function, specs, P(), *arrays)


def annotated(mesh: Mesh) -> jax.stages.Compiled:
    """Layers in a scan by sharding annotations alone: the compiler places all collectives."""

    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ weight.astype(jnp.bfloat16)), None

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, weights)[0].astype(jnp.float32))

    def function(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(jax.grad(loss)(weights, x), NamedSharding(mesh, P(None, BOTH)))

    weights = shape(mesh, (NUM_LAYERS, WIDTH, WIDTH), "float32", P(None, BOTH))
    return jax.jit(function).lower(weights, shape(mesh, (2048, WIDTH), "bfloat16", P(BOTH))).compile()


PROGRAMS: dict[str, Callable[[Mesh], jax.stages.Compiled]] = {
    "layers": layers,
    "nested": nested,
    "kinds": kinds,
    "combined": combined,
    "annotated": annotated,
}


def saved() -> list[str]:
    """Names of the texts kept: "layers.jax-0.10.2", .."""
    return sorted(path.name.removesuffix(".txt.gz") for path in FOLDER.glob("*.txt.gz"))


@functools.cache
def text_of(name: str) -> str:
    """A kept text."""
    return gzip.decompress((FOLDER / f"{name}.txt.gz").read_bytes()).decode()


def main() -> None:
    from zerojax.planner.gpus import target_mesh

    mesh = target_mesh("h100", 2, 8)
    for name, build in PROGRAMS.items():
        text = build(mesh).as_text()
        assert text is not None
        text = re.sub(r'"[^"\n]*/([^"/\n]+\.py)"', r'"\1"', text)
        path = FOLDER / f"{name}.jax-{jax.__version__}.txt.gz"
        path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
