#!/usr/bin/env bash
# The flows comparison on one GPU, from nothing to the report: a model warmed up on chains, then the flows side by side.
#
#   bash scripts/gpu_flows.sh [length] [seconds] [flows] [seeds]
#   bash scripts/gpu_flows.sh 512 480 bf16,fp8_rollout,fp8_vllm,unified_fp8 0
#
# length: task.length, 64 to 4096. seconds: for the runs, of which the start takes about 200; what is unfinished then is
# kept as it is. The same call goes on with what is missing. Runs live in runs/, records in runs/kept/chain_<length>.
set -euo pipefail
cd "$(dirname "$0")/.."
length=${1:-512} seconds=${2:-480} flows=${3:-bf16,fp8_rollout,fp8_vllm,unified_fp8} seeds=${4:-0}
model=models/chain_$length
kept=runs/kept/chain_$length
# vLLM's own warm-up of DeepGEMM (flow fp8_vllm) takes minutes and changes no result.
export VLLM_DEEP_GEMM_WARMUP=skip

if [ ! -f "$model/model.safetensors" ]; then
    python scripts/warm_up_model.py --size 20m --length "$length" --out "$model" --decode 32
fi
# As many runs at once as there are flows.
many=$(tr ',' '\n' <<<"$flows" | wc -l)
status=0
python scripts/run_experiments.py chain_long --flows "$flows" --seeds "$seeds" --side-by-side "$many" \
    --seconds "$seconds" --keep "$kept" -- actor_rollout_ref.model.path="$model" task.length="$length" || status=$?
python -m jetrl.report "$kept"
exit $status
