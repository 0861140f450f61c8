#!/bin/bash
# One process per GPU under Open MPI; version 5 needs `pip install mpi4py`: HOSTS=a:8,b:8 examples/launch/openmpi.sh
set -eu
mpirun --host "${HOSTS:?name them with their GPUs: HOSTS=a:8,b:8}" --map-by ppr:8:node \
  python examples/train_gpt.py --skip-plain --checkpoint "${CHECKPOINTS:-$HOME/run}" "$@"
