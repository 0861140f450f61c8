"""More ways in which programs take layers from stacks: looked up, joined, split, rearranged, merged with adapters."""

import jax
import jax.numpy as jnp
from jax import lax
from layered_programs import LENGTH, layer, layered, run, told
from models import ramp
from weight_programs import layers, mean


def heads(h, w):
    """A square layer of three heads of four."""
    return jnp.tanh(jnp.einsum("bd,dhk->bhk", h, w).reshape(h.shape)) * ramp(12)


def squares(h, stack):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w) * ramp(12), None), h, stack)[0]


@layered
def layers_taken_by_an_index(p, x):
    def body(i, h):
        h = layer(h, jnp.take(p["s"], i, axis=0), jnp.take(p["t"], i, axis=0, mode="clip"))
        return layer(h, p["s"].at[i].get(mode="promise_in_bounds"), p["t"].at[i].get(mode="fill", fill_value=3.0))

    return mean(lax.fori_loop(0, LENGTH, body, x)) + mean(x @ jnp.take(p["s"], 1, axis=0))


@layered
def layers_beyond_the_end(p, x):
    def body(h, i):
        picked = p["t"].at[i].get(mode="fill", fill_value=0.5)
        return layer(h, jnp.take(p["s"], i, axis=0, mode="clip"), picked), None

    return mean(lax.scan(body, x, jnp.array([0, 2, 4]))[0])


@layered
def layers_in_another_order(p, x):
    order = jnp.array([2, 0, 2])
    return mean(run(p["s"][order], jnp.take(p["t"], order, axis=0), x)) + mean(p["w"][jnp.array([3, 5, 3])])


@layered
def low_rank_updates_made_before_the_loop(p, x):
    s = p["s"] + 0.1 * (p["a"] @ p["c"])
    t = p["t"] + 0.1 * jnp.einsum("lir,lro->lio", p["a"], p["c"]).transpose(0, 2, 1)
    return mean(run(s, t, x))


@layered
def low_rank_updates_of_weights_one_by_one(p, x):
    for i, name in enumerate("wu"):
        x = jnp.tanh(x @ (p[name] + p["a"][i] @ p["c"][i]) @ p["v"]) * ramp(12)
    return mean(x)


@layered
def weights_joined_for_one_product(p, x):
    joined = jnp.concatenate([p["s"], p["t"].transpose(0, 2, 1)], axis=-1)

    def body(h, w):
        a, b = jnp.split(h @ w, 2, axis=-1)
        return jnp.tanh(a[:, :12] * b[:, 4:]) * ramp(12), None

    return mean(lax.scan(body, x, joined)[0])


@layered
def weights_split_before_the_loop(p, x):
    left, right = jnp.split(p["s"], 2, axis=-1)
    up, down = jnp.split(p["t"], 2, axis=1)

    def body(h, ws):
        return jnp.tanh(h @ ws[0] @ ws[2] + 2 * h @ ws[1] @ ws[3]) * ramp(12), None

    return mean(lax.scan(body, x, (left, right, up, down))[0])


@layered
def columns_of_a_stack(p, x):
    return mean(run(p["s"][:, :, 2:10], p["t"][:, 4:12], x)) + mean(squares(x, p["g"][::2]))


@layered
def layers_from_the_last_to_the_first(p, x):
    return mean(run(jnp.flip(p["s"], 0), p["t"][::-1], x))


@layered
def layers_in_the_middle(p, x):
    stack = jnp.moveaxis(p["middle"], 1, 0)
    first = mean(lax.scan(lambda h, w: (jnp.tanh(h @ w @ w.T) * ramp(12), None), x, stack)[0])
    return first + mean(lax.fori_loop(0, LENGTH, lambda i, h: layer(h, p["middle"][:, i], p["t"][i]), x))


@layered
def groups_of_layers(p, x):
    groups = p["g"].reshape(2, 2, 12, 12)
    nested = lax.scan(lambda h, group: (squares(h, group), None), x, groups)[0]
    return mean(nested) + mean(squares(x, groups.reshape(4, 12, 12)))


@layered
def heads_reshaped_before_the_loop(p, x):
    return mean(lax.scan(lambda h, w: (heads(h, w), None), x, p["g"].reshape(4, 12, 3, 4))[0])


@layered
def trees_of_stacks_in_nested_loops(p, x):
    tree = {"pair": (p["s"], p["t"]), "scale": p["scale"]}

    def body(h, now):
        (s, t), scale = now["pair"], now["scale"]
        return lax.scan(lambda h, _: (layer(h, s, t) * scale, None), h, None, length=2)[0], None

    return mean(lax.scan(body, x, tree)[0])


@layered
def loop_in_a_branch_in_a_loop(p, x):
    def body(h, i):
        return lax.cond(i % 2 == 0, lambda h: run(p["s"], p["t"], h), lambda h: h * 2, h), None

    return mean(lax.scan(body, x, jnp.arange(3))[0])


@layered
def next_layer_looked_up_ahead(p, x):
    def body(i, h):
        later = jnp.minimum(i + 1, LENGTH - 1)
        return layer(h, p["s"][i], p["t"][i]) + layer(h, p["s"][later], p["t"][later])

    return mean(lax.fori_loop(0, LENGTH, body, x))


@layered
def layers_mapped_over(p, x):
    return mean(lax.map(lambda st: layer(x, *st), (p["s"], p["t"])))


@layered
def one_weight_of_several_in_each_iteration(p, x):
    def body(i, h):
        return lax.switch(i, [lambda h, n=n: jnp.tanh(h @ p[n] @ p["v"]) * ramp(12) for n in "wu"], h)

    return mean(lax.fori_loop(0, 2, body, x))


@layered
def squares_of_all_weights(p, x):
    penalty = sum(jnp.sum(w**2) for w in jax.tree.leaves(p)) + jnp.max(jnp.abs(p["s"])) + p["g"].sum(axis=(0, 2))[3]
    return mean(run(p["s"], p["t"], x)) + 0.01 * penalty


@layered
def padded_layers(p, x):
    s = jnp.pad(p["s"], ((0, 0), (0, 0), (0, 3)), constant_values=0.1)
    t = jnp.pad(p["t"], ((0, 0), (1, 2), (0, 0)))
    return mean(run(s, t, x))


@layered
def layers_tied_by_transposition(p, x):
    return mean(run(p["s"], p["s"].transpose(0, 2, 1), x)) + mean(run(p["t"].mT, p["t"], x))


@layered
def a_list_of_layers(p, x):
    blocks = [{"s": p["s"][i], "t": p["t"][i]} for i in range(LENGTH)]
    for block in jax.tree.map(lambda w: w * 0.9, blocks):
        x = layer(x, block["s"], block["t"])
    return mean(x)


@layered
def layers_chosen_by_a_mask(p, x):
    active = jnp.array([True, False, True])[:, None, None]
    return mean(run(jnp.where(active, p["s"], 0.5 * p["s"]), jnp.where(active, p["t"], p["s"].mT), x))


@layered
def mixture_of_many_stacks(p, x):
    s = 0.4 * p["s"] + 0.3 * p["t"].mT + 0.2 * (p["a"] @ p["c"])
    s = s + p["scale"][:, None, None] * p["middle"].transpose(1, 0, 2)
    return mean(run(s, p["t"], x))


@told
def all_layers_in_one_product(p, x):
    return mean(jnp.einsum("lij,bi->lbj", p["s"], x))


@told
def vmapped_layers(p, x):
    return mean(jax.vmap(lambda s, t, h: layer(h, s, t))(p["s"], p["t"], jnp.stack([x, 2 * x, 3 * x])))


@told
def layer_that_differs_between_devices(p, x):
    return mean(layer(x, p["s"][jnp.argmax(x[0]) % LENGTH], p["t"][0]))


@told
def stack_with_a_layer_replaced(p, x):
    return mean(layers(x, p["s"].at[1].set(0.1), p["t"]))


@told
def next_weight_carried_ahead(p, x):
    def body(carry, i):
        h, s, t = carry
        return (layer(h, s, t), p["s"][jnp.minimum(i + 1, 2)], p["t"][jnp.minimum(i + 1, 2)]), None

    return mean(lax.scan(body, (x, p["s"][0], p["t"][0]), jnp.arange(LENGTH))[0][0])


@told
def layers_returned_by_a_loop(p, x):
    h, ws = lax.scan(lambda h, st: (layer(h, *st), st[0] * 2), x, (p["s"], p["t"]))
    return mean(h) + mean(ws)
