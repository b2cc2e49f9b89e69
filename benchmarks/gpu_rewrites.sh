#!/usr/bin/env bash
# Whole cases with and without rewrites: a shard of them on every visible GPU, each case in its own process:
#     bash benchmarks/gpu_rewrites.sh OUT_DIR BUDGET_S [options of `rewrites`]
# Called again with the same OUT_DIR it goes on. It exits with 3 while cases are left. `--modes reduce-overhead` leaves
# out the modes that tune, which take minutes for a model. For the suite's own cases use gpu.sh with the peer auto-no*.
set -uo pipefail
out=${1:?OUT_DIR is required} budget=${2:?BUDGET_S is required}
shift 2
mkdir -p "$out"
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd, -)}"
shards=${#gpus[@]}
running=()
for at in "${!gpus[@]}"; do
    CUDA_VISIBLE_DEVICES=${gpus[at]} python -m benchmarks rewrites --shard "$((at + 1))/$shards" \
        --budget-s "$budget" --out "$out" "$@" >>"$out/shard-$((at + 1)).txt" 2>&1 &
    running+=($!)
done
ended=0
for process in "${running[@]}"; do
    wait "$process" || { code=$?; ((code > ended)) && ended=$code; }
done
python -m benchmarks rewrites --report --out "$out" | tee "$out/rewrites.md"
exit "$ended"
