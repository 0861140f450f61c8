"""Operations that are done on the shards, or after the gather, and leave a parameter in stored form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import _compat
from zerojax.gather.deferred import Deferred, apply_held, defer, is_held, plain, without_gradient
from zerojax.gather.equation import Equation
from zerojax.gather.primitives import layer_flags
from zerojax.gather.stored import Stored
from zerojax.gather.views import Cast, View, on_shards, seen
from zerojax.layout.placement import Placement


def view_rule(e: Equation) -> list[Any]:
    """An operation on the shape of one operand is applied after the gather."""
    (param,) = e.inputs
    if isinstance(param, Deferred):
        deferred = defer(e.eqn, e.inputs, {})
        return e.bound()([plain(param)]) if deferred is None else [deferred]
    grows = tuple(e.eqn.outvars[0].aval.shape) == (1, *param.aval.shape) and id(param.root) not in param.scope.in_packs
    if grows and _only_cast(param) and _can_be_joined(param):
        placement = param.placement  # about to be joined with others to a stack
        if placement.is_sharded:
            stack = None if param.secondary_stack is None else param.secondary_stack + 1
            return [_mapped(e, param, lambda x: lax.expand_dims(x, (0,)), _with_leading_dim(placement, 1), stack)]
    by_layer = len(param.aval.shape) > 2 and layer_flags(e.eqn, param.aval.shape[0]) == [True]
    if by_layer and is_stack(param) and (deferred := defer(e.eqn, e.inputs, {})) is not None:
        return [deferred]
    return [param.viewed(View(e.eqn))]


def rearranged(param: Stored) -> Stored:
    """The parameter with its view moved onto the shards, but for casts; as it is where the view needs the full array.

    For what takes layers of it: the view must not be applied to all of them first.
    """
    root = param.root
    if _only_cast(param) or root.is_secondary or not root.placement.is_sharded:
        return param
    placement, ops, casts = root.placement, [], []
    for op in param.view:
        if not isinstance(op, View):
            casts.append(op)
            continue
        on = on_shards(op, placement)
        if on is None:
            return param
        ops.append(on[0])
        placement = on[1]

    shard, grad_input, feedback = root.map_shards(lambda held: jax.tree.map(lambda x: seen(ops, x), held))
    return param.scope.enter(shard, grad_input, placement, feedback=feedback).under(casts)


def stop_rule(e: Equation) -> list[Any]:
    """`stop_gradient`."""
    return [without_gradient(e.inputs[0])]


def cast_rule(e: Equation) -> list[Any]:
    """A float is narrowed before the gather, since the wire then carries less, and widened after it."""
    (param,) = e.inputs
    if isinstance(param, Deferred):
        return view_rule(e)
    new = jnp.dtype(e.eqn.params["new_dtype"])
    if jnp.issubdtype(param.aval.dtype, jnp.integer) and jnp.issubdtype(new, jnp.floating):
        return [param.viewed(Cast(new))]  # a frozen quantised weight: gathered as it is, also in the backward pass
    if not jnp.issubdtype(new, jnp.inexact) or not jnp.issubdtype(param.aval.dtype, jnp.inexact):
        return apply_held(e.bound(), e.inputs)
    held = jnp.dtype(param.placement.dtype)
    if new == param.aval.dtype:  # already cast, where a secondary partition was made ahead of the region
        return [param]
    widens = new.itemsize > held.itemsize  # done before the gather, it would widen the wire
    if widens or not param.placement.axes or param.is_secondary or param.aval.dtype != held:
        return [param.viewed(Cast(new))]
    return [e.scope.cast(param, new)]


def slice_rule(e: Equation) -> list[Any]:
    """A slice along unsharded dims is taken from the shards: only the part that is used travels."""
    param, *indices = e.inputs
    if not is_held(param) or any(map(is_held, indices)):
        return apply_held(e.bound(), [param, *map(plain, indices)])
    if isinstance(param, Stored):
        param = rearranged(param)
    if e.eqn.primitive.name == "gather":
        return _looked_up(e, param, indices[0])
    before, after, params = param.aval.shape, e.eqn.outvars[0].aval.shape, e.eqn.params
    strides = params.get("strides") or (1,) * len(before)
    if after[1:] == before[1:] and strides[0] == 1:
        start = indices[0] if indices else params["start_indices"][0]
        if isinstance(param, Stored) and is_stack(param):
            return [_layers_of(param, start, after[0], e)]
        if isinstance(param, Deferred) and param.length is not None and param.has_all_layers:
            stacks = [x for x, along in zip(param.leaves, param.stacked, strict=True) if along]
            if all(not is_held(x) or (isinstance(x, Stored) and is_stack(x)) for x in stacks):
                return [param.map_layers(lambda x: _layers_of(x, start, after[0], e), after[0])]
    if isinstance(param, Deferred):
        return e.bound()([plain(param), *indices])
    dim, placement = param.placement.dim, param.placement
    if param.is_secondary or dim is None or param.view or after[dim] != before[dim] or strides[dim] != 1:
        return apply_held(e.bound(), e.inputs) if indices else view_rule(e)

    def cut(x: jax.Array) -> jax.Array:
        # What is cut keeps its own extent along the dim that is split.
        if indices:
            return lax.dynamic_slice(x, indices, (*after[:dim], x.shape[dim], *after[dim + 1 :]))
        start, limit = list(params["start_indices"]), list(params["limit_indices"])
        limit[dim] = x.shape[dim]
        return lax.slice(x, start, limit, strides)

    return [_mapped(e, param, cut, placement.with_shape(after), None)]


def _looked_up(e: Equation, param: Any, indices: Any) -> list[Any]:
    """A lookup of entries that all devices ask for: of the shards, where it takes the dim that is split whole."""
    numbers, sizes = e.eqn.params["dimension_numbers"], list(e.eqn.params["slice_sizes"])
    dim = param.placement.dim if isinstance(param, Stored) and is_stack(param) else None
    kept = [d for d in range(len(sizes)) if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    split = any(entry is not None for entry in param.placement.spec) if isinstance(param, Stored) else True
    if split or dim is None or param.is_secondary or dim not in kept or sizes[dim] != param.placement.shape[dim]:
        return apply_held(e.bound(), e.inputs)
    after, new = tuple(e.eqn.outvars[0].aval.shape), numbers.offset_dims[kept.index(dim)]

    def pick(x: jax.Array) -> jax.Array:
        local = (*sizes[:dim], x.shape[dim], *sizes[dim + 1 :])
        return _compat.bind_equation(e.eqn, [x, indices], {**e.eqn.params, "slice_sizes": local})[0]

    spec = (None,) * len(after)
    placement = dataclasses.replace(param.placement, shape=after, dim=new, spec=spec)
    return [_mapped(e, param, pick, placement, None)]


def is_stack(param: Stored) -> bool:
    """Whether layers of it can be taken from what is held."""
    return _only_cast(param) and param.placement.dim not in (None, 0) and param.secondary_stack != 0


def _layers_of(x: Any, start: Any, count: int, e: Equation) -> Any:
    """Some layers of an array or of a stored stack, from `start`."""

    def cut(x: jax.Array) -> jax.Array:
        if isinstance(start, int):
            return lax.slice_in_dim(x, start, start + count)
        return lax.dynamic_slice_in_dim(x, start, count)

    if not isinstance(x, Stored):
        return cut(x)
    return _mapped(e, x, cut, x.placement.with_shape((count, *x.placement.shape[1:])), x.secondary_stack)


def squeeze_rule(e: Equation) -> list[Any]:
    """Dropping a leading dim of one layer is done on the shards, so that what follows can be too."""
    (x,) = e.inputs
    if tuple(e.eqn.params["dimensions"]) != (0,):
        return view_rule(e)

    def dropped(x: Any) -> Any:
        if not isinstance(x, Stored):
            return lax.squeeze(x, (0,))
        stack = None if x.secondary_stack is None else x.secondary_stack - 1
        return _mapped(e, x, lambda x: lax.squeeze(x, (0,)), x.placement.without_leading_dim(), stack)

    if isinstance(x, Stored):
        return [dropped(x)] if is_stack(x) else view_rule(e)
    if not x.has_all_layers and x.layers == 1:  # taken from a stack
        return [x.map_layers(dropped, 0)]
    return view_rule(e)


def stack_rule(e: Equation) -> list[Any]:
    """Parameters of one placement joined along dim 0 are a stack in stored form, as if it had been stored so."""
    params, joins = e.inputs, e.eqn.primitive.name == "concatenate"
    if not all(isinstance(x, Stored) and _only_cast(x) and _can_be_joined(x) and x.feedback is None for x in params):
        return _joined_later(e)
    first = params[0]
    alike = {
        (dataclasses.replace(x.placement, path="", reason="", trainable=True, quantize_above=None),
         x.placement.is_quantized, x.secondary_stack) for x in params
    }  # fmt: skip
    if len(alike) > 1 or first.placement.dim is None or (joins and first.placement.dim == 0):
        return _joined_later(e)
    join = jnp.concatenate if joins else jnp.stack
    placement = first.placement
    if joins:
        placement = placement.with_shape((len(params) * placement.shape[0], *placement.shape[1:]))
    else:
        placement = _with_leading_dim(placement, len(params))
    if len(params) > 1:
        placement = dataclasses.replace(placement, path=f"{placement.path} and {len(params) - 1} more")
    shard = join([x.shard for x in params])
    if all(x.grad_input is x.shard for x in params):
        grad_input = shard
    elif all(x.grad_input is None for x in params):
        grad_input = None
    else:
        like = next(x.grad_input for x in params if x.grad_input is not None)
        grad_input = join([jnp.zeros_like(like) if x.grad_input is None else x.grad_input for x in params])
    stack = first.secondary_stack
    stack = stack if joins or stack is None else stack + 1
    return [e.scope.enter(shard, grad_input, placement, secondary_stack=stack).under(first.view)]


def _can_be_joined(param: Stored) -> bool:
    """Whether what is held of it is one array with the dims of the leaf."""
    return not param.is_secondary or isinstance(param.shard, jax.Array)


def _joined_later(e: Equation) -> list[Any]:
    """Parameters that are not alike are joined where the result is used, if it is made of nothing of this device's."""
    deferred = defer(e.eqn, e.inputs, e.scope.broadcasts) if all(e.replicated) else None
    return apply_held(e.bound(), e.inputs) if deferred is None else [deferred]


def _with_leading_dim(placement: Placement, extent: int) -> Placement:
    assert placement.dim is not None
    shape, spec = (extent, *placement.shape), (None, *placement.spec)
    joined = dataclasses.replace(placement, shape=shape, dim=placement.dim + 1, spec=spec)
    return joined if placement.is_quantized else joined.unquantized()  # a bias is no matrix under a further dim


def _only_cast(param: Stored) -> bool:
    return all(isinstance(op, Cast) for op in param.view)


def _mapped(
    e: Equation, param: Stored, op: Callable[[jax.Array], jax.Array], placement: Placement, stack: int | None
) -> Stored:
    """An operation on every array in which the parameter is held; a parameter of its own, under the same casts."""
    shard, grad_input, feedback = param.map_shards(lambda held: jax.tree.map(op, held))
    entered = e.scope.enter(shard, grad_input, placement, feedback=feedback, secondary_stack=stack)
    return entered.under(param.view)
