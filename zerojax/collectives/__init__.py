"""How one placed leaf moves between devices: all-gather of a weight, reduction of a gradient, plain or quantised.

Knows a `Placement` and the axes of `shard_map`; hands on `Collectives`, a record of pure functions, each with its cost
in bytes.
"""
