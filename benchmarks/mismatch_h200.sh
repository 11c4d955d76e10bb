#!/bin/bash
# bash benchmarks/mismatch_h200.sh FOLDER: the mismatch tables of one GPU, in about ten minutes, into FOLDER/{a,b,c}.
#   a  the embedded model: production graphs and compilation, mixed lengths, continuous batching, chunked prefill,
#      preemption; every operator compared; mutations
#   b  the embedded model, 8192 tokens (positions beyond its training; the arithmetic is what is compared)
#   c  four layers of Qwen3-8B's shape, random weights
# One flow fails without the others; what the engines said last is beside the tables.
set -u
OUT=${1:?give a folder for the results}
mkdir -p "$OUT"/{a,b,c}
WORK=$(mktemp -d)
mkdir "$WORK"/{long,layers8b}
export VLLM_DEEP_GEMM_WARMUP=skip VLLM_USE_FLASHINFER_SAMPLER=0
cp jetrl/assets/tiny/*.* "$WORK/long/"
sed -i 's/"max_position_embeddings": 2048/"max_position_embeddings": 16384/' "$WORK/long/config.json"
python - "$WORK/layers8b" <<'P'
import sys
from transformers import Qwen3Config
Qwen3Config(architectures=["Qwen3ForCausalLM"], hidden_size=4096, intermediate_size=12288, num_hidden_layers=4,
            num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=32768, max_position_embeddings=16384,
            rms_norm_eps=1e-6, tie_word_embeddings=False, dtype="bfloat16").save_pretrained(sys.argv[1])
P
ROLLOUT=actor_rollout_ref.rollout
# A size of its own for the KV cache: runs side by side disturb vLLM's memory profiling.
KV=$ROLLOUT.engine_kwargs.vllm.kv_cache_memory_bytes=1073741824
ALL=unified_exact,unified_fp8,fp8_rollout,bf16
TABLE="python benchmarks/mismatch_table.py --parallel"
$TABLE --flows $ALL --lengths 256,1900,256 --sequences 18 --mutations --keep-logs "$OUT/a" --name mismatch-gpu --out "$OUT/a" \
  -- --kv-cache-tokens 8192 hardware=1gpu $ROLLOUT.max_num_seqs=12 $ROLLOUT.max_num_batched_tokens=512 \
  "$ROLLOUT.cudagraph_capture_sizes=[1,2,4,8,12]" "+$KV" 2>&1 | tee "$OUT/a/out.log"
$TABLE --flows $ALL --lengths 8192 --sequences 4 --layer-sequences 0 --keep-logs "$OUT/b" --name mismatch-8k-gpu --out "$OUT/b" \
  -- hardware=side_by_side "actor_rollout_ref.model.path=$WORK/long" $ROLLOUT.max_num_seqs=16 "$KV" 2>&1 | tee "$OUT/b/out.log"
$TABLE --flows $ALL --lengths 64,200 --prompt-lengths 40,200,7 --sequences 8 --mutations --keep-logs "$OUT/c" \
  --name mismatch-8b-shape-gpu --out "$OUT/c" -- hardware=side_by_side "actor_rollout_ref.model.path=$WORK/layers8b" \
  $ROLLOUT.max_num_seqs=8 $ROLLOUT.enforce_eager=true "$KV" 2>&1 | tee "$OUT/c/out.log"
rm -rf "$WORK"
