"""Phases of a training step in VeRL's own FSDP engine: old log-prob, reference, actor update, and what a weight sync sends.

    python benchmarks/bench_engine.py [--layers 36] [--tokens 2048] [--seconds N] [--out DIR]      (one GPU, alone)

Qwen3-4B's shape with random weights, packed random tokens, gradient checkpointing as in VeRL's default. Rows: BF16 as VeRL
ships it, BF16 with its Liger option, unified_fp8, unified_exact; the same engine, data, attention, BF16 masters and
optimizer in one call. Without a GPU it runs a tiny model on padded batches: a rehearsal.
The rollout's side of a step is bench_rollout.py's and bench_refit.py's.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import torch.distributed as dist
from harness import print_table, write_results

ON_GPU = torch.cuda.is_available()
VOCABULARY = 151936 if ON_GPU else 512
SEQUENCES_A_MICRO_BATCH = 8 if ON_GPU else 2
# What a row may fail with (memory, a library's own kernel) without losing the others' figures.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, ImportError)
MICRO_BATCHES = 4
# FSDP1 takes no weights on a CPU.
STRATEGY = "fsdp" if ON_GPU else "fsdp2"
REPEATS = 3
ROWS = {
    "unified_fp8": dict(jetrl_flow="unified_fp8"),
    "bf16": dict(jetrl_flow="bf16"),
    "bf16 + liger": dict(jetrl_flow="bf16", use_liger=True),
    # Last: what was measured before it is written by then. Its old log-probs are what bypass_mode saves.
    "unified_exact": dict(jetrl_flow="unified_exact"),
}


def save_model(folder: Path, layers: int) -> int:
    """Random BF16 weights made on the GPU; returns the number of parameters."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    hidden, inner, heads = (2560, 9728, 32) if ON_GPU else (256, 384, 2)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(heads // 4, 1), head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if ON_GPU else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def seconds_of(body, repeats: int = REPEATS) -> tuple[float, float]:
    """Median seconds of `body` after one call to warm up, and (max - min) / median."""
    times = []
    for _ in range(repeats + 1):
        synchronize()
        began = time.perf_counter()
        body()
        synchronize()
        times.append(time.perf_counter() - began)
    median = statistics.median(times[1:])
    return median, (max(times[1:]) - min(times[1:])) / median


def batches(tokens: int):
    from engine_for_tests import batch

    count = SEQUENCES_A_MICRO_BATCH * MICRO_BATCHES
    sizes = dict(shortest=tokens, longest=tokens + 1)
    return batch(VOCABULARY - 100, 0, count, SEQUENCES_A_MICRO_BATCH, **sizes, packed=ON_GPU)


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
    engine = build_engine(folder, STRATEGY, packed=ON_GPU, gradient_checkpointing=True, **flow)
    put(row, "old_log_prob", seconds_of(lambda: forward(engine, tokens)))
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    put(row, "update", seconds_of(lambda: update(engine, tokens)))
    row["update_peak_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 1) if ON_GPU else 0.0
    graph = engine.precision_graph
    formats = {n: "fp32" for n in graph.linear_names() if (f := graph.linear_format(n)) and f.is_fp8}
    sent, device = [], torch.cuda.current_device() if ON_GPU else "cpu"

    def send():
        weights = FSDPEngine.get_per_tensor_param(engine)[0]
        sent.append(sum(t.nbytes for _, t in quantized_on_the_way(weights, formats, device)))

    put(row, "send", seconds_of(send))
    row["send_bytes"] = sent[-1]
    return row


def reference_phase(folder: Path, tokens: int, flow: dict) -> dict:
    from engine_for_tests import build_engine

    row: dict = {}
    engine = build_engine(folder, STRATEGY, packed=ON_GPU, gradient_checkpointing=True, forward_only=True, **flow)
    put(row, "reference", seconds_of(lambda: forward(engine, tokens)))
    return row


def measure(row: dict, folder: Path, tokens: int, flow: dict) -> None:
    """Fills `row`, which keeps what it has where a phase fails."""
    from transformers.models.qwen3 import modeling_qwen3

    stock = dict(vars(modeling_qwen3))
    for part in (actor_phases, reference_phase):
        try:
            row |= part(folder, tokens, flow)
        except FAILURES:
            traceback.print_exc()
        # Liger replaces classes and functions of the model's own Python module, for every model built later.
        vars(modeling_qwen3).update(stock)
        gc.collect()  # FSDP's modules refer to each other in cycles
        if ON_GPU:
            torch.cuda.empty_cache()


def compare(rows: list[dict]) -> None:
    plain = next((row for row in rows if row["flow"] == "bf16"), {})
    for row in rows:
        for phase in ("old_log_prob", "reference", "update"):
            if f"{phase}_s" in row and f"{phase}_s" in plain:
                row[f"{phase}_x"] = plain[f"{phase}_s"] / row[f"{phase}_s"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=2048, help="of each sequence")
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no row after this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    deadline = time.perf_counter() + options.seconds
    if ON_GPU:
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as name:
        parameters = save_model(Path(name), options.layers)
        extra = dict(
            parameters=parameters, layers=options.layers, tokens_a_sequence=options.tokens,
            sequences=SEQUENCES_A_MICRO_BATCH * MICRO_BATCHES, micro_batches=MICRO_BATCHES,
        )  # fmt: skip
        for flow in options.rows:
            if time.perf_counter() > deadline:
                print(f"no time for {flow}", flush=True)
                continue
            began = time.perf_counter()
            rows.append({"flow": flow})
            measure(rows[-1], Path(name), options.tokens, ROWS[flow])
            compare(rows)
            print(f"{flow}: {time.perf_counter() - began:.0f} s {rows[-1]}", flush=True)
            write_results("engine", rows, options.out, **extra)
    print_table(rows)


if __name__ == "__main__":
    main()
