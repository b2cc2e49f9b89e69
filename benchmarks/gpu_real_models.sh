#!/usr/bin/env bash
# The held-out models on every visible GPU, one model on each at a time; 16 CPUs for each GPU.
#     bash benchmarks/gpu_real_models.sh OUT_DIR MINUTES [options of `held-out`]
# Writes OUT_DIR/held_out.jsonl as it goes, and held_out.md; exits with 3 while models are left: repeat until 0. A model
# takes about 6 minutes with every way, 3 without auto-full (--configs default,reduce-overhead,max-autotune,auto).
set -u
out="${1:?OUT_DIR is required}" minutes="${2:?MINUTES is required}"
mkdir -p "$out"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
exec python3 -m benchmarks held-out --out "$out" --work "${BENCH_WORK:-/tmp/held_out}" --max-minutes "$minutes" --device cuda "${@:3}"
