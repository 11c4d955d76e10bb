"""Host time of a weight sync, on a CPU: as many tensors as the model on the GPU has, each of them tiny.

    python benchmarks/profile_refit.py [--layers 36] [--repeats 30] [--profile "fp8 -> jetrl"] [--side sender]

On a GPU a refit of 8B weights in VeRL's buckets waits for the host: every torch call costs 5 to 10 us of it whatever the
size, and a synchronization costs the whole queue. VeRL's sender and receiver take turns (one buffer, and an answer for
each bucket), so their host times add up. This takes the three paths of bench_refit.py through VeRL's own sender and the
models that a vLLM worker holds, all in one process, in turn, and prints for each the least milliseconds (neighbours on the
machine only add to them) of
  make      making what is sent (only the FP8 wire makes something),
  pack      VeRL's sender: each tensor into the bucket, and the buckets' metadata,
  load      the receiver: views of the bucket as VeRL's makes them, and model.load_weights, bucket by bucket,
  finish    vLLM's post-processing,
and how many torch operators each side calls, views among them, and how many of the receiver's wait for the device (a tensor
read as a list, once at the end of jetrl's, is not among what a CPU shows). The quantizer's arithmetic, which is one launch on
a GPU and dozens of operators here, is taken out; what calls it stays. The buffer's allocation, its handle and the sockets
are not in it.
"""

import argparse
import asyncio
import cProfile
import json
import pickle
import pstats
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jetrl_kernels.ops  # noqa: F401
import torch
from harness import print_table
from rollout_engines import SHAPES
from torch.utils._python_dispatch import TorchDispatchMode
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

from jetrl.integrations.verl.wire import quantized_on_the_way
from jetrl.integrations.vllm.refit_plan import attach
from jetrl.weight_bundle import bundled

PATHS = {
    "bf16 -> bf16": ("bf16", "bf16", 8),
    "bf16 -> jetrl": ("jetrl", "bf16", 8),
    "fp8 -> jetrl": ("jetrl", "fp8", 5),
}
WAITS = ("_local_scalar_dense", "equal.default", "nonzero", "is_nonzero")
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 2, "num_key_value_heads": 1}


class Calls(TorchDispatchMode):
    """Counts operators, jetrl's own as one each."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.waits = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.all += 1
        self.waits += any(word in str(func) for word in WAITS)
        return func(*args, **(kwargs or {}))


def without_arithmetic() -> torch.library.Library:
    """The weight quantizer of both wires without what it computes: scales of one, codes as they are."""
    library = torch.library.Library("jetrl", "IMPL")

    def fill(weight, scale_format, codes, scale):
        scale.fill_(1.0)

    library.impl("quantize_blocks_into", fill, "CPU", allow_override=True)
    return library


def build(folder: Path, **arguments) -> tuple[torch.nn.Module, object]:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    # vLLM packs unquantized weights after each sync, on a CPU only; see jetrl/integrations/vllm/cpu.py.
    UnquantizedLinearMethod.process_weights_after_loading = lambda self, layer: None
    UnquantizedEmbeddingMethod.process_weights_after_loading = lambda self, layer: None
    config = EngineArgs(
        str(folder), load_format="dummy", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64, **arguments
    ).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        return initialize_model(config), config.model_config


class Sync(BucketedWeightSender):
    """One sync of VeRL's sender; its socket is this object, which loads a bucket as soon as it is sent."""

    def __init__(
        self, subject: tuple, buffer: torch.Tensor, calls: Calls, profiler: cProfile.Profile, side: str | None
    ):
        super().__init__("inproc://nobody", 0)
        (self.model, self.config), self.buffer, self.bucket_size = subject, buffer, buffer.numel()
        self.calls, self.profiler, self.side = calls, profiler, side
        self.make = self.load = 0.0
        self.tensors = self.buckets = self.receiver_calls = self.receiver_waits = 0

    def _init_socket(self) -> None:
        self.socket = self

    def _init_buffer(self) -> None:
        pass

    def _cleanup(self) -> None:
        pass

    def send_pyobj(self, message: dict) -> None:
        self._sent = pickle.dumps(message)
        self.tensors, self.buckets = self.tensors + len(message["bucket_meta"]), self.buckets + 1

    def recv(self) -> bytes:
        """What VeRL's receiver does with a bucket."""
        self._profile("receiver")
        began, calls, waits = time.perf_counter(), self.calls.all, self.calls.waits
        weights = []
        for name, meta in pickle.loads(self._sent)["bucket_meta"].items():
            size = meta["dtype"].itemsize * meta["shape"].numel()
            part = self.buffer[meta["offset"] : meta["offset"] + size]
            weights.append((name, part.view(dtype=meta["dtype"]).view(meta["shape"])))
        self.model.load_weights(weights)
        self.load += time.perf_counter() - began
        self.receiver_calls += self.calls.all - calls
        self.receiver_waits += self.calls.waits - waits
        self._profile("sender")
        return b""

    def _profile(self, side: str) -> None:
        if self.side is not None:
            (self.profiler.enable if side == self.side else self.profiler.disable)()

    def _made(self, items: Iterator) -> Iterator:
        while True:
            began = time.perf_counter()
            item = next(items, None)
            self.make += time.perf_counter() - began
            if item is None:
                return
            yield item

    def run(self, items: Iterator) -> tuple[float, float, float, float]:
        """Seconds of make, pack, load and finish."""
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        began = time.perf_counter()
        self._profile("sender")
        asyncio.run(self.async_send_weights(self._made(items)))
        self._profile("receiver")
        calls, waits, loaded = self.calls.all, self.calls.waits, time.perf_counter()
        process_weights_after_loading(self.model, self.config, torch.device("cpu"))
        self.receiver_calls += self.calls.all - calls
        self.receiver_waits += self.calls.waits - waits
        finish = time.perf_counter() - loaded
        self.profiler.disable()
        return self.make, loaded - began - self.make - self.load, self.load, finish


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--profile", choices=PATHS, help="print where this path's time goes")
    parser.add_argument("--side", choices=("sender", "receiver"), default="receiver", help="of --profile")
    arguments = parser.parse_args()
    config = SHAPES["qwen3-8b"] | SIZES | {"num_hidden_layers": arguments.layers, "vocab_size": 1024}
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    from bench_refit import trainer_weights

    weights = trainer_weights(config)
    matrices = {name.removesuffix(".weight"): "fp32" for name in weights if name.endswith("_proj.weight")}
    replaced = without_arithmetic()
    subjects = {"bf16": build(folder), "jetrl": build(folder, quantization="jetrl")}
    attach(subjects["jetrl"][0])
    seconds: dict[str, list[tuple]] = {path: [] for path in PATHS}
    rows, profiler = [], cProfile.Profile()
    wires = {
        "bf16": lambda: iter(weights.items()),
        "fp8": lambda: bundled(quantized_on_the_way(iter(weights.items()), matrices, "cpu")),
    }
    for turn in range(arguments.repeats + 1):
        for path, (engine, wire, buckets) in PATHS.items():
            # As many buckets as the model on the GPU takes: these have other proportions.
            total = sum(tensor.nbytes for _, tensor in wires[wire]())
            buffer = torch.empty(int(total / (buckets - 0.5)), dtype=torch.uint8)

            def sync(calls: Calls, side: str | None = None, subject=subjects[engine], buffer=buffer) -> Sync:
                return Sync(subject, buffer, calls, profiler, side)

            found = sync(Calls()).run(wires[wire]())
            seconds[path] += [found] if turn else []
            if turn != arguments.repeats:
                continue
            with Calls() as calls:
                counted = sync(calls)
                counted.run(wires[wire]())
            make, pack, load, finish = (1e3 * min(s) for s in zip(*seconds[path], strict=True))
            rows.append(
                {"path": path, "tensors": counted.tensors, "buckets": counted.buckets, "make_ms": make, "pack_ms": pack,
                 "load_ms": load, "finish_ms": finish, "sender_ms": make + pack, "receiver_ms": load + finish,
                 "sender_operators": calls.all - counted.receiver_calls, "receiver_operators": counted.receiver_calls,
                 "waits": counted.receiver_waits}
            )  # fmt: skip
            if path == arguments.profile:
                for _ in range(arguments.repeats):
                    sync(Calls(), arguments.side).run(wires[wire]())
    print_table(rows)
    if arguments.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    del replaced


if __name__ == "__main__":
    main()
