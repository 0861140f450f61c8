"""A byte-level decoder-only transformer in Flax NNX; nothing in it knows of devices or of zerojax.

The blocks are one module whose parameters are stacked on dim 0, run by ``nnx.scan``: one layer is compiled, and one
layer's parameters are in use at a time.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of the model; ``param_dtype`` is what is stored, ``dtype`` what the matrix products run in."""

    vocabulary: int = 256
    layers: int = 4
    d_model: int = 128
    heads: int = 4
    sequence: int = 128
    dropout: float = 0.0
    remat: bool = False
    dtype: Any = jnp.bfloat16
    param_dtype: Any = jnp.float32


class Block(nnx.Module):
    """Pre-norm attention and feed-forward, on activations of shape (batch, sequence, d_model)."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        width, types = config.d_model, {"dtype": config.dtype, "param_dtype": config.param_dtype}
        self.heads = config.heads
        self.attention_norm = nnx.RMSNorm(width, **types, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, **types, rngs=rngs)
        self.projection = nnx.Linear(width, width, use_bias=False, **types, rngs=rngs)
        self.feedforward_norm = nnx.RMSNorm(width, **types, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, **types, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, **types, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        keys = (None, None) if key is None else jax.random.split(key)
        batch, sequence, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).reshape(batch, sequence, 3, self.heads, width // self.heads)
        attended = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x = x + self._drop(self.projection(attended.reshape(x.shape)), keys[0])
        return x + self._drop(self.down(jax.nn.gelu(self.up(self.feedforward_norm(x)))), keys[1])

    def _drop(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        return self.dropout(x, deterministic=key is None, rngs=key)


class GPT(nnx.Module):
    """Bytes (batch, sequence) to float32 logits (batch, sequence, vocabulary); the embedding is tied to the output."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        types = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        narrow = nnx.initializers.normal(0.02)
        self.tokens = nnx.Embed(config.vocabulary, config.d_model, embedding_init=narrow, **types, rngs=rngs)
        self.positions = nnx.Embed(config.sequence, config.d_model, embedding_init=narrow, **types, rngs=rngs)
        self.blocks = _make_blocks(config, rngs)
        self.norm = nnx.RMSNorm(config.d_model, **types, rngs=rngs)

    def __call__(self, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """``key`` turns dropout on."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        keys = None if key is None else jax.random.split(key, self.config.layers)
        x = _run_blocks(self.blocks, x, keys, remat=self.config.remat)
        return self.tokens.attend(self.norm(x)).astype(jnp.float32)


def _make_blocks(config: GPTConfig, rngs: nnx.Rngs) -> Block:
    @nnx.split_rngs(splits=config.layers)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs: nnx.Rngs) -> Block:
        return Block(config, rngs=rngs)

    return make(rngs)


def _run_blocks(blocks: Block, x: jax.Array, keys: jax.Array | None, *, remat: bool) -> jax.Array:
    def run_one(x: jax.Array, block: Block, key: jax.Array | None) -> jax.Array:
        return block(x, key)

    body = nnx.remat(run_one) if remat else run_one
    keys_axis = None if keys is None else 0
    return nnx.scan(body, in_axes=(nnx.Carry, 0, keys_axis), out_axes=nnx.Carry)(x, blocks, keys)


def split_model(config: GPTConfig) -> tuple[nnx.GraphDef, Any]:
    """The model's structure and the shapes of its parameters; nothing is allocated."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))), nnx.Param)
    return graph, shapes


def init_params(config: GPTConfig, key: jax.Array) -> Any:
    """The parameters as a pytree (``nnx.State``): the pure function that ``layout.init`` runs."""
    return nnx.split(GPT(config, rngs=nnx.Rngs(key)), nnx.Param)[1]


def loss_fn(graph: nnx.GraphDef, params: Any, batch: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Mean cross entropy in nats per byte; ``batch`` is (batch, sequence + 1) bytes."""
    tokens = batch.astype(jnp.int32)
    logits = nnx.merge(graph, params)(tokens[:, :-1], key)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def make_loss(config: GPTConfig) -> Any:
    """``loss(params, batch[, key])`` for this model, the form that ``jax.value_and_grad`` takes."""
    return functools.partial(loss_fn, split_model(config)[0])
