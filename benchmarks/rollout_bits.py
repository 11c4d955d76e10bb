"""Does a token have the same bits in eager mode, under torch.compile with CUDA graphs, and alone or in a batch?

    python benchmarks/rollout_bits.py [--shapes qwen3-8b llama3.1-8b qwen2.5-7b smollm2-135m] [--layers 4] [--out FOLDER]

jetrl's plug-in in real vLLM, greedy, 32 prompts of 5 to 300 tokens, 64 tokens each, random weights. Counts tokens and
log-probabilities (all bits) that agree with eager mode, and the peak of memory while loading beside the weights' size.
All engines run side by side. DeepGEMM compiles a kernel in 3 to 5 s: `warm_gemms.py SHAPES --rows 64 128 256 512 1024 4096`
first saves most of the time. Without a GPU (`--shapes tiny`) "compiled" has no CUDA graphs.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
from harness import print_table, write_results
from rollout_engines import SHAPES, build, config_of, model_folder
from turns import serve, start

LENGTHS = [37, 64, 100, 128, 200, 256, 300, 5] * 4
TOKENS = 64
MODES = ("eager", "compiled")


def _generate(llm, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    first = [o.outputs[0] for o in outputs]
    return [
        (list(o.token_ids), [step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True)]) for o in first
    ]


def run_child(shape: str, layers: int, mode: str) -> dict:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.v1.worker.gpu_worker import Worker

    on_gpu = torch.cuda.is_available()
    peak, load = [], Worker.load_model

    def watched(self, *args, **kwargs):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        result = load(self, *args, **kwargs)
        peak.append(torch.cuda.max_memory_allocated() if on_gpu else 0)
        return result

    Worker.load_model = watched
    settings = {"enforce_eager": True} if mode == "eager" else {}
    if mode == "compiled":
        settings = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}}
    start = time.perf_counter()
    llm = build(
        "jetrl", model_folder(shape, layers), max_model_len=1024, max_num_seqs=64,
        max_num_batched_tokens=4096, kv_cache_memory_bytes=2 << 30, gpu_memory_utilization=0.02,
        enable_prefix_caching=False, seed=0, **settings,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    generator = torch.Generator().manual_seed(1)
    vocabulary = config_of(shape)["vocab_size"]
    prompts = [torch.randint(100, min(40_000, vocabulary), (n,), generator=generator).tolist() for n in LENGTHS]
    weights = llm.collective_rpc(_weight_bytes)[0]
    batch = _generate(llm, prompts)
    return {
        "batch": batch, "alone": [_generate(llm, [p])[0] for p in prompts[:3]], "start_s": seconds,
        "load_peak_mb": peak[0] / 1e6 if peak else 0.0, "weights_mb": weights / 1e6,
    }  # fmt: skip


def _weight_bytes(worker) -> int:
    return sum(p.nbytes for p in worker.get_model().parameters())


def compare(shape: str, eager: dict, compiled: dict) -> dict:
    tokens = bits = total = 0
    for (ids, probs), (other_ids, other_probs) in zip(eager["batch"], compiled["batch"], strict=True):
        total += len(ids)
        tokens += sum(a == b for a, b in zip(ids, other_ids, strict=True))
        bits += sum(a == b for a, b in zip(probs, other_probs, strict=True))
    alone = all(r["alone"] == r["batch"][: len(r["alone"])] for r in (eager, compiled))
    return {
        "shape": shape, "tokens": total, "equal_tokens": tokens, "equal_bits": bits, "alone_equals_batch": alone,
        "eager_start_s": eager["start_s"], "compiled_start_s": compiled["start_s"], "weights_mb": compiled["weights_mb"],
        "load_peak_mb": compiled["load_peak_mb"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=["qwen3-8b", "llama3.1-8b", "qwen2.5-7b", "smollm2-135m"]
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", type=Path, help="folder of the JSON (default benchmarks/results)")
    parser.add_argument("--seconds", type=float, default=600, help="for all engines together")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--channel", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        shape, mode = arguments.child
        serve(arguments.channel, lambda: (None, run_child(shape, arguments.layers, mode)), lambda *_: {})
        return
    names = [f"{shape} {mode}" for shape in arguments.shapes for mode in MODES]
    words, logs = (
        [__file__, "--layers", str(arguments.layers), "--child"],
        (arguments.out or Path(tempfile.mkdtemp())) / "bits",
    )
    running = start(names, lambda name: [*words, *name.split()], logs, arguments.seconds)
    rows = []
    for shape in arguments.shapes:
        found = {mode: running[f"{shape} {mode}"][1] for mode in MODES if f"{shape} {mode}" in running}
        if len(found) == len(MODES):
            rows.append(compare(shape, found["eager"], found["compiled"]))
        else:
            print(f"{shape}: of {' and '.join(MODES)} there is only {', '.join(found) or 'neither'}", flush=True)
    for process, *_ in running.values():
        process.end()
    print_table(rows)
    print(write_results("rollout-bits", rows, arguments.out, layers=arguments.layers))


if __name__ == "__main__":
    main()
