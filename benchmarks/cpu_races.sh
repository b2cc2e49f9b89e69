#!/usr/bin/env bash
# Races on two CPU cores before and after a change: five held-out models, small, in turn, in one run.
#     bash benchmarks/cpu_races.sh OUT_DIR OLD_CHECKOUT [TIMES]
# OLD_CHECKOUT is a checkout of the older version (git worktree add /tmp/old COMMIT); this suite measures both packages.
set -eu
out="$(realpath -m "${1:?OUT_DIR is required}")" old="$(realpath "${2:?OLD_CHECKOUT is required}")" times="${3:-1}"
here="$(cd "$(dirname "$0")/.." && pwd)" python="${PYTHON:-python3}"
models="whisper_base,qwen3_decode,gin_train,deberta_v3,convnextv2_tiny"
export HF_HUB_OFFLINE=1
for version in old new; do # the package of each version, with this suite
    mkdir -p "$out/with_$version"
    ln -sfn "$here/benchmarks" "$out/with_$version/benchmarks"
done
ln -sfn "$old/backend_kwargs" "$out/with_old/backend_kwargs"
ln -sfn "$here/backend_kwargs" "$out/with_new/backend_kwargs"
for ((at = 1; at <= times; at++)); do
    for model in ${models//,/ }; do # both versions of a model follow each other, since a machine drifts
        for version in old new; do
            (cd "$out/with_$version" && PYTHONPATH="$out/with_$version:${PYTHONPATH:-}" taskset -c 0,1 \
                "$python" -m benchmarks held-out --tiny --device cpu --models "$model" --configs auto --rounds 10 \
                --out "$out/$version/$at" --work "$out/work/$version/$at") || true
        done
    done
done
cd "$here" && PYTHONPATH="$here:${PYTHONPATH:-}" "$python" -m benchmarks before-after "$out/old" "$out/new" | tee "$out/cpu_races.md"
