#!/bin/bash
# No launcher: the same line on each of N hosts, with its number from 0; host 0 is the coordinator.
#   COORDINATOR=host0:8476 NUM_PROCESSES=2 PROCESS_ID=0 examples/launch/coordinator.sh
set -eu
exec python "$(dirname "$0")/../train_gpt.py" --skip-plain --checkpoint "${CHECKPOINTS:-$HOME/run}" \
  --coordinator "${COORDINATOR:?HOST:PORT of process 0}" --num-processes "${NUM_PROCESSES:?}" \
  --process-id "${PROCESS_ID:?from 0}" "$@"
