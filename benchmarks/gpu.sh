#!/usr/bin/env bash
# One session on every visible GPU, a shard on each:
#     bash benchmarks/gpu.sh OUT_DIR BUDGET_S [options of `run`]
# Called again with the same OUT_DIR, also on another number of GPUs, it goes on. It exits with 3 while cells are left.
set -uo pipefail
out=${1:?OUT_DIR is required} budget=${2:?BUDGET_S is required}
shift 2
mkdir -p "$out"
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd, -)}"
shards=${#gpus[@]}
also=()
for file in "$out"/*.jsonl; do
    [[ -e $file ]] && also+=(--also "$file")
done
running=()
mapfile -t cpus < <(python -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep="\n")')
each=$((${#cpus[@]} / shards)) # each shard has its own, so that the races of one are not disturbed by compiles of another
for at in "${!gpus[@]}"; do
    name=$out/shard-$((at + 1))-of-$shards
    own=$(IFS=, && echo "${cpus[*]:$((at * each)):$each}")
    CUDA_VISIBLE_DEVICES=${gpus[at]} taskset -c "$own" python -m benchmarks run --device cuda --shard "$((at + 1))/$shards" \
        --budget "${budget}s" --resume "${also[@]}" --out "$name.jsonl" "$@" >>"$name.txt" 2>&1 &
    running+=($!)
done
ended=0
for process in "${running[@]}"; do
    wait "$process" || { code=$?; ((code > ended)) && ended=$code; }
done
tail -n 3 "$out"/shard-*.txt
exit "$ended"
