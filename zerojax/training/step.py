"""`make_train_step`: gradients, optimizer and parameters composed into one compiled step with donated buffers.

The step is what a user would write from `value_and_grad` and `zero`; it adds metrics that are global values, and
donation, so that parameters and state are updated in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from zerojax import _compat
from zerojax.gradients.local import Accumulation
from zerojax.gradients.norm import global_norm
from zerojax.gradients.outputs import wide_dtype
from zerojax.gradients.transform import gradient_function
from zerojax.gradients.wire import kept_in_skipped_step
from zerojax.layout.host_arrays import is_of_several_processes
from zerojax.layout.layout import Layout
from zerojax.optimizer.zero import check_sharded
from zerojax.training.compiler_options import compiler_options
from zerojax.training.first_step import AgreeingStep
from zerojax.training.loss_scaling import DynamicScale, is_at_floor, loss_scale_rule, next_loss_scale
from zerojax.training.nonfinite import OnNonFinite, StoppingStep, decide, init_nonfinite, keep_if
from zerojax.training.state import TrainState

Tree = Any


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    layout: Layout,
    *,
    microbatches: int = 1,
    accumulation: Accumulation | None = None,
    has_aux: bool = False,
    per_example: Tree = None,
    weighted: bool = False,
    mutable: bool = False,
    clip_norm: float | None = None,
    loss_scale: DynamicScale | str | None = None,
    on_nonfinite: OnNonFinite | None = None,
    donate: bool = True,
) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
    """One compiled training step.

    Args:
        loss_fn: as for `value_and_grad`.
        tx: an optimizer made by `zerojax.zero(..., layout)`.
        layout: the layout of the parameters.
        microbatches: as for `value_and_grad`: gradient accumulation, with float32 accumulators.
        accumulation: as for `value_and_grad`: "sharded" or "deferred".
        has_aux: as for `value_and_grad`; the aux is returned under "aux".
        per_example: as for `value_and_grad`.
        weighted: as for `value_and_grad`.
        mutable: the model carries a state beside its parameters, such as batch statistics, in `TrainState.model_state`:
            the loss is `loss_fn(params, batch, model_state, *rest)` and returns (loss, new model state), or (loss, (new
            model state, aux)) with `has_aux`. Floats are averaged over devices and microbatches, of integers
            (counters) the largest is kept; a step that is skipped keeps the old state.
        clip_norm: largest global norm of the gradient given to the optimizer; a larger one is scaled down to it.
        loss_scale: dynamic loss scaling: a `DynamicScale`, or the profile "float16" (its defaults) or "bfloat16"
            (none); with `TrainState.create(..., loss_scale=)` of the same rule. A step that overflows is skipped.
        on_nonfinite: what becomes of a step whose loss or gradient is not finite on any device. "ignore" applies it.
            "skip" leaves parameters, optimizer state, feedback and model state as they were, bit for bit. "raise" does
            so too, does the same in all steps after it, and raises `NonFiniteError` two calls later (the host is not
            made to wait for the step that it has just started) or in `TrainState.check()`; the state in hand is then
            that before the step that failed. With loss scaling, "raise" stops only at an overflow that would lower a
            scale at its floor. Inside a `jax.jit` or scan of your own nothing can be raised: there such a step is
            skipped, training goes on, a notice says so when it is traced, and `TrainState.check()` raises. None:
            "ignore", or "raise" with loss scaling, so that training never stands still unnoticed.
        donate: give the old state's buffers to the new one. The old state cannot be used afterwards.

    Returns:
        A function `step(state, batch, *rest) -> (state, metrics)`; metrics are scalars, the same on every device:
        "loss", "grad_norm" (of the mean gradient, before clipping), "clipped_norm" with `clip_norm`, "examples" in the
        batch, "tokens" with `weighted` (the sum of all weights), "loss_scale" (of this step) with loss scaling; why a
        step was not finite and how often: "loss_finite", "grads_finite", "loss_nonfinite_steps",
        "grads_nonfinite_steps", "skipped", and "stopped" (see `NonFinite.stopped`); and "aux".

    Raises:
        ValueError: as `value_and_grad`; a batch that does not divide into the microbatches; in a job of several
            processes, at the first step, whatever the processes differ in (field and processes are named).
        NonFiniteError: from a later call, see `on_nonfinite`.

    >>> import zerojax
    >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
    >>> layout = zerojax.partition({"w": jnp.ones((8,))}, mesh, zerojax.ZeroConfig(min_shard_size=0))
    >>> tx = zerojax.zero(optax.sgd(0.1), layout)
    >>> state = zerojax.TrainState.create(layout.shard({"w": jnp.ones((8,))}), tx)
    >>> state, metrics = make_train_step(lambda p, x: jnp.mean(x @ p["w"]), tx, layout)(state, jnp.ones((16, 8)))
    >>> int(state.step), float(metrics["loss"])
    (1, 8.0)
    """
    check_sharded(tx, "make_train_step(loss_fn, tx, layout)")
    rule = loss_scale_rule(loss_scale)
    if on_nonfinite not in (None, "ignore", "skip", "raise"):
        raise ValueError(f"make_train_step(on_nonfinite={on_nonfinite!r}): use 'ignore', 'skip' or 'raise'")
    if on_nonfinite == "ignore" and rule is not None:
        raise ValueError(
            "make_train_step(on_nonfinite='ignore', loss_scale=...): loss scaling finds its scale by overflows, which "
            "must not be applied; use 'skip' or 'raise'"
        )
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"make_train_step(clip_norm={clip_norm!r}): a positive norm is required")
    grad_fn = gradient_function(
        loss_fn, layout, has_aux=has_aux, weighted=weighted, mutable=mutable, microbatches=microbatches,
        accumulation=accumulation, per_example=per_example,
    )  # fmt: skip
    asked: OnNonFinite = on_nonfinite or ("ignore" if rule is None else "raise")

    def step(
        policy: OnNonFinite | Literal["mark"], state: TrainState, batch: Tree, *rest: Any
    ) -> tuple[TrainState, dict[str, Any]]:
        _check_state(state, rule, mutable, policy)
        scale = state.loss_scale
        out = grad_fn(
            state.params, batch, *rest, wire=state.wire, model_state=state.model_state,
            loss_scale=None if scale is None else scale.scale,
        )  # fmt: skip
        grads = out.grads if scale is None else jax.tree.map(lambda g: _wide(g) / scale.scale, out.grads)
        norm = global_norm(grads, layout)
        factor = None if clip_norm is None else jnp.minimum(1.0, clip_norm / norm)
        if factor is not None:
            grads = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
        at_floor = None if scale is None or rule is None else is_at_floor(scale, rule)
        counts = init_nonfinite() if state.nonfinite is None else state.nonfinite
        loss_finite, grads_finite = jnp.isfinite(out.loss), jnp.isfinite(norm)
        decision = decide(counts, loss_finite, grads_finite, policy, at_floor)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)  # type: ignore[arg-type]
        with jax.numpy_dtype_promotion("standard"):  # narrow parameters plus the float32 updates of their masters
            applied = optax.apply_updates(state.params, updates)
        new = applied, opt_state, out.wire, out.model_state
        if policy != "ignore":
            wire = kept_in_skipped_step(state.wire, out.wire)
            old = state.params, state.opt_state, wire, state.model_state
            new = keep_if(decision.keeps_old, old, new)
        params, opt_state, wire, model_state = new
        new_scale = scale
        if scale is not None and rule is not None:
            new_scale = keep_if(~decision.runs, scale, next_loss_scale(scale, loss_finite & grads_finite, rule))
        skipped = jnp.zeros((), jnp.int32) if state.skipped is None else state.skipped
        skipped += (decision.keeps_old & decision.runs).astype(skipped.dtype)
        of_some = {
            "tokens": out.weight,
            "clipped_norm": None if factor is None else norm * factor,
            "loss_scale": None if scale is None else scale.scale,
        }
        metrics = {
            "loss": out.loss,
            "grad_norm": norm,
            "examples": _examples(batch),
            "loss_finite": loss_finite,
            "grads_finite": grads_finite,
            "loss_nonfinite_steps": decision.counts.loss_steps,
            "grads_nonfinite_steps": decision.counts.grad_steps,
            "skipped": skipped,
            "stopped": decision.counts.stopped,
            **{name: value for name, value in of_some.items() if value is not None},
            **({"aux": out.aux} if has_aux else {}),
        }
        done = TrainState(
            state.step + decision.runs.astype(state.step.dtype), params, opt_state, wire, new_scale,  # type: ignore[arg-type]
            skipped if state.skipped is not None else None,
            decision.counts if state.nonfinite is not None else None, model_state,
        )  # fmt: skip
        return done, metrics

    donated = (0,) if donate else ()
    of_call = functools.partial(step, asked)
    compiled = jax.jit(of_call, donate_argnums=donated)
    if options := compiler_options(layout):
        compiled = _OuterStep(jax.jit(of_call, donate_argnums=donated, compiler_options=dict(options)), compiled)
    if is_of_several_processes(layout.mesh):
        compiled = AgreeingStep(compiled, layout)
    if asked != "raise":
        return compiled
    return StoppingStep(compiled, jax.jit(functools.partial(step, "mark"), donate_argnums=donated))


class _OuterStep:
    """A step with compiler options, and the one without for inside another `jax.jit`, which takes its own."""

    def __init__(self, outer: Callable[..., Any], inner: Callable[..., Any]) -> None:
        self._outer, self._inner = outer, inner

    def __call__(self, state: TrainState, *args: Any) -> Any:
        nested = any(_compat.is_traced(x) for x in jax.tree.leaves((state, args)))
        return (self._inner if nested else self._outer)(state, *args)

    def __getattr__(self, name: str) -> Any:
        """`lower` and the like of the compiled step."""
        return getattr(self._outer, name)


def _check_state(state: TrainState, rule: DynamicScale | None, mutable: bool, policy: str) -> None:
    if (state.loss_scale is None) != (rule is None):
        raise ValueError(
            "make_train_step(loss_scale=...) and TrainState.create(..., loss_scale=...) must be given the same rule, "
            "or neither any"
        )
    if policy in ("raise", "mark") and state.nonfinite is None:
        raise ValueError(
            "make_train_step(on_nonfinite='raise') marks in TrainState.nonfinite that training has stopped, which is "
            "None in this state; make the state with TrainState.create(...)"
        )
    if mutable != bool(jax.tree.leaves(state.model_state)):
        raise ValueError(
            "make_train_step(mutable=True) and TrainState.create(..., model_state=...) belong together: one was given "
            "without the other"
        )


def _examples(batch: Tree) -> jax.Array:
    """The number of examples: the leading dim of the batch, that of most of its leaves if they differ; int32's largest
    if there are more, as in a plan that looks for the largest batch."""
    sizes = [x.shape[0] for x in jax.tree.leaves(batch) if x.shape]
    return jnp.int32(min(max(sizes, key=sizes.count, default=0), 2**31 - 1))


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(wide_dtype(x.dtype))
