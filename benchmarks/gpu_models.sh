#!/usr/bin/env bash
# The real models on every visible GPU: what gpu.sh does for the suite `models`. 16 CPUs for each GPU.
#     bash benchmarks/gpu_models.sh OUT_DIR BUDGET_S [options of `run`]
# All modes of a shard's models compile first, several at a time; then each auto races alone on its GPU; then each model
# is timed alone. A budget that ends in between leaves what was compiled, for the next call on the same machine.
exec bash "$(dirname "$0")/gpu.sh" "${1:?OUT_DIR is wanted}" "${2:?BUDGET_S is wanted}" \
    --suite models --apart --timer wall --no-ceilings --jobs 4 --tuners 6 --ahead 13 "${@:3}"
