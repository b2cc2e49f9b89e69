#!/usr/bin/env bash
# The real models on every visible GPU: gpu.sh with the suite `models`. Needs 16 CPUs for each GPU.
#     bash benchmarks/gpu_models.sh OUT_DIR BUDGET_S [options of `run`]
# Two models at a time: their modes compile, several at a time; then each auto races alone on its GPU; then each model is
# timed alone. The max-autotune modes take 90 to over 300 s for a model: --peers without them is done in minutes.
exec bash "$(dirname "$0")/gpu.sh" "${1:?OUT_DIR is required}" "${2:?BUDGET_S is required}" \
    --suite models --apart --timer wall --no-ceilings --jobs 4 --tuners 4 --ahead 2 "${@:3}"
