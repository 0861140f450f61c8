"""Small models for the tests, asymmetric on purpose, and plain optax training on one device as the oracle.

A network whose hidden units can be permuted trains as well on a weight that came back from its shards with its rows in
another order: only a fixed ramp over the units (`ramp`) makes the values depend on the order. Extents are such that
every leaf needs padding on some mesh: 37 tokens, a (7, 5) leaf, a scalar, an empty leaf, a stack of three layers.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax

LAYERS, WIDTH, TOKENS, LENGTH, OUTPUTS = 3, 16, 37, 5, 7
BATCH = 168  # the least common multiple of 1, 2, 3, 6, 7 and 8 devices

MESHES = {"1x1": (1, 1), "2x2": (2, 2), "1x3": (1, 3), "2x4": (2, 4), "4x2": (4, 2), "3x2": (3, 2), "1x7": (1, 7)}


def make_mesh(name: str, **kinds: Any) -> jax.sharding.Mesh:
    """A mesh of MESHES, or "data": one axis of eight devices."""
    if name == "data":
        return jax.make_mesh((8,), ("data",), axis_types=(kinds.get("axis_types", jax.sharding.AxisType.Auto),))
    nodes, local = MESHES[name]
    return zerojax.make_mesh(nodes, local, devices=jax.devices()[: nodes * local], **kinds)


def make_layout(params: Any, mesh_name: str, stage: int, **options: Any) -> zerojax.Layout:
    """A layout in which even the smallest leaf that can be is sharded."""
    partition_options = {k: options.pop(k) for k in ("trainable", "specs") if k in options}
    kinds = {k: options.pop(k) for k in ("axis_types",) if k in options}
    axes = ("data",) if mesh_name == "data" else ("node", "local")
    config = zerojax.ZeroConfig(stage=stage, axes=axes, **{"min_shard_size": 0, **options})  # type: ignore[arg-type]
    return zerojax.partition(params, make_mesh(mesh_name, **kinds), config, **partition_options)


def ramp(extent: int, dtype: Any = jnp.float32) -> jax.Array:
    """A different fixed factor for each unit."""
    return (1 + 0.5 * jnp.sin(jnp.arange(extent))).astype(dtype)


def on_host(init: Callable[..., Any]) -> Callable[..., Any]:
    """An initialiser whose concrete results are NumPy arrays, made by one program: cutting them compiles nothing."""
    compiled = jax.jit(init, static_argnums=1)

    @functools.wraps(init)
    def made(key: jax.Array, dtype: Any = jnp.float32) -> Any:
        return init(key, dtype) if isinstance(key, jax.core.Tracer) else jax.device_get(compiled(key, dtype))

    return made


@on_host
def transformer_init(key: jax.Array, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Parameters of a scanned transformer with tied embedding, an untied odd head, a scalar and an empty leaf."""
    keys = iter(jax.random.split(key, 8))

    def normal(*shape: int) -> jax.Array:
        return (jax.random.normal(next(keys), shape) / np.sqrt(shape[-2])).astype(dtype)

    layers = {
        "qkv": normal(LAYERS, WIDTH, 3 * WIDTH),
        "out": normal(LAYERS, WIDTH, WIDTH),
        "up": normal(LAYERS, WIDTH, 4 * WIDTH),
        "bias": jnp.full((LAYERS, 4 * WIDTH), 0.1, dtype),
        "down": normal(LAYERS, 4 * WIDTH, WIDTH),
        "scale": jnp.ones((LAYERS, WIDTH), dtype),
    }
    head = (normal(WIDTH, OUTPUTS), [normal(OUTPUTS, LENGTH), jnp.zeros((0, 4), dtype)])
    return {"embed": normal(TOKENS, WIDTH) * 2, "head": head, "layers": layers, "temperature": jnp.ones((), dtype)}


def transformer_shapes(layers: int, width: int, tokens: int) -> dict[str, Any]:
    """The same of other sizes, without biases, head and temperature: shapes in float32, to be compiled."""
    extents = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    stack = {name: (layers, *extent) for name, extent in extents.items()}
    tree = {"embed": (tokens, width), "layers": {**stack, "scale": (layers, width)}}
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), tree, is_leaf=lambda x: isinstance(x, tuple))


def attention(x: jax.Array, qkv: jax.Array) -> jax.Array:
    """Causal attention of one head on (batch, length, width), softmax in float32."""
    q, k, v = jnp.split(x @ qkv, 3, axis=-1)
    scores = jnp.einsum("btd,bsd->bts", q, k) / math.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tri(x.shape[-2], dtype=bool), scores, -1e4)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores.astype(jnp.float32)).astype(v.dtype), v)


def transformer_loss(
    params: Any, batch: Any, *, compute: Any = jnp.float32, remat: bool = False, constrain: Any = lambda x: x
) -> jax.Array:
    """Cross entropy of the tied embedding plus, where there is one, a term of the odd head; float32 scalar.

    `constrain` is applied to the activations between layers.
    """
    width = params["embed"].shape[-1]

    def cast(x: jax.Array) -> jax.Array:
        return x.astype(compute)

    def layer(h: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        h = h + attention(h * cast(p["scale"]) * ramp(width, compute), cast(p["qkv"])) @ cast(p["out"])
        up = h @ cast(p["up"])
        hidden = jax.nn.gelu(up + cast(p["bias"]) if "bias" in p else up) * ramp(4 * width, compute)
        return constrain(h + hidden @ cast(p["down"]) * 0.3), None

    x = constrain(cast(params["embed"])[batch["x"]] * ramp(width, compute))
    x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False) if remat else layer, x, params["layers"])
    logits = (x @ cast(params["embed"]).T).astype(jnp.float32)
    if "temperature" in params:
        logits = logits * params["temperature"].astype(jnp.float32)
    loss = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][..., None], axis=-1))
    if "head" in params:
        first, (second, empty) = params["head"]
        odd = (jnp.tanh(x @ cast(first)) * ramp(OUTPUTS, compute)) @ cast(second)
        loss += jnp.mean((odd.astype(jnp.float32) - ramp(LENGTH)) ** 2) + jnp.sum(empty)
    return loss


def token_batches(count: int, size: int = BATCH) -> list[dict[str, jax.Array]]:
    """Batches of token sequences, every step another one."""
    draw = np.random.default_rng(7)
    shape = (count, 2, size, LENGTH)
    tokens = draw.integers(0, TOKENS, shape).astype(np.int32)
    return [{"x": jnp.asarray(x), "y": jnp.asarray(y)} for x, y in tokens]


@on_host
def dense_init(key: jax.Array, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Parameters of a small scanned perceptron: three dims, two dims, one dim, one scalar."""
    keys = jax.random.split(key, 3)
    tree = {
        "first": jax.random.normal(keys[0], (9, 24)) / 3,
        "stack": {"w": jax.random.normal(keys[1], (2, 24, 24)) / 5, "b": jnp.full((2, 24), 0.1)},
        "last": jax.random.normal(keys[2], (24, 5)) / 5,
        "gain": jnp.ones(()),
    }
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def dense_loss(params: Any, batch: Any) -> jax.Array:
    """Mean squared error of the perceptron."""

    def layer(h: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ p["w"] + p["b"]) * ramp(24), None

    h, _ = jax.lax.scan(layer, batch["x"] @ params["first"], params["stack"])
    return jnp.mean((h @ params["last"] * params["gain"] - batch["y"]) ** 2)


def dense_batches(count: int, size: int = BATCH) -> list[dict[str, jax.Array]]:
    """Batches of the perceptron."""
    draw = np.random.default_rng(11)
    return [
        {"x": jnp.asarray(draw.normal(size=(size, 9)), jnp.float32),
         "y": jnp.asarray(draw.normal(size=(size, 5)), jnp.float32)}
        for _ in range(count)
    ]  # fmt: skip


def train_plain(loss_fn: Any, tx: optax.GradientTransformation, params: Any, batches: list[Any]) -> Any:
    """The oracle: optax on one device. Returns params, state, losses and gradient norms."""

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.global_norm(grads)

    state, losses, norms = tx.init(params), [], []
    for batch in batches:
        params, state, loss, norm = step(params, state, batch)
        losses.append(float(loss))
        norms.append(float(norm))
    return params, state, losses, norms


def largest_error(got: Any, want: Any) -> float:
    """The largest difference in any leaf, relative to that leaf's largest value."""
    errors = [0.0]
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, (jax.tree_util.keystr(path), a.shape, b.shape)
        if b.size:
            errors.append(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)))
            assert not np.isnan(errors[-1]), jax.tree_util.keystr(path)
    return max(errors)


def values_on_devices(x: jax.Array) -> list[np.ndarray]:
    """What each device holds of an array."""
    return [np.asarray(shard.data) for shard in x.addressable_shards]


def largest_shard(x: jax.Array) -> int:
    """Bytes of the largest part of an array on any device."""
    return max(shard.data.nbytes for shard in x.addressable_shards)
