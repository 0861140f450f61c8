"""Plans 24 training runs that others measured, and sets the predicted tokens per second beside theirs.

    JAX_PLATFORMS=cpu python examples/published_runs.py [--runs 1b,7b]

The runs are those of mosaicml/llm-foundry, scripts/train/benchmarking/README.md: PyTorch FSDP (FULL_SHARD), flash
attention, bfloat16 compute, nodes of 8 GPUs, sequences of 2048 tokens. Their models are MPT: decoder-only transformers
with biases, learned positions, a tied embedding of 50368 rows and an MLP of four times the width; the parameter counts
below are met exactly. Where the source does not say how fast the network is (H100), one 400 Gbit/s adapter per GPU is
taken. Each run is compiled ahead of time with stage 3 for its GPUs and replayed (`zerojax.planner.replay`); nothing is
set per run. Attention stands in the scope "flash_attention", which is replayed as one fused kernel: half of the
products' FLOP, since it is causal, and no traffic for what lies between them. The scores exist in the program that is
compiled, so it is compiled for GPUs with room for them; their memory is not what a fused kernel would need.

The table of all runs, with its errors, stands in `zerojax.planner.replay`; all of it takes some minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax.planner.gpus import TARGETS
from zerojax.planner.plan import plan_workload
from zerojax.planner.records import ConfigPlan
from zerojax.planner.workload import Workload


class Shape(NamedTuple):
    """An MPT: layers, width, heads, and the parameters that the source counts."""

    layers: int
    width: int
    heads: int
    parameters: int


SHAPES = {
    "1b": Shape(24, 2048, 16, 1_315_950_592),
    "3b": Shape(32, 2560, 20, 2_651_837_440),
    "7b": Shape(32, 4096, 32, 6_658_859_008),
    "13b": Shape(40, 5120, 40, 12_853_954_560),
    "30b": Shape(48, 7168, 56, 29_975_214_080),
    "70b": Shape(80, 8192, 64, 64_862_437_376),
}
VOCABULARY, LENGTH = 50_368, 2048


class Run(NamedTuple):
    """A measured run; `gbit_s` is the network into a node (None: not stated)."""

    model: str
    gpu: str
    gpus: int
    gbit_s: int | None
    microbatch: int
    accumulated: int
    checkpointing: bool
    tokens: int  # per second and GPU


RUNS = [
    Run("1b", "h100", 8, None, 14, 1, False, 45455),
    Run("1b", "h100", 16, None, 20, 1, False, 46037),
    Run("1b", "h100", 32, None, 20, 1, False, 45130),
    Run("1b", "h100", 64, None, 20, 1, False, 44402),
    Run("3b", "h100", 16, None, 10, 3, False, 24142),
    Run("3b", "h100", 32, None, 6, 3, False, 23021),
    Run("3b", "h100", 64, None, 6, 3, False, 22525),
    Run("7b", "h100", 8, None, 6, 1, False, 10643),
    Run("13b", "h100", 8, None, 2, 1, False, 4792),
    Run("13b", "h100", 16, None, 2, 1, False, 4767),
    Run("13b", "h100", 32, None, 2, 1, False, 4811),
    Run("13b", "h100", 64, None, 2, 1, False, 4800),
    Run("30b", "h100", 8, None, 3, 21, True, 2002),
    Run("30b", "h100", 16, None, 10, 3, True, 2263),
    Run("30b", "h100", 32, None, 14, 3, True, 2308),
    Run("70b", "h100", 32, None, 2, 16, True, 882),
    Run("70b", "h100", 64, None, 8, 4, True, 1039),
    Run("1b", "a100", 8, 1600, 14, 4, False, 20513),
    Run("3b", "a100", 8, 1600, 10, 2, False, 10811),
    Run("7b", "a100", 8, 1600, 6, 2, False, 4641),
    Run("13b", "a100", 8, 1600, 2, 3, False, 2262),
    Run("30b", "a100", 8, 1600, 3, 21, True, 916),
    Run("70b", "a100", 32, 1600, 2, 16, True, 373),
    Run("70b", "a100", 64, 1600, 8, 4, True, 410),
]


def mpt(shape: Shape, *, checkpointing: bool, name: str = "mpt") -> Workload:
    """The model's loss and shapes: bfloat16 parameters, AdamW with float32 masters, a batch of one example.

    Args:
        shape: its size.
        checkpointing: whether whole layers are recomputed in the backward pass.
        name: for people.
    """
    layers, width = shape.layers, shape.width
    extents = {
        "embed": (VOCABULARY, width),
        "positions": (LENGTH, width),
        "layers": {
            "attention_norm": (layers, 2, width), "qkv": (layers, width, 3 * width), "qkv_bias": (layers, 3 * width),
            "out": (layers, width, width), "out_bias": (layers, width), "mlp_norm": (layers, 2, width),
            "up": (layers, width, 4 * width), "up_bias": (layers, 4 * width),
            "down": (layers, 4 * width, width), "down_bias": (layers, width),
        },
        "norm": (2, width),
    }  # fmt: skip
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16), extents, is_leaf=lambda x: isinstance(x, tuple)
    )
    tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    loss = functools.partial(_loss, heads=shape.heads, checkpointing=checkpointing)
    return Workload(loss, params, {"inputs": tokens, "targets": tokens}, optax.adamw(3e-4), name=name)


@jax.checkpoint
def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    with jax.named_scope("flash_attention"):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _norm(x: jax.Array, p: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * p[0] + p[1]


def _loss(params: Any, batch: dict[str, jax.Array], *, heads: int, checkpointing: bool) -> jax.Array:
    """Mean cross-entropy of the next token."""

    def layer(h: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        mixed = _norm(h, p["attention_norm"]) @ p["qkv"] + p["qkv_bias"]
        q, k, v = jnp.split(mixed.reshape(*h.shape[:2], 3 * heads, -1), 3, axis=2)
        h = h + _attention(q, k, v).reshape(h.shape) @ p["out"] + p["out_bias"]
        hidden = jax.nn.gelu(_norm(h, p["mlp_norm"]) @ p["up"] + p["up_bias"])
        return h + hidden @ p["down"] + p["down_bias"], None

    h = params["embed"][batch["inputs"]] + params["positions"]
    h, _ = jax.lax.scan(jax.checkpoint(layer) if checkpointing else layer, h, params["layers"])
    logits = (_norm(h, params["norm"]) @ params["embed"].T).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))


def plan_run(run: Run) -> ConfigPlan:
    """The run's step under stage 3, compiled and replayed."""
    gpu = TARGETS[run.gpu]
    plan = plan_workload(
        mpt(SHAPES[run.model], checkpointing=run.checkpointing, name=run.model),
        target=dataclasses.replace(gpu, memory_bytes=64 * gpu.memory_bytes), num_nodes=run.gpus // 8,
        bandwidth=None if run.gbit_s is None else f"{run.gbit_s}Gbit/s", examples_per_device=run.microbatch,
        microbatches=run.accumulated, largest_microbatch=False, compiles=True,
    )  # fmt: skip
    return plan.configs[0]


def predicted_tokens(run: Run) -> float:
    """Tokens per second and GPU of the replayed step."""
    speed = plan_run(run).speed
    assert speed is not None
    assert speed.tokens_per_second is not None
    return speed.tokens_per_second


def compare(runs: Sequence[Run]) -> Iterator[tuple[Run, float, float]]:
    """Each run with the predicted tokens per second and GPU, and the relative error."""
    for gpu in dict.fromkeys(run.gpu for run in runs):
        of_gpu = [run for run in runs if run.gpu == gpu]
        # A process that has compiled for one generation of GPUs cannot compile for every other.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            for run, tokens in zip(of_gpu, pool.map(predicted_tokens, of_gpu), strict=True):
                yield run, tokens, tokens / run.tokens - 1


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", help="models, as 1b,7b; or gpus, as a100 (default: all)")
    wanted = parser.parse_args(argv).runs
    chosen = [run for run in RUNS if wanted is None or {run.model, run.gpu} & set(wanted.split(","))]
    print("model gpu  gpus microbatch recomputed measured predicted  error")
    errors = []
    for run, tokens, error in compare(chosen):
        errors.append(abs(error))
        print(
            f"{run.model:5} {run.gpu} {run.gpus:4} {run.microbatch:5} x {run.accumulated:<2} "
            f"{'yes' if run.checkpointing else 'no':>10} {run.tokens:8} {tokens:9.0f} {error:+6.1%}",
            flush=True,
        )
    if errors:
        print(f"median of the absolute errors {statistics.median(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    main()
