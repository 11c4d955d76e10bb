#!/bin/bash
# bash benchmarks/mismatch_h200.sh FOLDER [SECONDS]: mismatch tables of one GPU, most important first, into FOLDER/{a,b,c,d}.
#   a  four layers of Qwen3-8B's shape, random weights, outputs of 256 and 2048 tokens: the production engine (compiled, CUDA
#      graphs), continuous batching, chunked prefill; every operator compared; mutations in both engines
#   b  the embedded model, preemption forced
#   c  8192 tokens, two layers of Qwen3-8B's shape
#   d  the same two layers, operators followed over 640 tokens, a decode's keys split and whole: which one makes the difference
# All flows of a table run side by side, and a beside c and d. A table is rewritten after every flow; what is not done in its share
# of SECONDS (default 600; a minute of preparation is not counted) is killed. What the engines said last is beside the tables.
set -u
OUT=${1:?give a folder for the results}
SECONDS_ALL=${2:-600}
mkdir -p "$OUT"/{a,b,c,d}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_V2_MODEL_RUNNER=1 VLLM_DEEP_GEMM_WARMUP=skip TOKENIZERS_PARALLELISM=false
SHARE() { echo $((SECONDS_ALL * $1 / 100)); }
for layers in 4 2; do
  mkdir "$WORK/config$layers"
  cat > "$WORK/config$layers/config.json" <<J
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
 "num_hidden_layers": $layers, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768,
 "max_position_embeddings": 16384, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": false,
 "hidden_act": "silu", "attention_bias": false, "torch_dtype": "bfloat16"}
J
done
# Weights once, and the kernels of the shape, before engines that would each make them. Rows: those of prefill chunks, of
# decodes in CUDA graphs, of the trainer's micro-batches.
python -m jetrl.verification.random_weights "$WORK/f4" "$WORK/config4" "$WORK/model4" 0 > "$OUT/weights.log" 2>&1 &
python -m jetrl.verification.random_weights "$WORK/f2" "$WORK/config2" "$WORK/model2" 0 >> "$OUT/weights.log" 2>&1 &
(cd benchmarks && timeout 60 python warm_gemms.py qwen3-8b --processes 12 --rows 64 96 128 192 256 384 512 640 1024 4096 16384) 2>&1 |
  tail -2 &
wait
ROLLOUT=actor_rollout_ref.rollout
# A size of its own for the KV cache: engines side by side disturb vLLM's memory profiling.
COMMON=(hardware=1gpu "+$ROLLOUT.engine_kwargs.vllm.kv_cache_memory_bytes=2147483648" $ROLLOUT.gpu_memory_utilization=0.1
  $ROLLOUT.max_num_batched_tokens=512 actor_rollout_ref.actor.fsdp_config.param_offload=false
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=false)
ALL=unified_exact,unified_fp8,fp8_rollout,bf16
TABLE="python benchmarks/mismatch_table.py --parallel --flows $ALL"
# a, c and d at once: eighteen processes, most of whose time is imports.
$TABLE --lengths 256,2048 --prompt-lengths 40,200,7 --sequences 16 --mutations --keep-logs "$OUT/a" \
  --seconds "$(SHARE 62)" --name mismatch-8b-shape-gpu --out "$OUT/a" -- "actor_rollout_ref.model.path=$WORK/model4" \
  $ROLLOUT.max_num_seqs=16 "$ROLLOUT.cudagraph_capture_sizes=[1,2,4,8,16]" "${COMMON[@]}" > "$OUT/a/out.log" 2>&1 &
$TABLE --lengths 8192 --prompt-lengths 40,200 --sequences 4 --layer-sequences 0 --keep-logs "$OUT/c" \
  --seconds "$(SHARE 62)" --name mismatch-8k-gpu --out "$OUT/c" -- "actor_rollout_ref.model.path=$WORK/model2" \
  $ROLLOUT.max_num_seqs=4 "$ROLLOUT.cudagraph_capture_sizes=[1,2,4]" "${COMMON[@]}" > "$OUT/c/out.log" 2>&1 &
# With vLLM's own bound of splits, and with what jetrl sets. Twice 1500 tokens did not end within three minutes.
SPLITS="+$ROLLOUT.engine_kwargs.vllm.attention_config.flash_attn_max_num_splits_for_cuda_graph"
for splits in 16 1; do
  python benchmarks/mismatch_table.py --parallel --flows unified_fp8 --lengths 560 --prompt-lengths 100,40 --sequences 2 \
    --layer-tokens 640 --keep-logs "$OUT/d" --seconds "$(SHARE 62)" --name "mismatch-operators-$splits-splits-gpu" --out "$OUT/d" -- \
    "actor_rollout_ref.model.path=$WORK/model2" $ROLLOUT.max_num_seqs=2 "$ROLLOUT.cudagraph_capture_sizes=[1,2]" \
    "$SPLITS=$splits" "${COMMON[@]}" > "$OUT/d/out-$splits.log" 2>&1 &
done
wait
tail -n 100 "$OUT"/[acd]/out*.log
$TABLE --lengths 256,1700,256 --prompt-lengths 100,7,250 --sequences 18 --mutations --keep-logs "$OUT/b" \
  --seconds "$(SHARE 38)" --name mismatch-gpu --out "$OUT/b" -- --kv-cache-tokens 8192 $ROLLOUT.max_num_seqs=12 \
  "$ROLLOUT.cudagraph_capture_sizes=[1,2,4,8,12]" "${COMMON[@]}" 2>&1 | tee "$OUT/b/out.log"
