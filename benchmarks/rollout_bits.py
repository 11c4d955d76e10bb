"""Does a token have the same bits in eager mode, under torch.compile with CUDA graphs, and alone or in a batch?

    python benchmarks/rollout_bits.py [--shapes qwen3-8b llama3.1-8b qwen2.5-7b smollm2-135m] [--layers 4] [--out FOLDER]

jetrl's plug-in in real vLLM, greedy, 32 prompts of 5 to 300 tokens, 64 tokens each, random weights. Counts tokens and
log-probabilities (all bits) that agree with eager mode, and the peak of memory while loading beside the weights' size.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rollout_engines import SHAPES, build, write_config

LENGTHS = [37, 64, 100, 128, 200, 256, 300, 5] * 4
TOKENS = 64


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

    peak, load = [], Worker.load_model

    def watched(self, *args, **kwargs):
        torch.cuda.reset_peak_memory_stats()
        result = load(self, *args, **kwargs)
        peak.append(torch.cuda.max_memory_allocated())
        return result

    Worker.load_model = watched
    settings = {"enforce_eager": True} if mode == "eager" else {}
    if mode == "compiled":
        settings = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}}
    start = time.perf_counter()
    llm = build(
        "jetrl", write_config(Path(tempfile.mkdtemp()), shape, layers), max_model_len=1024, max_num_seqs=64,
        gpu_memory_utilization=0.4, enable_prefix_caching=False, seed=0, **settings,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(100, 40_000, (n,), generator=generator).tolist() for n in LENGTHS]
    weights = sum(p.nbytes for p in llm.llm_engine.model_executor.driver_worker.worker.get_model().parameters())
    batch = _generate(llm, prompts)
    return {
        "batch": batch, "alone": [_generate(llm, [p])[0] for p in prompts[:3]], "start_s": seconds,
        "load_peak_mb": peak[0] / 1e6, "weights_mb": weights / 1e6,
    }  # fmt: skip


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
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print("RESULT " + json.dumps(run_child(arguments.child[0], arguments.layers, arguments.child[1])), flush=True)
        return
    from harness import print_table, write_results

    rows = []
    for shape in arguments.shapes:
        found = {}
        for mode in ("eager", "compiled"):
            command = [sys.executable, __file__, "--layers", str(arguments.layers), "--child", shape, mode]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if lines:
                found[mode] = json.loads(lines[0].removeprefix("RESULT "))
        if len(found) == 2:
            rows.append(compare(shape, found["eager"], found["compiled"]))
            print(rows[-1], flush=True)
        else:
            print(f"{shape}: an engine did not start", flush=True)
    print_table(rows)
    print(write_results("rollout-bits", rows, arguments.out, layers=arguments.layers))


if __name__ == "__main__":
    main()
