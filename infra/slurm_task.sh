#!/usr/bin/env bash
# One process of a training under Slurm; srun starts it in a job of `slurm.sh`: slurm_task.sh TURN WORDS...
# The folder TURN is there as long as the job may train. The process notes its exit code in it. When the folder is gone,
# the process saves and ends: srun and slurmd of this node may be dead, so that Slurm cannot end it.
set -euo pipefail
# shellcheck source=infra/carry.sh
. "$(dirname "${BASH_SOURCE[0]}")/carry.sh"

readonly LOOK_SECONDS=5
readonly SAVING_SECONDS=120 # given to the last checkpoint

guard() {
  trap '' TERM # it is meant for the training
  # Without the folder above, the file system does not answer, and nothing is known.
  while [[ -d $turn || ! -d ${turn%/*} ]]; do seconds "$LOOK_SECONDS"; done
  echo "slurm_task.sh: the job $SLURM_JOB_ID is over; its process $SLURM_PROCID saves and ends" >&2
  kill -TERM "$1"
  seconds "$SAVING_SECONDS"
  kill -KILL "$1"
}

# Waits without a child, which would outlive this process.
seconds() { read -rt "$1" <> <(:) || true; }

turn=$1
carry "$turn/$SLURM_PROCID" guard "${@:2}"
