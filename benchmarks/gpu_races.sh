#!/usr/bin/env bash
# What only a GPU shows of tests, races and serving, in one call of nine minutes on four GPUs, 16 CPUs for each:
#     bash benchmarks/gpu_races.sh OUT_DIR [SECONDS]
# Called again with the same OUT_DIR, the studies go on. Everything lies in OUT_DIR, a log for each job.
set -u
out=${1:?OUT_DIR is required} limit_s=${2:-530}
mkdir -p "$out"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

on_gpu() { # INDEX NAME COMMAND...
    CUDA_VISIBLE_DEVICES=$1 timeout "$limit_s" taskset -c "$(($1 * 16))-$(($1 * 16 + 15))" "${@:3}" >"$out/$2.txt" 2>&1
    echo "$2: exit $?"
}
background() { on_gpu 0 background python3 -m benchmarks background --models qwen3_decode,whisper_base --out "$out/background"; }
ranks() { # NCCL needs two GPUs, on which nothing else runs meanwhile
    CUDA_VISIBLE_DEVICES=1,3 timeout "$limit_s" taskset -c 16-31,48-63 python3 -m pytest tests/gpu/test_gpu_shared_race.py \
        -q --benchmark-disable -p no:cacheprovider >"$out/ranks.txt" 2>&1
    echo "ranks: exit $?"
}
serving() {
    on_gpu 1 sealed python3 -m benchmarks sealed --device cuda --out "$out/sealed.md"
    on_gpu 1 pinned python3 -m benchmarks pinned --device cuda --out "$out/pinned.md"
}
held_out() {
    on_gpu 2 held_out python3 -m benchmarks held-out --device cuda --out "$out/held_out" --max-minutes "$((limit_s / 60 - 1))" \
        --models modernbert,caformer_s18,hrnet_w18_small --configs eager,default,reduce-overhead,max-autotune,auto
}
tests() {
    on_gpu 3 tests python3 -m pytest tests/gpu tests/torch_internals tests/sealing -n 8 -q --benchmark-disable \
        --show-capture=no -p no:cacheprovider --junitxml="$out/tests.xml"
}
background & held_out &
ranks
serving & tests &
wait
