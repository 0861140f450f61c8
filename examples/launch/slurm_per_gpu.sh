#!/bin/bash
# One process per GPU: sbatch examples/launch/slurm_per_gpu.sh
# Slurm sends SIGTERM two minutes before the time is over (--signal): the step in hand is saved, the job ends with
# status 75 and is put back into the queue, where it resumes.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
srun --kill-on-bad-exit=1 python examples/train_gpt.py --skip-plain --checkpoint "${CHECKPOINTS:-$HOME/run}" "$@"
status=$?
[ "$status" -ne 75 ] || scontrol requeue "$SLURM_JOB_ID"
exit "$status"
