"""One compiled training step and its state: loss scaling, non-finite values, activation checkpointing.

Composes gradients and optimizer; hands on `make_train_step` and `TrainState`.
"""
