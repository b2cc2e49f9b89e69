#!/usr/bin/env bash
# Races on two CPU cores before and after a change: five held-out models, small, each on two cores of its own.
#     bash benchmarks/cpu_races.sh OUT_DIR OLD_CHECKOUT [TIMES]
# OLD_CHECKOUT is a checkout of the older version (git worktree add /tmp/old COMMIT); this suite measures both packages.
# FIRST_CORE is the first of the cores, MODELS are others than these. Without two cores for each, models take turns.
set -eu
out="$(realpath -m "${1:?OUT_DIR is required}")" old="$(realpath "${2:?OLD_CHECKOUT is required}")" times="${3:-1}"
here="$(cd "$(dirname "$0")/.." && pwd)" python="${PYTHON:-python3}" first="${FIRST_CORE:-0}"
models="${MODELS:-whisper_base qwen3_decode gin_train deberta_v3 convnextv2_tiny}"
export HF_HUB_OFFLINE=1
for version in old new; do # the package of each version, with this suite
    mkdir -p "$out/with_$version"
    ln -sfn "$here/benchmarks" "$out/with_$version/benchmarks"
done
ln -sfn "$old/backend_kwargs" "$out/with_old/backend_kwargs"
ln -sfn "$here/backend_kwargs" "$out/with_new/backend_kwargs"

race() { # MODEL CORE: both versions of a model follow each other, since a machine drifts
    for ((at = 1; at <= times; at++)); do
        for version in old new; do
            (cd "$out/with_$version" && PYTHONPATH="$out/with_$version:${PYTHONPATH:-}" taskset -c "$2,$(($2 + 1))" \
                "$python" -m benchmarks held-out --tiny --device cpu --models "$1" --configs auto --rounds 10 \
                --out "$out/$version/$1-$at" --work "$out/work/$version/$1-$at") || true
        done
    done
}

core="$first" last=$((first + 2 * $(wc -w <<<"$models")))
for model in $models; do
    race "$model" "$core" &
    if (($(nproc --all) >= last)); then core=$((core + 2)); else wait; fi
done
wait
cd "$here" && PYTHONPATH="$here:${PYTHONPATH:-}" "$python" -m benchmarks before-after "$out/old" "$out/new" | tee "$out/cpu_races.md"
