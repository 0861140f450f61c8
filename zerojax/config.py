"""The one configuration record: which ZeRO stage, over which mesh axes, at which thresholds and precisions.

A configuration says *what* the user wants and checks only itself; what it means for a given leaf is decided once, in
`zerojax.partition`. Stages are those of ZeRO (arXiv 1910.02054, section 5): 1 splits the optimizer state, 2 the
gradients too, 3 the parameters too. The quantised techniques are those of ZeRO++ (arXiv 2306.10209, section 3): qwZ is
`quantize_weights`, hpZ is `secondary`, qgZ is `quantize_gradients`.

What each is worth, for an 18B-parameter GPT (40 layers, d 6144, vocabulary 51200, bfloat16 compute, one example of 2048
tokens on each GPU) on 48 x 8 H100: bytes that enter each node per step in units of M, the parameters in bfloat16, read
from the steps compiled for those GPUs (`zerojax plan gpt:18b --compare`, JAX 0.10.2, 2026-11-29). A node already holds
1/48 of M; the papers count full M and no scales.

| | into each node | the papers | state on each GPU (GB) | in all, compiled (GB) |
|---|---|---|---|---|
| stage 0 | 1.958 | 2 | 295.2 | 298.5 |
| stage 1 | 1.958 | 2 | 74.4 | 86.1 |
| stage 2 | 1.958 | 2 | 37.6 | 74.4 |
| stage 3 | 2.937 | 3 | 0.77 | 5.4 |
| + int8 gathers | 1.966 | 2 | 0.77 | 5.4 |
| + secondary partition | 1.958 | 2 | 5.38 | 10.2 |
| + quantised gradients | 2.219 | 2.25 | 0.77 | 5.3 |
| all three | 0.755 | 0.75 | 3.09 | 7.6 |
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from pallas_kernels import QuantFormat

Stage = Literal[0, 1, 2, 3]


# Weights: a block is large because its elements are alike in size and the scale is overhead. Gradients: int8 on the
# fast network; between nodes 4 bits in blocks of 32 with float8 scales, so that no coordinate with small gradients
# shares a scale with many large ones (examples/gradient_error.py has the measurement that chose it).
WEIGHT_FORMATS = {"int8": QuantFormat(8, 256), "int4": QuantFormat(4, 64, rotate=32)}
# Changes of weights: their errors come back in the next step, so small blocks with small scales are all that counts.
DELTA_FORMATS = {bits: QuantFormat(int(bits[3:]), 32, "float8_e4m3fn") for bits in ("int4", "int2")}
GRADIENT_FORMATS = {"int8": QuantFormat(8, 128), "int4": QuantFormat(4, 32, "float8_e4m3fn")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """What is split over the data axes, and how it travels.

    Attributes:
        stage: 0 replicates everything (plain data parallelism), 1 shards the optimizer state, 2 the gradients too,
            3 the parameters too.
        axes: names of the mesh axes that hold replicas of the data-parallel job, outermost (slowest network) first:
            one name, or ("node", "local"). Every other axis of the mesh is left to the compiler.
        min_shard_size: leaves with fewer elements stay replicated. A leaf this small costs less to keep than the
            latency of gathering it.
        master_dtype: leaves stored in a narrower float dtype get a copy of this dtype in the optimizer state, on which
            the optimizer works (mixed-precision training, arXiv 1910.02054 section 3.1). None: the optimizer works on
            the parameters themselves.
        grad_dtype: dtype on the wire of an unquantised gradient reduction. None: the dtype in which the gradient
            arises, that is the compute dtype at stages 2 and 3 and the dtype of the parameter at stages 0 and 1;
            complex gradients keep theirs.
        quantize_weights: "int8", "int4" or a `QuantFormat`: the format of the weight gathers of stage 3 (qwZ).
        secondary: keep a copy of the gathered-over-nodes weights, split inside the node, from the forward to the
            backward pass, so that the backward gather stays inside the node (hpZ). Stage 3, two axes.
        weight_deltas: "int4", "int2" or a `QuantFormat`: every node keeps a replica of the weights, split inside the
            node (1/local of them on each device, in two bytes an element), and only their quantised change travels
            between nodes, once a step. Carried from step to step (`WireState`); weights in compute are the replica's
            values: the parameters', rounded to two bytes, but for what the last change still lacks. Gathers inside the
            node stay as they are, or are quantised where `quantize_weights` is given too. Stage 3, two axes.
        quantize_gradients: a format for the gradient reduction (qgZ), or a pair (inside the node, between nodes).
        rounding: "nearest" or "stochastic", of gradients.
        error_feedback: carry what the quantisation between nodes lost into the next step.
        min_quantize_size: leaves with fewer elements, and all of one dim, travel unquantised.
        kernels: who quantises on GPUs: "auto" takes a Pallas kernel where its first use on the device shows that it has
            the bits of XLA's program and is not slower, "always" where there is one, "never" leaves it to XLA. The
            values are the same. The environment variable PALLAS_KERNELS says it for "auto".
        prefetch_bytes: bytes of full weights that may be gathered ahead of their use (stage 3). Outside of loops the
            next use's weights always may, however large, and memory does not grow with the number of layers. Those of a
            layer under `jax.checkpoint` travel together, while the layer before computes; where layers are not
            checkpointed, uses travel together in groups of half so many bytes. In a scanned loop so much of the next
            layer travels while one computes. None: the compiler decides: a loop waits for its layer, and an
            unrolled model holds more the more layers it has. "auto": 2**30 on GPUs; None on CPUs, where XLA overlaps
            nothing and the longer program would only be compiled longer.
        pack_bytes: bytes of full leaves (weights or gradients) that travel in one message where small leaves are needed
            one after the other; a larger leaf travels by itself. 4 MiB cross even a slow GPU network in less than the
            latency of a few messages. 0: each leaf by itself. "auto": 4 MiB, but 0 where leaves move in the middle of
            the loss (stages 2 and 3) inside loops and checkpointed functions, and on GPUs, where the order of the
            gathers forms the messages (`prefetch_bytes`); a number holds for all. Values and bytes do not depend on it.

    Raises:
        ValueError: a field is out of its range, or a technique cannot take effect; the message names the field.

    >>> ZeroConfig(stage=3).axes
    ('node', 'local')
    >>> ZeroConfig(stage=5)
    Traceback (most recent call last):
        ...
    ValueError: ZeroConfig(stage=5): stage must be 0, 1, 2 or 3
    """

    stage: Stage = 3
    axes: tuple[str, ...] = ("node", "local")
    min_shard_size: int = 2**14
    master_dtype: str | None = "float32"
    grad_dtype: str | None = None
    quantize_weights: str | QuantFormat | None = None
    secondary: bool = False
    weight_deltas: str | QuantFormat | None = None
    quantize_gradients: str | QuantFormat | tuple[str | QuantFormat, str | QuantFormat] | None = None
    rounding: Literal["nearest", "stochastic"] = "nearest"
    error_feedback: bool = False
    min_quantize_size: int = 2**14
    kernels: Literal["auto", "always", "never"] = "auto"
    prefetch_bytes: int | Literal["auto"] | None = "auto"
    pack_bytes: int | Literal["auto"] = "auto"

    @classmethod
    def zero_plus_plus(cls, **overrides: Any) -> ZeroConfig:
        """All three techniques of ZeRO++ with their default formats; any field can be overridden.

        >>> ZeroConfig.zero_plus_plus().secondary
        True
        """
        defaults: dict[str, Any] = {
            "stage": 3, "quantize_weights": "int8", "secondary": True, "quantize_gradients": ("int8", "int4"),
        }  # fmt: skip
        return cls(**{**defaults, **overrides})

    @property
    def listed_pack_bytes(self) -> int:
        """`pack_bytes` as a number: where many leaves move at one point of the step, and on CPUs everywhere."""
        return 4 * 2**20 if self.pack_bytes == "auto" else self.pack_bytes

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or self.stage not in (0, 1, 2, 3):
            raise ValueError(f"ZeroConfig(stage={self.stage!r}): stage must be 0, 1, 2 or 3")
        axes = (self.axes,) if isinstance(self.axes, str) else tuple(self.axes)
        object.__setattr__(self, "axes", axes)
        if len(axes) not in (1, 2) or len(set(axes)) != len(axes) or not all(isinstance(a, str) for a in axes):
            raise ValueError(
                f"ZeroConfig(axes={self.axes!r}): axes must be one or two different mesh axis names, outermost first"
            )
        for field in ("min_shard_size", "min_quantize_size"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"ZeroConfig({field}={value!r}): {field} is a number of elements, 0 or more")
        for field, words in (("prefetch_bytes", ("auto", None)), ("pack_bytes", ("auto",))):
            value = getattr(self, field)
            if value not in words and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                known = ", ".join(map(repr, words))
                raise ValueError(
                    f"ZeroConfig({field}={value!r}): {known} or a number of bytes (0 or more) is needed"
                )
        for field in ("master_dtype", "grad_dtype"):
            object.__setattr__(self, field, _float_name(field, getattr(self, field)))
        self._check_techniques()

    def _check_techniques(self) -> None:
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"ZeroConfig(rounding={self.rounding!r}): rounding must be 'nearest' or 'stochastic'")
        object.__setattr__(self, "quantize_weights", _format("quantize_weights", self.quantize_weights, WEIGHT_FORMATS))
        object.__setattr__(self, "weight_deltas", _format("weight_deltas", self.weight_deltas, DELTA_FORMATS))
        if isinstance(self.weight_deltas, QuantFormat) and self.weight_deltas.rotate is not None:
            raise ValueError(f"ZeroConfig(weight_deltas={self.weight_deltas!r}): changes need no rotation; rotate=None")
        gradients = self.quantize_gradients
        if isinstance(gradients, (list, tuple)):
            if len(gradients) != 2:
                raise ValueError(
                    f"ZeroConfig(quantize_gradients={gradients!r}): one format, or a pair (inside the node, between)"
                )
            pair = tuple(_format("quantize_gradients", f, GRADIENT_FORMATS) for f in gradients)
        else:
            one = _format("quantize_gradients", gradients, GRADIENT_FORMATS)
            pair = None if one is None else (one, one)
        object.__setattr__(self, "quantize_gradients", pair)
        if self.kernels not in ("auto", "always", "never"):
            raise ValueError(f"ZeroConfig(kernels={self.kernels!r}): kernels must be 'auto', 'always' or 'never'")
        for field, formats in (("quantize_weights", [self.quantize_weights]), ("quantize_gradients", pair or ())):
            if any(isinstance(f, QuantFormat) and f.bits == 2 for f in formats):
                raise ValueError(
                    f"ZeroConfig({field}={getattr(self, field)!r}): 2 bits are for weight_deltas, whose errors come "
                    "back; use 4 or 8 bits"
                )
        no_effect = {
            "quantize_weights": self.quantize_weights and self.stage < 3 and "weights are gathered only at stage 3",
            "secondary": self.secondary and (
                (self.stage < 3 and "weights are gathered only at stage 3")
                or (len(self.axes) < 2 and "a secondary partition needs two axes, ('node', 'local')")),
            "weight_deltas": self.weight_deltas and (
                (self.stage < 3 and "weights are gathered only at stage 3")
                or (len(self.axes) < 2 and "it needs two axes, ('node', 'local')")),
            "quantize_gradients": pair and self.stage < 1 and "stage 0 all-reduces full gradients; use stage 1 to 3",
            "prefetch_bytes": self.prefetch_bytes not in (None, "auto") and self.stage < 3
                and "weights are gathered only at stage 3",
            "rounding": self.rounding != "nearest" and not pair and "it applies to quantize_gradients, which is None",
            "kernels": self.kernels != "auto" and not pair and not self.quantize_weights and not self.weight_deltas
                and "they quantise, and neither quantize_weights nor quantize_gradients is given",
            "error_feedback": self.error_feedback and (
                (not pair and "it applies to quantize_gradients, which is None")
                or (len(self.axes) < 2 and "it applies to the hop between nodes, and there is one axis")),
        }  # fmt: skip
        for field, reason in no_effect.items():
            if reason:
                raise ValueError(f"ZeroConfig({field}={getattr(self, field)!r}, stage={self.stage}): {reason}")


def _format(field: str, value: Any, named: dict[str, QuantFormat]) -> QuantFormat | None:
    if value is None or isinstance(value, QuantFormat):
        return value
    if isinstance(value, str) and value in named:
        return named[value]
    raise ValueError(f"ZeroConfig({field}={value!r}): use None, {', '.join(map(repr, named))} or a QuantFormat")


def _float_name(field: str, value: object) -> str | None:
    """Normalises a dtype given by name or object to its name; refuses what is not a float of 2 bytes or more."""
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)  # type: ignore[arg-type]
    except TypeError as err:
        raise ValueError(f"ZeroConfig({field}={value!r}): not a dtype; use 'float32', 'bfloat16', 'float16'") from err
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(f"ZeroConfig({field}={value!r}): a float dtype of at least 2 bytes is required")
    return dtype.name
