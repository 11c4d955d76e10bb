"""Phases of a training step in VeRL's own FSDP engine: old log-prob, reference, actor update, and what a weight sync sends.

    python benchmarks/bench_engine.py [--layers 36] [--tokens 2048] [--out DIR]      (one GPU, alone)

Qwen3-4B's shape with random weights, packed random tokens, gradient checkpointing as in VeRL's default. Rows: BF16 as VeRL
ships it, BF16 with its Liger option, unified_fp8, unified_exact; the same engine, data, attention, BF16 masters and
optimizer in one call.
The rollout's side of a step is bench_rollout.py's and bench_refit.py's.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import torch.distributed as dist
from harness import print_table, write_results

SEQUENCES_A_MICRO_BATCH = 8
MICRO_BATCHES = 4
REPEATS = 3
ROWS = {
    "bf16": dict(jetrl_flow="bf16"),
    "bf16 + liger": dict(jetrl_flow="bf16", use_liger=True),
    "unified_fp8": dict(jetrl_flow="unified_fp8"),
    # Last: what was measured before it is written by then. Its old log-probs are what bypass_mode saves.
    "unified_exact": dict(jetrl_flow="unified_exact"),
}


def save_model(folder: Path, layers: int) -> int:
    """Random BF16 weights made on the GPU; returns the number of parameters."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def seconds_of(body, repeats: int = REPEATS) -> tuple[float, float]:
    """Median seconds of `body` after one call to warm up, and (max - min) / median."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        body()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    median = statistics.median(times[1:])
    return median, (max(times[1:]) - min(times[1:])) / median


def batches(tokens: int):
    from engine_for_tests import batch

    count = SEQUENCES_A_MICRO_BATCH * MICRO_BATCHES
    return batch(150000, 0, count, SEQUENCES_A_MICRO_BATCH, shortest=tokens, longest=tokens + 1, packed=True)


def forward(engine, tokens: int) -> None:
    from engine_for_tests import mean_log_prob_loss

    with engine.eval_mode(), torch.no_grad():
        engine.forward_backward_batch(batches(tokens), mean_log_prob_loss, forward_only=True)


def update(engine, tokens: int) -> None:
    from engine_for_tests import mean_log_prob_loss

    with engine.train_mode():
        engine.train_batch(batches(tokens), mean_log_prob_loss)


def put(row: dict, name: str, measured: tuple[float, float]) -> None:
    row[f"{name}_s"], row[f"{name}_spread"] = round(measured[0], 4), round(measured[1], 3)


def actor_phases(folder: Path, tokens: int, flow: dict) -> dict:
    from engine_for_tests import build_engine
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    from jetrl.integrations.verl.wire import quantized_on_the_way

    row: dict = {}
    engine = build_engine(folder, "fsdp", packed=True, gradient_checkpointing=True, **flow)
    put(row, "old_log_prob", seconds_of(lambda: forward(engine, tokens)))
    torch.cuda.reset_peak_memory_stats()
    put(row, "update", seconds_of(lambda: update(engine, tokens)))
    row["update_peak_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    graph = engine.precision_graph
    formats = {n: "fp32" for n in graph.linear_names() if (f := graph.linear_format(n)) and f.is_fp8}
    sent = []

    def send():
        weights = FSDPEngine.get_per_tensor_param(engine)[0]
        sent.append(sum(t.nbytes for _, t in quantized_on_the_way(weights, formats, torch.cuda.current_device())))

    put(row, "send", seconds_of(send))
    row["send_bytes"] = sent[-1]
    return row


def reference_phase(folder: Path, tokens: int, flow: dict) -> dict:
    from engine_for_tests import build_engine

    row: dict = {}
    engine = build_engine(folder, "fsdp", packed=True, gradient_checkpointing=True, forward_only=True, **flow)
    put(row, "reference", seconds_of(lambda: forward(engine, tokens)))
    return row


def phases(folder: Path, tokens: int, flow: dict) -> dict:
    row: dict = {}
    for part in (actor_phases, reference_phase):
        row |= part(folder, tokens, flow)
        gc.collect()  # FSDP's modules refer to each other in cycles
        torch.cuda.empty_cache()
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=2048, help="of each sequence")
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        parameters = save_model(Path(name), options.layers)
        torch.cuda.empty_cache()
        for flow in options.rows:
            began = time.perf_counter()
            rows.append({"flow": flow, **phases(Path(name), options.tokens, ROWS[flow])})
            print(f"{flow}: {time.perf_counter() - began:.0f} s", flush=True)
            extra = dict(
                parameters=parameters, layers=options.layers, tokens_a_sequence=options.tokens,
                sequences=SEQUENCES_A_MICRO_BATCH * MICRO_BATCHES, micro_batches=MICRO_BATCHES,
            )  # fmt: skip
            write_results("engine", rows, options.out, **extra)
    first = rows[0]
    for row in rows:
        for phase in ("old_log_prob", "reference", "update"):
            row[f"{phase}_x"] = first[f"{phase}_s"] / row[f"{phase}_s"]
    print_table(rows)
    write_results("engine", rows, options.out, **extra)


if __name__ == "__main__":
    main()
