"""Steps whose loss or gradient is not finite: seen on every device, then ignored, skipped, or a reason to stop.

Loss and gradient norm are global values, so that one device's NaN is everybody's. A step that stops training changes
nothing and neither do those after it: an exception cannot leave a compiled step without losing its donated arguments,
so the step marks its state, and the host, which may run one step ahead, raises when it sees the mark.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from zerojax import _compat
from zerojax.layout.notices import ZeroNotice

Tree = Any
OnNonFinite = Literal["ignore", "skip", "raise"]

# Bits of `NonFinite.stopped`.
LOSS, GRADIENTS, FLOOR, WENT_ON = 1, 2, 4, 8


class NonFiniteError(ArithmeticError):
    """A loss or gradient was not finite in a step made with `on_nonfinite="raise"`, or a loss scale hit its floor.

    >>> import zerojax
    >>> issubclass(zerojax.NonFiniteError, ArithmeticError)
    True
    """


class NonFinite(NamedTuple):
    """How often something was not finite: int32 scalars, the same on every device.

    Attributes:
        loss_steps: steps whose loss was not finite.
        grad_steps: steps whose gradient norm was not finite.
        stopped: 0; or why training stopped, the sum of 1 (the loss was not finite), 2 (the gradient was not finite) and
            4 (the loss scale was at its floor); with 8, inside a `jax.jit` of the user's, where
            training went on.

    >>> jax.tree.map(int, init_nonfinite())
    NonFinite(loss_steps=0, grad_steps=0, stopped=0)
    """

    loss_steps: jax.Array
    grad_steps: jax.Array
    stopped: jax.Array


class Decision(NamedTuple):
    """What becomes of a step: bool scalars and the new counts.

    Attributes:
        counts: with this step.
        keeps_old: whether parameters and state stay as they were.
        runs: whether the step counts at all: it has not stopped training, nor has one before it.
    """

    counts: NonFinite
    keeps_old: jax.Array
    runs: jax.Array


def init_nonfinite() -> NonFinite:
    """The counts before the first step.

    >>> int(init_nonfinite().stopped)
    0
    """
    return NonFinite(*(jnp.zeros((), jnp.int32) for _ in NonFinite._fields))


def decide(
    counts: NonFinite,
    loss_finite: jax.Array,
    grads_finite: jax.Array,
    on_nonfinite: OnNonFinite | Literal["mark"],
    at_floor: Any,
) -> Decision:
    """Decides what becomes of a step.

    Args:
        counts: those of the state.
        loss_finite: bool scalar.
        grads_finite: bool scalar.
        on_nonfinite: what was asked for; "mark" for "raise" where nothing can be raised: such a step is skipped and
            marked, and the next ones run.
        at_floor: None without loss scaling, where every such step stops training under "raise"; else whether the scale
            is at its floor: an overflow above it is what scaling expects, and skipped.

    >>> fine, bad = jnp.bool_(True), jnp.bool_(False)
    >>> one = decide(init_nonfinite(), fine, bad, "raise", None)
    >>> int(one.counts.stopped), bool(one.keeps_old), bool(one.runs)
    (2, True, False)
    """
    finite = loss_finite & grads_finite
    before = counts.stopped
    if on_nonfinite in ("raise", "mark"):
        fatal = ~finite if at_floor is None else ~finite & at_floor
        reason = jnp.where(loss_finite, 0, LOSS) + jnp.where(grads_finite, 0, GRADIENTS)
        reason += 0 if at_floor is None else FLOOR
        stopped = jnp.where(before != 0, before, jnp.where(fatal, reason, 0).astype(jnp.int32))
        counted, runs = before == 0, stopped == 0
        if on_nonfinite == "mark":
            stopped = jnp.where((before == 0) & fatal, reason + WENT_ON, before).astype(jnp.int32)
            counted = runs = jnp.bool_(True)
    else:
        stopped, counted = before, jnp.bool_(True)
        runs = counted
    skips = on_nonfinite != "ignore" or at_floor is not None
    bad_loss, bad_grads = (counted & ~loss_finite).astype(jnp.int32), (counted & ~grads_finite).astype(jnp.int32)
    return Decision(
        NonFinite(counts.loss_steps + bad_loss, counts.grad_steps + bad_grads, stopped),
        (skips & ~finite) | ~runs,
        runs,
    )


def keep_if(keeps_old: jax.Array, old: Tree, new: Tree) -> Tree:
    """The old values, bit for bit, or the new ones."""
    return jax.tree.map(lambda a, b: jnp.where(keeps_old, a, b), old, new)


class _State(Protocol):
    @property
    def step(self) -> jax.Array: ...


def raise_if_stopped(state: _State, stopped: jax.Array) -> None:
    """Raises when a step stopped training; waits for the value.

    Raises:
        NonFiniteError: with the step and the reason.
    """
    reason = int(stopped)
    if not reason:
        return
    what = [name for bit, name in ((LOSS, "the loss"), (GRADIENTS, "the gradient")) if reason & bit]
    verb, floor = "was" if len(what) == 1 else "were", ", with the loss scale at its floor" if reason & FLOOR else ""
    text = f"{' and '.join(what)} {verb} not finite{floor}"
    if reason & WENT_ON:
        raise NonFiniteError(
            f"before step {int(state.step)}, inside a jax.jit or scan of your own, {text}: such steps were skipped and "
            "training went on. state.resumed() takes the mark away; on_nonfinite=\"skip\" makes none"
        )
    raise NonFiniteError(
        f"step {int(state.step)}: {text}. The state in hand is that before this "
        "step: go on from it with state.resumed(), on other data or with other settings, or make the step with "
        'on_nonfinite="skip"'
    )


class StoppingStep:
    """A compiled step that raises `NonFiniteError` on the host, at the latest two calls after the one that failed.

    A call waits for the step before the last, so that one step is always in flight while the host prepares the next.
    A state that did not come from the last call (the first, a restored one) is looked at itself. What is looked at
    depends on the sequence of calls alone: all processes of a job raise at the same call.
    """

    def __init__(
        self,
        step: Callable[..., tuple[Any, dict[str, Any]]],
        inside: Callable[..., tuple[Any, dict[str, Any]]] | None = None,
    ) -> None:
        self._step, self._inside = step, step if inside is None else inside
        # The mark of the last state returned, its copy in the metrics (which no step takes over), and that copy of the
        # step before.
        self._last: tuple[Any, Any, Any] = (None, None, None)

    def __call__(self, state: Any, batch: Tree, *rest: Any) -> tuple[Any, dict[str, Any]]:
        """Takes a step, after looking at an earlier one."""
        mark = None if state.nonfinite is None else state.nonfinite.stopped
        if mark is None:  # refused by the step
            return self._step(state, batch, *rest)
        if _compat.is_traced(mark):
            warnings.warn(
                "make_train_step(on_nonfinite='raise') cannot raise inside a jax.jit or scan of your own: steps that "
                "are not finite are skipped there and training goes on; state.check() afterwards raises",
                ZeroNotice,
                stacklevel=2,
            )
            return self._inside(state, batch, *rest)
        last, copy, copy_before = self._last
        known, entering = (copy_before, copy) if mark is last else (mark, None)
        if known is not None:
            raise_if_stopped(state, known)
        new, metrics = self._step(state, batch, *rest)
        self._last = (new.nonfinite.stopped, metrics["stopped"], entering)
        return new, metrics

    def __getattr__(self, name: str) -> Any:
        """`lower` and the like of the compiled step."""
        return getattr(self._step, name)
