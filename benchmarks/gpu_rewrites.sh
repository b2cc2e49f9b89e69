#!/usr/bin/env bash
# Whole cases under default, auto without rewrites and auto with them, interleaved, each case in its own process.
#     bash benchmarks/gpu_rewrites.sh OUT_DIR [options of `rewrites`]
set -uo pipefail
out=${1:?OUT_DIR is required}
shift
mkdir -p "$out"
ended=0
for case in "ResNet-50" "linear 16384" "GPT-2" "Llama" "relative-position" "cross-entropy" "RegNetY"; do
    python -m benchmarks rewrites --cases "$case" --out "$out/${case// /_}.json" "$@" 2>>"$out/log.txt" || ended=$?
done
exit "$ended"
