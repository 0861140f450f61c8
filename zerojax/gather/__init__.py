"""Gather on use: an unmodified loss evaluated with parameters in stored form, each gathered where it is used.

Knows jaxprs and `Collectives`; hands on `evaluate` for the runtime and what it will do with each parameter for the
planner.
"""
