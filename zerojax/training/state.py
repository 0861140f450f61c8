"""`TrainState`: everything that a training loop carries from step to step, and that a checkpoint holds.

All its scalars live on the mesh from the start, replicated: a step counter on one device would have the step compiled a
second time.
"""

from __future__ import annotations


