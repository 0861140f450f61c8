"""`value_and_grad` and `apply`: from one device's loss to global values and sharded gradients.

Knows layouts, collectives and gather on use; hands on gradient functions on global arrays.
"""
