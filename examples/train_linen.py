"""A Linen training loop with dropout, scanned and rematerialised blocks; the lines that zerojax changes are marked.

    python examples/train_linen.py --steps 50

``# new`` marks a line added, ``# was:`` a line changed, with what stood there before. The model is not touched.
"""

import argparse
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from stdlib_text import VOCABULARY, read_stdlib, sample_batch

import zerojax  # new

LAYERS, WIDTH, HEADS, SEQUENCE, BATCH = 4, 128, 4, 64, 16


class Block(nn.Module):
    """Pre-norm attention and feed-forward on a carry of shape (batch, sequence, width)."""

    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        attention = nn.SelfAttention(HEADS, dtype=jnp.bfloat16, deterministic=self.deterministic, dropout_rate=0.1)
        x = x + attention(nn.RMSNorm(dtype=jnp.bfloat16)(x), nn.make_causal_mask(x[..., 0]))
        hidden = nn.gelu(nn.Dense(4 * WIDTH, dtype=jnp.bfloat16)(nn.RMSNorm(dtype=jnp.bfloat16)(x)))
        hidden = nn.Dropout(0.1, deterministic=self.deterministic)(hidden)
        return x + nn.Dense(WIDTH, dtype=jnp.bfloat16)(hidden), None


class GPT(nn.Module):
    """Bytes (batch, sequence) to float32 logits (batch, sequence, 256)."""

    deterministic: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16)
        positions = self.param("positions", nn.initializers.normal(0.02), (SEQUENCE, WIDTH))
        x = embed(tokens) + positions.astype(jnp.bfloat16)
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
        )
        x, _ = blocks(self.deterministic)(x, None)
        return embed.attend(nn.RMSNorm(dtype=jnp.bfloat16)(x)).astype(jnp.float32)


def loss_fn(params: Any, batch: jax.Array, dropout_key: jax.Array) -> jax.Array:
    """Mean cross entropy in nats per byte, with dropout."""
    tokens = batch.astype(jnp.int32)
    logits: Any = GPT().apply({"params": params}, tokens[:, :-1], rngs={"dropout": dropout_key})
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def init_fn(key: jax.Array) -> Any:
    """The model's parameters."""
    return GPT(deterministic=True).init(key, jnp.zeros((1, SEQUENCE), jnp.int32))["params"]


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args(args).steps
    zerojax.simulate_devices(8)  # where there are no accelerators

    key = jax.random.key(0)
    mesh = zerojax.make_mesh()  # new
    layout = zerojax.partition(jax.eval_shape(init_fn, key), mesh, zerojax.ZeroConfig(stage=3))  # new
    params = layout.init(init_fn, key)  # was: jax.jit(init_fn)(key)
    tx = zerojax.zero(optax.adamw(1e-3), layout)  # was: optax.adamw(1e-3)
    grad_fn = zerojax.value_and_grad(loss_fn, layout)  # was: jax.value_and_grad(loss_fn)
    opt_state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, batch: jax.Array, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = grad_fn(params, batch, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    text, rng = read_stdlib(), np.random.default_rng(0)
    for step in range(steps):
        batch = sample_batch(text.train, rng, BATCH, SEQUENCE)
        params, opt_state, loss = train_step(params, opt_state, batch, jax.random.fold_in(key, step))
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss:.4f}")


if __name__ == "__main__":
    main()
