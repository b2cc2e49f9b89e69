#!/usr/bin/env bash
# The real models on every visible GPU: what gpu.sh does for the suite `models`. 16 CPUs for each GPU.
#     bash benchmarks/gpu_models.sh OUT_DIR BUDGET_S [options of `run`]
# Four models' peers compile beside each other, of those that time kernels two autotuning modes or one auto at a time;
# then each model is timed alone.
exec bash "$(dirname "$0")/gpu.sh" "${1:?OUT_DIR is wanted}" "${2:?BUDGET_S is wanted}" \
    --suite models --apart --timer wall --no-ceilings --jobs 5 --tuners 2 --ahead 4 "${@:3}"
