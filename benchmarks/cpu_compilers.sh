#!/usr/bin/env bash
# Compilers on whole models, side by side on the cores of this machine:
#     bash benchmarks/cpu_compilers.sh OUT_DIR BUDGET_S [TUNE_S] [options of `compilers`]
# Each model has BUDGET_S and a core, and another core on which TVM tunes for TUNE_S meanwhile (default: BUDGET_S less
# 160 s for timing the tuned kernels; 0: no tuning). Models that find no free core wait for those before them.
# MODELS="bert resnet18" chooses models. Called again with the same OUT_DIR, it measures only what has no record there.
set -uo pipefail
out=${1:?OUT_DIR is wanted} budget=${2:?BUDGET_S is wanted}
tune=${3:-$((budget > 220 ? budget - 160 : 0))}
shift $(($# < 3 ? $# : 3))
python=${PYTHON:-python}
mkdir -p "$out"
read -ra models <<<"${MODELS:-$("$python" -m benchmarks compilers --list --out "$out" | paste -sd ' ')}"
# One logical CPU of each physical core that this shell may use.
allowed=$("$python" -c 'import os; print(" ".join(map(str, sorted(os.sched_getaffinity(0)))))')
mapfile -t cores < <(lscpu -p=CPU,CORE,SOCKET | awk -F, -v allowed=" $allowed " \
    '!/^#/ && index(allowed, " " $1 " ") && !seen[$2 "," $3]++ { print $1 }')
each=$((tune > 0 && ${#cores[@]} > 1 ? 2 : 1))
slots=$((${#cores[@]} / each))
at=0
for model in "${models[@]}"; do
    [[ -e $out/$model.json ]] && continue
    pinned=$(IFS=,; echo "${cores[*]:$((at * each)):$each}")
    taskset -c "$pinned" "$python" -m benchmarks compilers --models "$model" --budget-s "$budget" --tune-s "$tune" \
        --out "$out" "$@" >"$out/$model.log" 2>&1 &
    at=$(((at + 1) % slots))
    ((at == 0)) && wait
done
wait
"$python" -m benchmarks compilers --page --out "$out"
sed -n '/^## Bars/,/^## What `auto`/p' "$out/compilers.md" | head -n -2
