"""Weight sync from a trainer process to a vLLM engine on the same GPU, through VeRL's bucketed transfer (CUDA IPC).

    python benchmarks/bench_refit.py [--shape qwen3-8b] [--repeats 5] [--cycles 200 --cycle-shape qwen3-0.6b] [--out FOLDER]

Speed: the trainer holds random BF16 weights and sends all of them; seconds from the first tensor to the answer after
vLLM's post-processing. `bf16 -> bf16` is vLLM's own model, `bf16 -> jetrl` quantizes on arrival, `fp8 -> jetrl` in the
trainer, which is part of the time. Bar: jetrl faster than bf16 -> bf16.
Cycles: sleep (levels 1 and 2 in turn), wake, refit by both wires in turn with the same weights, --cycles times: the hash of
all weight bytes after each, and the device memory in use.
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rollout_engines import SHAPES, build, config_of, worker_memory, write_config

PATHS = {"bf16 -> bf16": ("bf16", "bf16"), "bf16 -> jetrl": ("jetrl", "bf16"), "fp8 -> jetrl": ("jetrl", "fp8")}
BUCKET_MB = 2048  # VeRL's default
DEVICE = "cuda"  # "cpu" goes through shared memory, as VeRL does there


def trainer_weights(config: dict) -> dict[str, torch.Tensor]:
    """Random BF16 weights of a Qwen3 of this shape under Hugging Face's names, on the GPU."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "self_attn.q_norm": (size,), "self_attn.k_norm": (size,),
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    torch.manual_seed(0)
    return {
        name: torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).mul_(0.02).add_(len(shape) == 1)
        for name, shape in shapes.items()
    }


def on_wire(weights: dict[str, torch.Tensor], wire: str) -> Iterator[tuple[str, torch.Tensor]]:
    """What the trainer sends: the weights, or codes and scales of every matrix inside the layers."""
    if wire == "bf16":
        return iter(weights.items())
    from jetrl.integrations.verl.wire import quantized_on_the_way

    matrices = {name.removesuffix(".weight"): "fp32" for name in weights if name.endswith("_proj.weight")}
    return quantized_on_the_way(iter(weights.items()), matrices, DEVICE)


def receive(worker, handle: str, use_shm: bool) -> int:
    """Called in the worker: what VeRL's worker extension does in update_weights_from_ipc. Returns the bytes received."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model, received = worker.model_runner.model, 0

    def take(weights: list, is_last: bool) -> None:
        nonlocal received
        received += sum(tensor.nbytes for _, tensor in weights)
        model.load_weights(weights)

    receiver = BucketedWeightReceiver(zmq_handle=handle, device=worker.device, use_shm=use_shm)
    receiver.receive_weights(on_bucket_received=take)
    process_weights_after_loading(model, worker.model_runner.vllm_config.model_config, worker.device)
    return received


def refit(llm, weights: dict[str, torch.Tensor], wire: str) -> tuple[float, int]:
    """(seconds, bytes received)."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    handle = f"ipc://{tempfile.gettempdir()}/jetrl-refit-{os.getpid()}.sock"
    answer = []
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    worker = threading.Thread(target=lambda: answer.append(llm.collective_rpc(receive, args=(handle, DEVICE == "cpu"))))
    worker.start()
    asyncio.run(BucketedWeightSender(handle, BUCKET_MB, DEVICE == "cpu").async_send_weights(on_wire(weights, wire)))
    worker.join()
    return time.perf_counter() - start, answer[0][0]


def _hash(worker) -> str:
    """Of every parameter's bytes, codes and scales included."""
    digest = hashlib.sha256()
    for name, parameter in sorted(worker.get_model().named_parameters()):
        flat = parameter.data.contiguous().view(torch.uint8).flatten()
        digest.update(name.encode() + bytes(_sum_of_bytes(flat).cpu().numpy()))
    return digest.hexdigest()


def _sum_of_bytes(flat: torch.Tensor) -> torch.Tensor:
    """Four int64 sums that depend on every byte and its place: reading the bytes to the CPU would take minutes."""
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(torch.int64)
    place = torch.arange(flat.numel(), device=flat.device)
    return torch.stack([(flat * (place * k * 2654435761 + k)).sum() for k in (1, 3, 5, 7)])


def _engine(engine: str, shape: str, sleep: bool):
    llm = build(
        engine, write_config(Path(tempfile.mkdtemp()), shape), max_model_len=1024, max_num_seqs=32, enforce_eager=not sleep,
        gpu_memory_utilization=0.45, enable_sleep_mode=sleep, enable_prefix_caching=False,
        **({"compilation_config": {"cudagraph_capture_sizes": [1, 8, 32]}} if sleep else {}),
    )  # fmt: skip
    if engine == "jetrl":
        from jetrl.integrations.protocol import REPORT_METHOD

        llm.collective_rpc(REPORT_METHOD, args=([],))  # the trainer's handshake
    return llm


def measure_speed(arguments: argparse.Namespace, engine: str) -> list[dict]:
    weights = trainer_weights(config_of(arguments.shape))
    if arguments.second_gpu:
        # The engine's processes see the GPUs in the other order; the bucket stays on this process's first one.
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(reversed(seen))
    llm, rows = _engine(engine, arguments.shape, False), []
    for path, (kind, wire) in PATHS.items():
        if kind != engine:
            continue
        refit(llm, weights, wire)
        runs = [refit(llm, weights, wire) for _ in range(arguments.repeats)]
        seconds = [s for s, _ in runs]
        rows.append(
            {"path": path, "gpus": 1 + arguments.second_gpu, "seconds": statistics.median(seconds), "spread": (max(seconds) - min(seconds)) / min(seconds),
             "gb": runs[0][1] / 1e9, "hash": llm.collective_rpc(_hash)[0][:12]}
        )  # fmt: skip
    return rows


def measure_cycles(arguments: argparse.Namespace) -> list[dict]:
    from vllm import SamplingParams

    weights = trainer_weights(config_of(arguments.cycle_shape))
    llm, hashes, used, tokens = _engine("jetrl", arguments.cycle_shape, True), set(), [], set()
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    for i in range(arguments.cycles):
        stamps = [time.perf_counter()]
        llm.sleep(level=1 + i // 2 % 2)
        stamps.append(time.perf_counter())
        llm.wake_up(tags=["weights"])
        stamps.append(time.perf_counter())
        refit(llm, weights, ("bf16", "fp8")[i % 2])
        stamps.append(time.perf_counter())
        hashes.add(llm.collective_rpc(_hash)[0])
        llm.wake_up(tags=["kv_cache"])
        stamps.append(time.perf_counter())
        if i % 20 < 4:
            parts = [f"{b - a:.3f}" for a, b in itertools.pairwise(stamps)]
            print(f"cycle {i}: sleep, wake, refit, hash + wake took {' '.join(parts)} s", flush=True)
        if i % 10 < 2:
            out = llm.generate([{"prompt_token_ids": list(range(100, 164))}], params, use_tqdm=False)
            tokens.add(tuple(out[0].outputs[0].token_ids))
        free, total = torch.cuda.mem_get_info()
        worker = worker_memory(llm)[0]
        used.append({"device": total - free, "worker_torch": worker["reserved"], "worker_host": worker["host"]})
    return [
        {"cycles": arguments.cycles, "hashes": len(hashes), "outputs": len(tokens),
         **{f"{k}_mb_after_10": v / 1e6 for k, v in used[9].items()},
         **{f"{k}_growth_mb": (used[-1][k] - v) / 1e6 for k, v in used[9].items()},
         "seconds_per_cycle": (time.perf_counter() - start) / arguments.cycles}
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=0)
    parser.add_argument("--cycle-shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--skip-speed", action="store_true")
    parser.add_argument("--second-gpu", action="store_true", help="the engine runs on another GPU than the trainer")
    parser.add_argument("--out", type=Path, help="folder of the JSON (default benchmarks/results)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        rows = measure_cycles(arguments) if arguments.child == "cycles" else measure_speed(arguments, arguments.child)
        print("RESULT " + json.dumps(rows), flush=True)
        return
    from harness import print_table, write_results

    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}"}
    results = {"speed": [], "cycles": []}
    children = ([] if arguments.skip_speed else ["bf16", "jetrl"]) + (["cycles"] if arguments.cycles else [])
    for child in children:
        command = [sys.executable, __file__, *sys.argv[1:], "--child", child]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for line in running.stdout:
            if line.startswith("RESULT "):
                rows = json.loads(line.removeprefix("RESULT "))
                results["cycles" if child == "cycles" else "speed"] += rows
                print_table(rows)
            elif line.startswith("cycle"):
                print(line, end="", flush=True)
        if running.wait() != 0:
            print(f"{child}: ended with exit code {running.returncode}", flush=True)
    print(
        write_results(
            f"refit-{arguments.shape}" + ("-2gpus" if arguments.second_gpu else ""),
            results["speed"],
            arguments.out,
            cycles=results["cycles"],
        )
    )


if __name__ == "__main__":
    main()
