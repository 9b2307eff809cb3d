#!/bin/bash
# Slurm: a run on the eight GPUs of one machine.
#
#   sbatch examples/scale/clusters/slurm.sh gpus-8-separate.yaml
#
# The job is requeued when its machine is lost or its time is over, and the same command resumes from the last checkpoint:
# runs/ has to be on a file system that all machines see.
#SBATCH --job-name=turnwise
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@300
#SBATCH --output=%x-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this file with sbatch}"
layout=${1:?name a layout, such as gpus-8-separate.yaml}
shift
# vLLM pins packages of its own: the interpreter of the environment that has it.
export TURNWISE_VLLM_PYTHON=${TURNWISE_VLLM_PYTHON:-.venv-vllm/bin/python}
# SIGTERM, five minutes before the end, lets the run write a checkpoint of the last step.
.venv/bin/python -m turnwise train examples/scale/train.yaml "examples/scale/$layout" "$@" &
run=$!
trap 'kill -TERM "$run"; wait "$run" || true; scontrol requeue "$SLURM_JOB_ID"' TERM
wait "$run"
