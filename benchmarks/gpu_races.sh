#!/usr/bin/env bash
# What only a GPU shows of tests, races and serving, in two calls of nine minutes on four GPUs, 16 CPUs for each:
#     bash benchmarks/gpu_races.sh OUT_DIR SECONDS tests
#     bash benchmarks/gpu_races.sh OUT_DIR SECONDS races
# Called again with the same OUT_DIR, the studies go on. Everything lies in OUT_DIR, a log for each job.
set -u
out=${1:?OUT_DIR is required} limit_s=${2:?SECONDS is required} what=${3:?tests or races}
mkdir -p "$out"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

run() { # NAME COMMAND...: until the end of all
    timeout -k 5 "$((limit_s - SECONDS))" "${@:2}" >"$out/$1.txt" 2>&1
    echo "$1: exit $? after $SECONDS s"
}
on_gpu() { # INDEX NAME COMMAND...
    CUDA_VISIBLE_DEVICES=$1 run "$2" taskset -c "$(($1 * 16))-$(($1 * 16 + 15))" "${@:3}"
}
study() { # INDEX NAME ARGUMENTS...
    on_gpu "$1" "$2" python3 -m benchmarks "${@:3}"
}
tests() {
    local pytest="python3 -m pytest -q --benchmark-disable -p no:cacheprovider"
    run ranks $pytest tests/gpu/test_gpu_shared_race.py & # it sees all GPUs, since NCCL needs two
    run tests $pytest --show-capture=no --junitxml="$out/tests.xml" -p tests.gpu.one_each -n 32 --dist worksteal \
        tests/gpu tests/torch_internals tests/sealing &
    wait
}
races() {
    study 0 background background --models qwen3_decode,whisper_base --out "$out/background" &
    { study 1 sealed sealed --device cuda --out "$out/sealed.md" && study 1 pinned pinned --device cuda --out "$out/pinned.md"; } &
    study 2 held_out held-out --device cuda --models modernbert,caformer_s18,hrnet_w18_small \
        --configs eager,default,reduce-overhead,max-autotune,auto --out "$out/held_out" --max-minutes "$((limit_s / 60 - 1))" &
    study 3 regret regret --models modernbert,qwen3_decode --out "$out/regret" --max-minutes 5 &
    wait
}
"$what"
