"""Any optax transformation on shards: state placement, master weights, matrix optimizers, low-precision moments.

Knows layouts; hands on `zero`, an optax transformation in and out.
"""
