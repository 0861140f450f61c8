"""The one configuration record: which ZeRO stage, over which mesh axes, at which thresholds and precisions.

A configuration says *what* the user wants and checks only itself; what it means for a given leaf is decided once, in
`zerojax.partition`. Stages are those of ZeRO (arXiv 1910.02054, section 5): 1 splits the optimizer state, 2 the
gradients too, 3 the parameters too. Knows nothing of meshes, arrays or optimizers.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

Stage = Literal[0, 1, 2, 3]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """What is split over the data axes, and how.

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
        grad_dtype: dtype on the wire of the gradient reduction. None: the dtype in which the gradient arises, that is
            the compute dtype at stages 2 and 3 and the dtype of the parameter at stages 0 and 1.

    Raises:
        ValueError: a field is out of its range; the message names the field and what it accepts.

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

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or self.stage not in (0, 1, 2, 3):
            raise ValueError(f"ZeroConfig(stage={self.stage!r}): stage must be 0, 1, 2 or 3")
        axes = (self.axes,) if isinstance(self.axes, str) else tuple(self.axes)
        object.__setattr__(self, "axes", axes)
        if len(axes) not in (1, 2) or len(set(axes)) != len(axes) or not all(isinstance(a, str) for a in axes):
            raise ValueError(
                f"ZeroConfig(axes={self.axes!r}): axes must be one or two different mesh axis names, outermost first"
            )
        if not isinstance(self.min_shard_size, int) or self.min_shard_size < 0:
            raise ValueError(
                f"ZeroConfig(min_shard_size={self.min_shard_size!r}): min_shard_size is a number of elements, 0 or more"
            )
        for field in ("master_dtype", "grad_dtype"):
            object.__setattr__(self, field, _float_name(field, getattr(self, field)))


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
