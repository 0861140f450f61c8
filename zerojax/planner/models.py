"""Shapes to plan for without a model of one's own: GPT of the sizes in the ZeRO and ZeRO++ papers.

A decoder-only transformer in plain JAX: layers stacked and scanned, each recomputed in the backward pass, bfloat16
compute, tied embeddings, mean cross-entropy. Layer count and width give 12 · layers · width² parameters and the
embeddings. Only shapes are made here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.planner.workload import Workload

Tree = Any


@dataclasses.dataclass(frozen=True)
class GptShape:
    """Size of a GPT: layers, width, heads, vocabulary, tokens in a sequence."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 51_200
    length: int = 2048


GPT_SHAPES: Mapping[str, GptShape] = {
    "7.5b": GptShape(36, 4096, 32),
    "18b": GptShape(40, 6144, 48),
    "128b": GptShape(70, 12_288, 96),
    "1t": GptShape(128, 25_600, 160),
}


def gpt(shape: GptShape, *, dtype: Any = jnp.bfloat16, checkpointing: bool = True, name: str = "gpt") -> Workload:
    """A GPT with AdamW, a batch of one example to be scaled by the planner.

    Args:
        shape: its size.
        dtype: of the stored parameters; compute is in bfloat16 whatever this is. With bfloat16 the optimizer state
            holds float32 masters, 16 bytes a parameter in all (arXiv 1910.02054, section 3.1).
        checkpointing: whether each layer is recomputed in the backward pass.
        name: for people.

    >>> workload = gpt(GptShape(layers=2, width=64, heads=2, vocabulary=256, length=16))
    >>> workload.params["layers"]["up"].shape
    (2, 64, 256)
    """
    width, layers = shape.width, shape.layers
    extents = {
        "embed": (shape.vocabulary, width),
        "positions": (shape.length, width),
        "layers": {
            "attention_norm": (layers, width), "qkv": (layers, width, 3 * width), "qkv_bias": (layers, 3 * width),
            "out": (layers, width, width), "out_bias": (layers, width), "mlp_norm": (layers, width),
            "up": (layers, width, 4 * width), "up_bias": (layers, 4 * width),
            "down": (layers, 4 * width, width), "down_bias": (layers, width),
        },
        "norm": (width,),
    }  # fmt: skip
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, dtype), extents, is_leaf=lambda x: isinstance(x, tuple))
    tokens = jax.ShapeDtypeStruct((1, shape.length), jnp.int32)
    loss_fn = functools.partial(_gpt_loss, heads=shape.heads, checkpointing=checkpointing)
    return Workload(loss_fn, params, {"inputs": tokens, "targets": tokens}, optax.adamw(3e-4), name=name)


def _gpt_loss(params: Tree, batch: dict[str, jax.Array], *, heads: int, checkpointing: bool) -> jax.Array:
    """Mean cross-entropy of the next token."""
    narrow = functools.partial(jnp.asarray, dtype=jnp.bfloat16)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
        return narrow(wide) * narrow(scale)

    def layer(h: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        batch_size, length, width = h.shape
        mixed = norm(h, p["attention_norm"]) @ narrow(p["qkv"]) + narrow(p["qkv_bias"])
        q, k, v = jnp.split(mixed.reshape(batch_size, length, 3 * heads, width // heads), 3, axis=2)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(h.shape)
        h = h + attended @ narrow(p["out"]) + narrow(p["out_bias"])
        hidden = jax.nn.gelu(norm(h, p["mlp_norm"]) @ narrow(p["up"]) + narrow(p["up_bias"]))
        return h + hidden @ narrow(p["down"]) + narrow(p["down_bias"]), None

    h = narrow(params["embed"])[batch["inputs"]] + narrow(params["positions"])
    h, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False) if checkpointing else layer, h, params["layers"])
    logits = (norm(h, params["norm"]) @ narrow(params["embed"]).T).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))
