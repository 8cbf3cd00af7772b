#!/usr/bin/env bash
# The whole recipe on one machine with GPUs: record the walks while the model compiles, train,
# evaluate. What training/export.py then makes of average.safetensors is the shipped file.
#   bash training/run.sh training/version3.json /tmp/world 1000
set -euo pipefail
recipe=$1 out=$2 seconds=$3
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$out"
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
set -m  # a process group for the recorder: its workers and their engines end with it
OMP_NUM_THREADS=1 nice python3 "$here/data.py" --recipe "$recipe" --out "$out/walks" >"$out/data.log" 2>&1 &
recorder=$!
set +m
trap 'kill -KILL -- -$recorder 2>/dev/null || true' EXIT  # it must not outlive the training; engines ignore a mere TERM
torchrun --standalone --nproc-per-node="$gpus" "$here/train.py" \
  --recipe "$recipe" --walks "$out/walks" --out "$out/run" --seconds "$seconds" >"$out/train.log" 2>&1
python3 "$here/evaluate.py" --walks "$out/walks" --weights "$out/run/average.safetensors" \
  --out "$out/run" --sweep >"$out/evaluate.log" 2>&1
