#!/bin/bash
# One process per node, which has all of its GPUs: sbatch examples/launch/slurm_per_node.sh
# See slurm_per_gpu.sh for what happens when the time is over.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
srun --kill-on-bad-exit=1 python examples/train_gpt.py --skip-plain --checkpoint "${CHECKPOINTS:-$HOME/run}" "$@"
status=$?
[ "$status" -ne 75 ] || scontrol requeue "$SLURM_JOB_ID"
exit "$status"
