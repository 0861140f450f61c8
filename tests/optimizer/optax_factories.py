"""Every factory of optax and optax.contrib that makes a transformation, and how it is called.

Found by introspection: a public function that says it returns a transformation, or that says nothing of what it
returns. Each must be in exactly one of the tables below, so that a new version of optax fails the test of completeness
until somebody has looked at what it brings.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax
import optax.contrib

RATE = 0.05


def listed(words: str) -> list[str]:
    return words.split()


def named(path: str) -> Callable[..., Any]:
    """The function behind "adam" or "contrib.muon"."""
    module = optax.contrib if path.startswith("contrib.") else optax
    return getattr(module, path.removeprefix("contrib."))


def found_factories() -> set[str]:
    """Names of all public functions that make a transformation or do not say what they return."""
    def function(x: Any) -> bool:
        return inspect.isroutine(x) or isinstance(x, functools.partial)

    found = set()
    for module, prefix in ((optax, ""), (optax.contrib, "contrib.")):
        for name, value in inspect.getmembers(module, function):
            returns = inspect.signature(value).return_annotation
            if not name.startswith("_") and ("Transformation" in str(returns) or returns is inspect.Signature.empty):
                found.add(prefix + name)
    return found


def matrices(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def first_only(tree: Any) -> Any:
    return {name: "trained" if name == "matrix" else "kept" for name in tree}


def step_and_decay(update: Any, param: Any) -> Any:
    return -RATE * (update + 0.1 * param)


def adam() -> optax.GradientTransformation:
    return optax.adam(RATE)


def muon_dims(tree: Any) -> Any:
    return {name: optax.contrib.MuonDimensionNumbers() if name == "matrix" else optax.MaskedNode() for name in tree}


def lookahead() -> optax.GradientTransformation:
    """Its update takes the gradients of the fast half of its parameters; here they come of both, as from a loss."""
    inner = optax.lookahead(optax.sgd(RATE), 2, 0.5)
    return optax.GradientTransformation(
        inner.init, lambda grads, state, params=None: inner.update(grads.fast, state, params)
    )


def sometimes(step: Any, *unused: Any, **also_unused: Any) -> Any:
    return step % 2 == 0


# Called with the learning rate alone.
WITH_A_RATE = listed("""
    adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw
    noisy_sgd novograd optimistic_adam optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd
    signum sm3 yogi scale_by_learning_rate scale_by_rprop contrib.acprop contrib.ademamix contrib.adopt
    contrib.cocob contrib.dadapt_adamw contrib.dog contrib.dowg contrib.galore contrib.madgrad contrib.muon
    contrib.prodigy contrib.scale_by_madgrad contrib.schedule_free_adamw contrib.schedule_free_sgd
    contrib.simplified_ademamix
""")

# Called with nothing.
AS_THEY_ARE = listed("""
    apply_every centralize identity keep_params_nonnegative normalize_by_update_norm scale_by_adadelta scale_by_adam
    scale_by_adamax scale_by_adan scale_by_amsgrad scale_by_belief scale_by_distance_over_gradients
    scale_by_factored_rms scale_by_lion scale_by_novograd scale_by_optimistic_gradient scale_by_param_block_norm
    scale_by_param_block_rms scale_by_radam scale_by_rms scale_by_rss scale_by_sign scale_by_sm3 scale_by_stddev
    scale_by_trust_ratio scale_by_yogi set_to_zero zero_nans add_decayed_weights contrib.normalize
    contrib.scale_by_acprop contrib.scale_by_ademamix contrib.scale_by_adopt contrib.scale_by_cocob
    contrib.scale_by_galore contrib.scale_by_simplified_ademamix
""")

# Whose update asks for more than gradients: the names of what it asks for, of "value", "grad", "value_fn", "obj_fn".
ASK_FOR_THE_LOSS: dict[str, tuple[Callable[[], Any], str]] = {
    "polyak_sgd": (lambda: optax.polyak_sgd(), "value"),
    "scale_by_polyak": (lambda: optax.scale_by_polyak(), "value"),
    "lbfgs": (lambda: optax.lbfgs(memory_size=2), "value grad value_fn"),
    "scale_by_lbfgs": (lambda: optax.scale_by_lbfgs(memory_size=2), ""),
    "scale_by_backtracking_linesearch": (lambda: optax.scale_by_backtracking_linesearch(4), "value grad value_fn"),
    "scale_by_zoom_linesearch": (lambda: optax.scale_by_zoom_linesearch(4), "value grad value_fn"),
    "contrib.momo": (lambda: optax.contrib.momo(), "value"),
    "contrib.momo_adam": (lambda: optax.contrib.momo_adam(), "value"),
    "contrib.reduce_on_plateau": (lambda: optax.contrib.reduce_on_plateau(patience=1), "value"),
    "contrib.hutchinson_estimator_diag_hessian": (
        lambda: optax.contrib.hutchinson_estimator_diag_hessian(), "obj_fn",
    ),
    "contrib.sophia": (lambda: optax.contrib.sophia(RATE, update_interval=2), "obj_fn"),
}  # fmt: skip

# Called with arguments of their own.
WITH_ARGUMENTS: dict[str, Callable[[], Any]] = {
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, jax.random.key(3)),
    "apply_if_finite": lambda: optax.apply_if_finite(adam(), 2),
    "chain": lambda: optax.chain(optax.clip(0.5), adam()),
    "clip": lambda: optax.clip(0.1),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.1),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.1),
    "conditionally_mask": lambda: optax.conditionally_mask(adam(), sometimes),
    "conditionally_transform": lambda: optax.conditionally_transform(adam(), sometimes),
    "ema": lambda: optax.ema(0.9),
    "flatten": lambda: optax.flatten(adam()),
    "freeze": lambda: optax.freeze({"matrix": True, "vector": False, "scalar": False}),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(RATE, 9)),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.sgd)(RATE),
    "masked": lambda: optax.masked(adam(), matrices),
    "multi_transform": lambda: optax.multi_transform({"trained": adam(), "kept": optax.set_to_zero()}, first_only),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.5)), ("adam", adam())),
    "partition": lambda: optax.partition({"trained": adam(), "kept": optax.sgd(RATE)}, first_only),
    "scale": lambda: optax.scale(-RATE),
    "scale_by_schedule": lambda: optax.scale_by_schedule(optax.linear_schedule(-RATE, 0.0, 5)),
    "selective_transform": lambda: optax.selective_transform(
        adam(), freeze_mask={"matrix": False, "vector": True, "scalar": False}
    ),
    "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
    "stateless": lambda: optax.stateless(lambda updates, params: jax.tree.map(lambda u: -RATE * u, updates)),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(step_and_decay),
    "trace": lambda: optax.trace(0.9),
    "with_extra_args_support": lambda: optax.with_extra_args_support(adam()),
    "contrib.mechanize": lambda: optax.contrib.mechanize(adam()),
    "contrib.sam": lambda: optax.contrib.sam(
        optax.sgd(RATE), optax.chain(optax.contrib.normalize(), optax.sgd(0.1)), reset_state=False
    ),
    "contrib.scale_by_muon": lambda: optax.masked(
        optax.contrib.scale_by_muon(weight_dimension_numbers=muon_dims), matrices
    ),
    "contrib.schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(RATE), RATE),
    "contrib.split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(adam()),
    "lookahead": lambda: lookahead(),
}

# What `zero` cannot wrap, with a part of the reason it gives.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "contrib.dpsgd": (lambda: optax.contrib.dpsgd(RATE, 0.1, 1.0, 0), "batch dimension in the 0th axis"),
    "contrib.differentially_private_aggregate": (
        lambda: optax.contrib.differentially_private_aggregate(0.1, 1.0, jax.random.key(0)),
        "batch dimension in the 0th axis",
    ),
    "measure_with_ema": (lambda: optax.measure_with_ema(optax.tree.norm, 0.9), "measures"),
    "monitor": (lambda: optax.monitor({"norm": optax.tree.norm}), "another structure after update than after init"),
}  # fmt: skip

# Functions that say nothing of what they return, and make no transformation.
NO_FACTORIES = listed("""
    bias_correction matrix_inverse_pth_root sigmoid_binary_cross_entropy update_infinity_moment update_moment
    update_moment_per_elem_norm contrib.schedule_free_eval_params
""")

# Fail on a scalar parameter, or make an array of one element of it, with plain optax too.
NO_SCALARS = listed("""
    sm3 scale_by_sm3 scale_by_distance_over_gradients contrib.dpsgd contrib.differentially_private_aggregate
""")

# Say that they return a function, which makes the transformation.
FACTORIES_OF_FACTORIES = ("inject_hyperparams", "inject_stateful_hyperparams")

TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    **{name: (lambda name=name: named(name)(RATE)) for name in WITH_A_RATE},
    **{name: (lambda name=name: named(name)()) for name in AS_THEY_ARE},
    **{name: make for name, (make, _) in ASK_FOR_THE_LOSS.items()},
    **WITH_ARGUMENTS,
}
