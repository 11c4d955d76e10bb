"""vLLM decode and prefill: BF16, vLLM's own block FP8, and jetrl's plug-in, one process per engine, default settings.

    python benchmarks/bench_rollout.py [--shape qwen3-8b] [--engines bf16 vllm_fp8 jetrl] [--layers N] [--out FOLDER]
                                       [--sequences 32 128 256] [--contexts 256 2048 8192] [--profile]

A decode cell: `sequences` requests with `context` tokens behind them (random K and V, see decode_connector.py), sampled at
temperature 1 with log-probabilities; ms per step over --steps steps in which every request gets a token. `bound_ms` is the
time to read weights, K and V once at the measured copy bandwidth. Cells whose K and V do not fit are left out.
Takes about two minutes an engine at 8B; --contexts 256 first, where time is short. Results are written cell by cell.
Bars: jetrl >= vllm_fp8 in every cell; >= 1.25 x bf16 at contexts up to 512. --profile prints GPU time by kernel.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rollout_engines import ENGINES, SHAPES, build, config_of, step_bytes, worker_memory, write_config

PREFILL = (8, 4096)  # requests, tokens each
CAPTURE = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="fewer decoder layers than the shape has")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["bf16", "vllm_fp8", "jetrl"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[32, 128, 256])
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 2048, 8192])
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, no torch.compile")
    parser.add_argument(
        "--all-graphs", action="store_true", help="capture every batch size vLLM does, not nine of them"
    )
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, help="folder of the JSON (default benchmarks/results)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def _requests(llm, name: str, count: int, tokens: int, max_tokens: int) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(
        temperature=1.0, max_tokens=max_tokens, logprobs=0, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    for i in range(count):
        ids = torch.randint(100, 100_000, (tokens,), generator=generator).tolist()
        llm.llm_engine.add_request(f"{name}-{i}", {"prompt_token_ids": ids}, params)


def _watch(worker) -> None:
    """In the worker: note when each step is handed to the GPU, and how many tokens of how many requests it computes."""
    original, worker.stamps = worker.execute_model, []

    def execute_model(scheduler_output):
        counts = scheduler_output.num_scheduled_tokens.values()
        worker.stamps.append((time.perf_counter(), sum(counts), len(counts)))
        return original(scheduler_output)

    worker.execute_model = execute_model


def _stamps(worker) -> list[tuple[float, int, int]]:
    taken, worker.stamps[:] = list(worker.stamps), []
    return taken


def decode(llm, sequences: int, context: int, steps: int) -> dict:
    """ms per step, mean and median, over `steps` steps in which all sequences decode.

    Taken in the engine's worker, which runs at most two steps ahead of the GPU: the process in front, which this script
    is and which turns tokens into outputs, may fall behind without slowing the engine.
    """
    llm.collective_rpc(_stamps)
    _requests(llm, "decode", sequences, context, steps + 12)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    whole = [t for t, tokens, requests in llm.collective_rpc(_stamps)[0] if tokens == requests == sequences]
    stamps = whole[6 : 6 + steps + 1]
    if len(stamps) != steps + 1:
        raise RuntimeError(f"{len(whole)} whole steps of {sequences} sequences, {steps + 12} expected")
    each = [(b - a) * 1e3 for a, b in itertools.pairwise(stamps)]
    return {"ms": (stamps[-1] - stamps[0]) / steps * 1e3, "median_ms": statistics.median(each)}


def prefill(llm) -> float:
    """Prompt tokens per second; the second of two runs, whose kernels are compiled."""
    for _ in range(2):
        _requests(llm, "prefill", *PREFILL, 1)
        start = time.perf_counter()
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        seconds = time.perf_counter() - start
    return PREFILL[0] * PREFILL[1] / seconds


def profile(llm, sequences: int, context: int) -> None:
    """GPU time by kernel of eight decode steps (in one process only)."""
    from torch.profiler import ProfilerActivity

    _requests(llm, "decode", sequences, context, 24)
    for _ in range(10):
        llm.llm_engine.step()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        start = time.perf_counter()
        for _ in range(8):
            llm.llm_engine.step()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - start) / 8
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    busy = sum(row.self_device_time_total for row in rows) / 8e3
    print(f"profile: {sequences} x {context}: {wall * 1e3:.2f} ms a step, GPU busy {busy:.2f} ms", flush=True)
    for row in rows[:28]:
        print(f"  {row.self_device_time_total / 8e3:7.3f} ms {row.count / 8:7.1f} x  {row.key[:110]}", flush=True)


def run_engine(arguments: argparse.Namespace) -> dict:
    """Everything measured on one engine."""
    engine, config = arguments.child, config_of(arguments.shape, arguments.layers)
    if arguments.profile:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from decode_connector import TRANSFER

    folder = write_config(Path(tempfile.mkdtemp()), arguments.shape, arguments.layers)
    limits = {"compilation_config": {"cudagraph_capture_sizes": CAPTURE}} if not arguments.all_graphs else {}
    if arguments.eager:
        limits = {}
    start = time.perf_counter()
    llm = build(
        engine, folder, max_model_len=max(*arguments.contexts, PREFILL[1]) + arguments.steps + 64,
        max_num_seqs=max(arguments.sequences), enable_prefix_caching=False, gpu_memory_utilization=0.92,
        kv_transfer_config=TRANSFER, enforce_eager=arguments.eager, tensor_parallel_size=arguments.tensor_parallel,
        seed=0, **limits,
    )  # fmt: skip
    print(f"{engine}: ready after {time.perf_counter() - start:.1f} s", flush=True)
    result = {"engine": engine, "start_s": time.perf_counter() - start, "memory": worker_memory(llm), "cells": []}
    llm.collective_rpc(_watch)
    cache = llm.llm_engine.vllm_config.cache_config
    room = cache.num_gpu_blocks * cache.block_size
    for context, sequences in itertools.product(arguments.contexts, arguments.sequences):
        if sequences * (context + arguments.steps + 32) > room:
            continue
        began = time.perf_counter()
        if not result["cells"]:
            decode(llm, sequences, context, 8)
        cell = {"context": context, "sequences": sequences, **decode(llm, sequences, context, arguments.steps)}
        cell["bytes"] = step_bytes(config, engine, sequences, context + arguments.steps // 2)
        result["cells"].append(cell)
        print(engine, cell, f"took {time.perf_counter() - began:.1f} s", flush=True)
        print("RESULT " + json.dumps(result), flush=True)  # what there is when the time runs out
        if arguments.profile:
            profile(llm, sequences, context)
    if not arguments.no_prefill:
        result["prefill_tokens_s"] = prefill(llm)
    return result


def table(results: list[dict], bandwidth: float) -> list[dict]:
    """One row per cell, engines side by side."""
    rows = []
    keys = sorted({(c["context"], c["sequences"]) for r in results for c in r["cells"]})
    for context, sequences in keys:
        row = {"context": context, "sequences": sequences}
        for result in results:
            for cell in result["cells"]:
                if (cell["context"], cell["sequences"]) == (context, sequences):
                    row[result["engine"]] = cell["ms"]
                    row[f"{result['engine']}_bound"] = cell["bytes"] / bandwidth * 1e3
        for other in ("bf16", "vllm_fp8"):
            if other in row and "jetrl" in row:
                row[f"over_{other}"] = row[other] / row["jetrl"]
        rows.append(row)
    return rows


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.child:
        print("RESULT " + json.dumps(run_engine(arguments)), flush=True)
        return
    from harness import copy_bandwidth, print_table

    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}"}
    results = {}
    for engine in arguments.engines:
        command = [sys.executable, __file__, *sys.argv[1:], "--child", engine]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for line in child.stdout:
            if line.startswith("RESULT "):
                results[engine] = json.loads(line.removeprefix("RESULT "))
                write(arguments, list(results.values()), bandwidth)
            elif line.startswith((engine, "profile", "  ")):
                print(line, end="", flush=True)
        if child.wait() != 0:
            print(f"{engine}: ended with exit code {child.returncode}", flush=True)
    found = list(results.values())
    print_table(table(found, bandwidth))
    print_table(engines_of(found))
    print(write(arguments, found, bandwidth))


def engines_of(results: list[dict]) -> list[dict]:
    return [
        {"engine": r["engine"], "start_s": r["start_s"], "prefill_tokens_s": r.get("prefill_tokens_s", float("nan")),
         "weights_gb": r["memory"][0]["weights"] / 1e9}
        for r in results
    ]  # fmt: skip


def write(arguments: argparse.Namespace, results: list[dict], bandwidth: float) -> Path:
    from harness import write_results

    name = f"rollout-{arguments.shape}" + (f"-{arguments.layers}layers" if arguments.layers else "")
    settings = {k: str(v) for k, v in vars(arguments).items() if k not in ("child", "out")}
    return write_results(
        name, table(results, bandwidth), arguments.out, engines=engines_of(results), copy_bytes_per_second=bandwidth,
        settings=settings,
    )  # fmt: skip


if __name__ == "__main__":
    main()
