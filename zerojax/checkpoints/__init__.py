"""Training state on disk, as logical arrays that restore into any mesh, stage or number of devices.

Knows `TrainState` and layouts; hands on `save` and `restore`.
"""
