"""Stochastic rounding in both hops of the gradient reduction: the draws of one hop say nothing about the other's."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.collectives.plain import plain_collectives
from zerojax.collectives.quantized import quantized_gradients
from zerojax.config import QuantFormat
from zerojax.layout.placement import place

AXES, NODES, LOCAL = ("node", "local"), 2, 4


def test_two_hops_of_stochastic_rounding_are_unbiased_on_every_shard():
    """Each hop rounds without bias only if its draws are independent of what the hop before rounded up."""
    mesh = zerojax.make_mesh(NODES, LOCAL)
    # int8 steps of 1 for the value 2.5: up or down with equal chance. The sums, 8 or 12 with all devices alike, meet
    # int4 steps of 508 / 7: drawn again with the same numbers, the larger sums would be rounded up more often.
    value, largest = 2.5, 127.0
    leaf = np.full((mesh.size, 128 * 128), value, np.float32)
    leaf[:, ::16] = largest
    placement = place(
        "leaf", leaf.shape, jnp.dtype("float32"), axes=AXES, num_shards=mesh.size, min_shard_size=0, quantize_above=0
    )
    formats = QuantFormat(8, 32), QuantFormat(4, 32)  # blocks of one size: element for element the same counters
    collectives = quantized_gradients(plain_collectives(), formats, AXES, rounding="stochastic")
    reduce = functools.partial(collectives.reduce, placement=placement)
    summed = jax.jit(
        jax.shard_map(reduce, mesh=mesh, in_specs=P(), out_specs=placement.data_spec, check_vma=False)
    )  # fmt: skip
    total = summed(leaf)
    step = LOCAL * largest / 7 * (1 + 2**-7)  # the scale in bfloat16, rounded up
    for shard in total.addressable_shards:
        drawn = np.delete(np.asarray(shard.data), np.s_[::16], axis=None)
        # A sum over two nodes: two roundings to neighbouring steps, whose deviation is half a step at most. Five
        # standard deviations of the mean are 0.9, a sixtieth of the step; one set of draws for both hops costs 4.
        deviation = NODES * step / 2 / math.sqrt(drawn.size)
        assert abs(drawn.mean() - NODES * LOCAL * value) < 5 * deviation, shard.index
    # Thrice the gradient is another one, of another step, say: the same levels, and draws of its own.
    again = np.asarray(summed(3 * leaf)) / 3
    drawn = [np.delete(np.asarray(x), np.s_[::16], axis=None) for x in (total, again)]
    assert abs(np.corrcoef(*drawn)[0, 1]) < 5 / math.sqrt(drawn[0].size)  # one set of draws: 1
