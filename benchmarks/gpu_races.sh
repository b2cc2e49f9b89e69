#!/usr/bin/env bash
# What only a GPU shows of tests, races and serving, in one call of ten minutes on four GPUs, 16 CPUs for each:
#     bash benchmarks/gpu_races.sh OUT_DIR SECONDS [ARCHIVE.tgz [JOBS.txt]]
# The jobs are those of gpu_races.txt, each in caches of its own. Called again with the same OUT_DIR, the studies go on.
# Everything lies in OUT_DIR, a log for each job, and in the archive whatever is there as each job ends.
set -u
out=${1:?OUT_DIR is required} limit_s=${2:?SECONDS is required} archive=${3:-} jobs=${4:-$(dirname "$0")/gpu_races.txt}
mkdir -p "$out"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

run() { # GPUS NAME COMMAND...: on the CPUs of the first GPU, until the end of all
    local left_s=$((limit_s - SECONDS)) first=${1%%,*}
    [ "$left_s" -ge 30 ] || { echo "$2: not begun" | tee -a "$out/ends.txt"; return; }
    CUDA_VISIBLE_DEVICES=$1 TORCHINDUCTOR_CACHE_DIR="$out/work/$2.cache" timeout -k 5 "$left_s" \
        taskset -c "$((first * 16))-$((first * 16 + 15))" "${@:3}" >"$out/$2.txt" 2>&1
    echo "$2: exit $? after $SECONDS s" | tee -a "$out/ends.txt"
    if [ -n "$archive" ]; then
        tar czf "$archive.$BASHPID" --exclude=work -C "$out" . # which other jobs may be writing to
        mv "$archive.$BASHPID" "$archive"
    fi
}
minutes() { echo $(((limit_s - SECONDS) / 60 - 1)); }
job() { # GPUS NAME KIND ARGUMENTS...
    case $3 in
    study) run "$1" "$2" python3 -m benchmarks "${@:4}" --out "$out/$2" ;;
    long) run "$1" "$2" python3 -m benchmarks "${@:4}" --out "$out/$2" --max-minutes "$(minutes)" ;;
    tests) run "$1" "$2" python3 -m pytest -v --benchmark-disable --show-capture=no -p no:cacheprovider "${@:4}" ;;
    esac
}

for gpus in $(grep -v '^#' "$jobs" | cut -d' ' -f1 | sort -u); do
    while read -r line; do
        # shellcheck disable=SC2086  # a line is words
        job $line </dev/null
    done < <(grep "^$gpus " "$jobs") &
done
wait
