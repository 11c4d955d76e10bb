"""Weight sync from a trainer process to a vLLM engine on the same GPU, through VeRL's bucketed transfer (CUDA IPC).

    python benchmarks/bench_refit.py [--shape qwen3-8b] [--layers N] [--repeats 5] [--second-gpu] [--profile FOLDER] [--out FOLDER]
    python benchmarks/bench_refit.py --skip-speed --cycles 200 [--cycle-shape qwen3-0.6b] [--seconds N]

Speed: the trainer holds random BF16 weights and sends all of them; seconds from the first tensor to the answer after
vLLM's post-processing. `bf16 -> bf16` is vLLM's own model, `bf16 -> jetrl` quantizes on arrival, `fp8 -> jetrl` in the
trainer, which is part of the time. Bar: jetrl faster than bf16 -> bf16. Where a sync's seconds go, one after another as the
two sides take turns: `open_s` until the sender has its buffer and the receiver has opened it, `send_s` the sender's own
work, `wait_s` the receiver's answers to buckets, `close_s` the sender's end, `rest_s` from there to the engine's answer. Of the
receiver: `load_s` model.load_weights without the wait for the device, `finish_s` post-processing.
--profile adds, after the timed syncs of a path, one whose sender is profiled: `profile-PATH.txt` in its folder.
The engines start side by side (turns.py) and are measured one at a time.
Cycles: sleep (levels 1 and 2 in turn), wake, refit by both wires in turn with the same weights, --cycles times: the hash of
all weight bytes after each, and the device memory in use. It needs the GPU to itself: vLLM's sleep and the memory count
look at all of it. On a CPU (`--shape tiny --cycle-shape tiny`), where weights go through shared memory and engines do not
sleep, both are rehearsals.
"""

import argparse
import asyncio
import cProfile
import hashlib
import itertools
import os
import pstats
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import print_table, write_results
from rollout_engines import SHAPES, build, config_of, model_folder, worker_memory
from turns import serve, start

PATHS = {"bf16 -> bf16": ("bf16", "bf16"), "bf16 -> jetrl": ("jetrl", "bf16"), "fp8 -> jetrl": ("jetrl", "fp8")}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # "cpu" goes through shared memory, as VeRL does there
BUCKET_MB = 2048 if DEVICE == "cuda" else 64  # VeRL's default
REFIT_SECONDS = 60 if DEVICE == "cuda" else 600  # a question's limit


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
    from jetrl.weight_bundle import bundled

    matrices = {name.removesuffix(".weight"): "fp32" for name in weights if name.endswith("_proj.weight")}
    return bundled(quantized_on_the_way(iter(weights.items()), matrices, DEVICE))


def receive(worker, handle: str, use_shm: bool, bucket_gpu: int | None) -> int:
    """Called in the worker: what VeRL's worker extension does in update_weights_from_ipc. Returns the bytes received.

    bucket_gpu: this process's number of the trainer's GPU, where that is not the worker's own.
    """
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model, received, loading = worker.model_runner.model, 0, 0.0

    def take(weights: list, is_last: bool) -> None:
        nonlocal received, loading
        received += sum(tensor.nbytes for _, tensor in weights)
        began = time.perf_counter()
        model.load_weights(weights)
        loading += time.perf_counter() - began

    device = worker.device if bucket_gpu is None else torch.device("cuda", bucket_gpu)
    receiver = BucketedWeightReceiver(zmq_handle=handle, device=device, use_shm=use_shm)
    receiver.receive_weights(on_bucket_received=take)
    began = time.perf_counter()
    process_weights_after_loading(model, worker.model_runner.vllm_config.model_config, worker.device)
    return received, {"load_s": loading, "finish_s": time.perf_counter() - began}


def _timed_sender(handle: str):
    """VeRL's sender, and a dictionary of its seconds."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    seconds = dict.fromkeys(("open_s", "wait_s", "close_s"), 0.0)

    class Timed(BucketedWeightSender):
        def timed(self, name: str, function, *arguments):
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                seconds[name] += time.perf_counter() - began

        def _init_buffer(self) -> None:
            self.timed("open_s", super()._init_buffer)
            self.socket = Waited(self, self.socket)

        def _cleanup(self) -> None:
            self.timed("close_s", super()._cleanup)

    class Waited:
        def __init__(self, sender: Timed, socket) -> None:
            self.sender, self.send_pyobj, self.close, self._recv = sender, socket.send_pyobj, socket.close, socket.recv

        def recv(self) -> bytes:
            return self.sender.timed("wait_s", self._recv)

    return Timed(handle, BUCKET_MB, DEVICE == "cpu"), seconds


def refit(llm, weights: dict[str, torch.Tensor], wire: str, bucket_gpu: int | None = None) -> tuple[float, int, dict]:
    """(seconds, bytes received, seconds by part)."""
    handle = f"ipc://{tempfile.gettempdir()}/jetrl-refit-{os.getpid()}.sock"
    answer = []

    def receiving() -> None:
        try:
            answer.append(llm.collective_rpc(receive, args=(handle, DEVICE == "cpu", bucket_gpu)))
        except BaseException:  # noqa: BLE001  (the sender would wait for its answers for ever)
            traceback.print_exc()
            os._exit(1)

    if DEVICE == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    worker = threading.Thread(target=receiving)
    worker.start()
    sender, parts = _timed_sender(handle)
    asyncio.run(sender.async_send_weights(on_wire(weights, wire)))
    sent = time.perf_counter() - began
    worker.join()
    seconds, (received, receiving_parts) = time.perf_counter() - began, answer[0][0]
    parts |= {"send_s": sent - sum(parts.values()), "rest_s": seconds - sent} | receiving_parts
    return seconds, received, parts


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


def _engine(engine: str, shape: str, layers: int | None, sleep: bool):
    graphs = {"compilation_config": {"cudagraph_capture_sizes": [1, 8, 32]}} if sleep else {}
    llm = build(
        engine, model_folder(shape, layers), max_model_len=1024, max_num_seqs=32,
        max_num_batched_tokens=1024, enforce_eager=not sleep or DEVICE == "cpu", kv_cache_memory_bytes=2 << 30,
        # Only asked for as free memory at the start, where neighbours may be loading.
        gpu_memory_utilization=0.02, enable_sleep_mode=sleep and DEVICE == "cuda", enable_prefix_caching=False, **graphs,
    )  # fmt: skip
    if engine == "jetrl":
        from jetrl.integrations.protocol import REPORT_METHOD

        llm.collective_rpc(REPORT_METHOD, args=([],))  # the trainer's handshake
    return llm


def prepare(arguments: argparse.Namespace) -> tuple[tuple, dict]:
    """((engine, the trainer's weights), {}) in the process of one engine."""
    cycles = arguments.child == "cycles"
    shape, layers = (arguments.cycle_shape, None) if cycles else (arguments.shape, arguments.layers)
    weights = trainer_weights(config_of(shape, layers))
    if arguments.second_gpu:
        # The engine's processes see the GPUs in the other order; the bucket stays on this process's first one.
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(reversed(seen))
    return (_engine("jetrl" if cycles else arguments.child, shape, layers, cycles), weights), {}


def write_profile(subject: tuple, path: str, bucket_gpu: int | None, folder: Path) -> None:
    """Where the sender's host time goes: cProfile sees the calling thread alone, which is the sender's."""
    profile = cProfile.Profile()
    profile.runcall(refit, *subject, PATHS[path][1], bucket_gpu)
    with open(folder / f"profile-{path.replace(' -> ', '-to-')}.txt", "w") as file:
        pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(40)


def measure_speed(arguments: argparse.Namespace, subject: tuple, path: str) -> dict:
    llm, weights = subject
    bucket_gpu, wire = 1 if arguments.second_gpu else None, PATHS[path][1]
    refit(llm, weights, wire, bucket_gpu)
    runs = [refit(llm, weights, wire, bucket_gpu) for _ in range(arguments.repeats)]
    seconds = [s for s, *_ in runs]
    if arguments.profile:
        write_profile(subject, path, bucket_gpu, arguments.profile)
    return {
        "path": path, "gpus": 1 + arguments.second_gpu, "seconds": statistics.median(seconds),
        "spread": (max(seconds) - min(seconds)) / min(seconds), "gb": runs[0][1] / 1e9,
        "hash": llm.collective_rpc(_hash)[0][:12],
        **{part: statistics.median(parts[part] for *_, parts in runs) for part in runs[0][2]},
    }  # fmt: skip


class Cycles:
    """Sleep, wake, refit, again and again; `step` runs some and says what is known so far."""

    def __init__(self, subject: tuple) -> None:
        (self.llm, self.weights), self.done, self.seconds = subject, 0, 0.0
        self.hashes, self.used, self.tokens = set(), [], set()

    def _cycle(self) -> None:
        from vllm import SamplingParams

        llm, i = self.llm, self.done
        stamps = [time.perf_counter()]
        if DEVICE == "cuda":
            llm.sleep(level=1 + i // 2 % 2)
        stamps.append(time.perf_counter())
        if DEVICE == "cuda":
            llm.wake_up(tags=["weights"])
        stamps.append(time.perf_counter())
        refit(llm, self.weights, ("bf16", "fp8")[i % 2])
        stamps.append(time.perf_counter())
        self.hashes.add(llm.collective_rpc(_hash)[0])
        if DEVICE == "cuda":
            llm.wake_up(tags=["kv_cache"])
        stamps.append(time.perf_counter())
        if i % 20 < 4:
            parts = [f"{b - a:.3f}" for a, b in itertools.pairwise(stamps)]
            print(f"cycle {i}: sleep, wake, refit, hash + wake took {' '.join(parts)} s", flush=True)
        if i % 10 < 2:
            params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
            out = llm.generate([{"prompt_token_ids": list(range(100, 164))}], params, use_tqdm=False)
            self.tokens.add(tuple(out[0].outputs[0].token_ids))
        worker = worker_memory(llm)[0]
        self.used.append({"worker_torch": worker["reserved"], "worker_host": worker["host"]})
        if DEVICE == "cuda":
            free, total = torch.cuda.mem_get_info()
            self.used[-1]["device"] = total - free
        self.done += 1

    def step(self, cycles: int) -> dict:
        began = time.perf_counter()
        for _ in range(cycles):
            self._cycle()
        self.seconds += time.perf_counter() - began
        first = self.used[min(9, self.done - 1)]
        return {
            "cycles": self.done, "hashes": len(self.hashes), "outputs": len(self.tokens),
            **{f"{k}_mb_after_10": v / 1e6 for k, v in first.items()},
            **{f"{k}_growth_mb": (self.used[-1][k] - v) / 1e6 for k, v in first.items()},
            "seconds_per_cycle": self.seconds / self.done,
        }  # fmt: skip


def answer(arguments: argparse.Namespace, subject, question: str | int) -> dict:
    return subject.step(question) if isinstance(subject, Cycles) else measure_speed(arguments, subject, question)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="fewer decoder layers than the shape has")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=0)
    parser.add_argument("--cycle-shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--seconds", type=float, default=3600, help="no ten cycles begin later than this")
    parser.add_argument(
        "--ready-seconds", type=float, default=240, help="an engine that has not started by then is left out"
    )
    parser.add_argument("--skip-speed", action="store_true")
    parser.add_argument("--second-gpu", action="store_true", help="the engine runs on another GPU than the trainer")
    parser.add_argument("--profile", type=Path, help="an existing folder: the sender's, of one more sync a path")
    parser.add_argument("--out", type=Path, help="folder of the JSON (default benchmarks/results)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--channel", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:

        def ready():
            subject, found = prepare(arguments)
            return (Cycles(subject) if arguments.child == "cycles" else subject), found

        serve(arguments.channel, ready, lambda subject, question: answer(arguments, subject, question))
        return
    speed, cycles, until = [], [], time.perf_counter() + arguments.seconds
    name = f"refit-{arguments.shape}" + (f"-{arguments.layers}layers" if arguments.layers else "")
    name += "-2gpus" if arguments.second_gpu else ""
    name = f"refit-cycles-{arguments.cycle_shape}" if arguments.skip_speed else name

    def record() -> Path:
        return write_results(name, speed, arguments.out, cycles=cycles[-1:])

    if not arguments.skip_speed:
        running = _start(arguments, ["bf16", "jetrl"])
        for path, (engine, _) in PATHS.items():
            found = running[engine].ask(path, REFIT_SECONDS) if engine in running else None
            if found is None:
                running.pop(engine, None)
                continue
            print(path, found, flush=True)
            speed += [found] if "error" not in found else []
            record()
        for process in running.values():
            process.end()
    if arguments.cycles:
        for process in _start(arguments, ["cycles"]).values():
            for count in range(0, arguments.cycles, 10):
                found = process.ask(min(10, arguments.cycles - count), REFIT_SECONDS)
                if found is None or "error" in found or time.perf_counter() > until:
                    print(found, flush=True)
                    break
                cycles.append(found)
                record()
            process.end()
            log = process.log.read_text(errors="replace").splitlines()
            print(*(line for line in log if line.startswith("cycle ")), sep="\n", flush=True)
    print_table(speed)
    print_table(cycles[-1:])
    print(record())


def _start(arguments: argparse.Namespace, names: list[str]) -> dict:
    """name -> process, of those that got ready."""
    words = [__file__, "--shape", arguments.shape, "--cycle-shape", arguments.cycle_shape]
    words += ["--repeats", str(arguments.repeats), *["--second-gpu"] * arguments.second_gpu]
    words += ["--layers", str(arguments.layers)] if arguments.layers else []
    words += ["--profile", str(arguments.profile)] if arguments.profile else []
    logs = (arguments.out or Path(tempfile.mkdtemp())) / "refit"
    found = start(names, lambda child: [*words, "--child", child], logs, arguments.ready_seconds)
    return {name: process for name, (process, *_) in found.items()}


if __name__ == "__main__":
    main()
