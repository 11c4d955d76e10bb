#!/usr/bin/env bash
# The flows comparison on one GPU, from nothing to the report: a model warmed up on chains, then the flows side by side.
#
#   bash scripts/gpu_flows.sh [length] [seconds] [flows] [seeds] [words for jetrl.train ...]
#   bash scripts/gpu_flows.sh 512 480 bf16,fp8_rollout,fp8_vllm,unified_fp8 0 trainer.total_training_steps=30
#
# length: task.length, 64 to 4096. seconds: for the runs, of which the start takes 100 to 200; what is unfinished then is
# kept as it is. The same call goes on with what is missing. Runs live in runs/, records in runs/kept/chain_<length>.
# SIZE (20m) and WARM_UP (more words for scripts/warm_up_model.py) choose the model: SIZE=tiny WARM_UP="--target 0.05" on a
# CPU, where hardware=cpu and SIDE_BY_SIDE=1 are given as well. MODEL: the folder to write it to or to find it in.
set -euo pipefail
cd "$(dirname "$0")/.."
length=${1:-512} seconds=${2:-480} flows=${3:-bf16,fp8_rollout,fp8_vllm,unified_fp8} seeds=${4:-0}
shift $(($# < 4 ? $# : 4))
model=${MODEL:-models/chain_$length}
kept=runs/kept/chain_$length
# vLLM's own warm-up of DeepGEMM (flow fp8_vllm) takes minutes and changes no result.
export VLLM_DEEP_GEMM_WARMUP=skip

stage() { printf '[%3d s] %s\n' "$SECONDS" "$1"; }
if [ ! -f "$model/model.safetensors" ]; then
    stage "warming up $model"
    # vLLM looks at a model's class in a process of its own, 20 s in each engine's start until the answer is cached.
    python -c "from vllm.model_executor.models.registry import ModelRegistry
ModelRegistry.models['Qwen3ForCausalLM'].inspect_model_cls()" >/dev/null &
    # shellcheck disable=SC2086
    python scripts/warm_up_model.py --size "${SIZE:-20m}" --length "$length" --out "$model" --decode 32 ${WARM_UP:-}
    wait
fi
# As many runs at once as there are flows.
many=${SIDE_BY_SIDE:-$(tr ',' '\n' <<<"$flows" | wc -l)}
stage "$flows, $many at a time"
status=0
python scripts/run_experiments.py chain_long --flows "$flows" --seeds "$seeds" --side-by-side "$many" --seconds "$seconds" \
    --keep "$kept" -- actor_rollout_ref.model.path="$model" task.length="$length" "$@" || status=$?
stage "report"
python -m jetrl.report "$kept"
stage "done, status $status"
exit $status
