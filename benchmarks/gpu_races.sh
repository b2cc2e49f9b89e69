#!/usr/bin/env bash
# What only a GPU shows of tests, races and serving, in one call of ten minutes on four GPUs, 16 CPUs for each:
#     bash benchmarks/gpu_races.sh OUT_DIR SECONDS [ARCHIVE.tgz]
# Called again with the same OUT_DIR, the studies go on. Everything lies in OUT_DIR, a log for each job, and in the archive
# whatever is there as each job ends.
set -u
out=${1:?OUT_DIR is required} limit_s=${2:?SECONDS is required} archive=${3:-}
mkdir -p "$out"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

run() { # NAME COMMAND...: until the end of all
    local left_s=$((limit_s - SECONDS))
    [ "$left_s" -ge 30 ] || { echo "$1: not begun"; return; }
    timeout -k 5 "$left_s" "${@:2}" >"$out/$1.txt" 2>&1
    echo "$1: exit $? after $SECONDS s" | tee -a "$out/ends.txt"
    if [ -n "$archive" ]; then
        tar czf "$archive.$BASHPID" --exclude=work -C "$out" . # which other jobs may be writing to
        mv "$archive.$BASHPID" "$archive"
    fi
}
on_gpu() { # INDEX NAME COMMAND...
    CUDA_VISIBLE_DEVICES=$1 run "$2" taskset -c "$(($1 * 16))-$(($1 * 16 + 15))" "${@:3}"
}
study() { # INDEX NAME ARGUMENTS...
    on_gpu "$1" "$2" python3 -m benchmarks "${@:3}" --out "$out/$2"
}
tests="python3 -m pytest -v --benchmark-disable --show-capture=no -p no:cacheprovider"

study 0 regret regret --models modernbert,qwen3_decode --max-minutes "$((limit_s / 60 - 3))" &
{
    study 1 sealed.md sealed --device cuda
    study 1 pinned.md pinned --device cuda
    study 1 background background --models qwen3_decode,whisper_base
} &
study 2 held_out held-out --device cuda --models modernbert,caformer_s18,hrnet_w18_small \
    --configs eager,default,reduce-overhead,max-autotune,auto --max-minutes "$((limit_s / 60 - 1))" &
on_gpu 3 tests $tests -n 10 --dist worksteal --junitxml="$out/tests.xml" tests/gpu &
CUDA_VISIBLE_DEVICES=1,3 run ranks $tests tests/gpu/test_gpu_shared_race.py & # NCCL needs two GPUs
wait
