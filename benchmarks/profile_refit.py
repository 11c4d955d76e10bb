"""Host time of a weight sync's receiver, on a CPU: as many tensors as the model on the GPU has, each of them tiny.

    python benchmarks/profile_refit.py [--layers 36] [--repeats 30] [--profile "fp8 -> jetrl"]

On a GPU a refit of 8B weights in VeRL's buckets waits for the host: every torch call costs 5 to 10 us of it whatever the
size, and a synchronization costs the whole queue. This takes the three paths of bench_refit.py through the models that a
vLLM worker holds, all in one process, in turn, and prints for each the least milliseconds (neighbours on the machine only
add to them) of
  sender    making what is sent (only the FP8 wire makes something),
  load      model.load_weights, bucket by bucket,
  finish    vLLM's post-processing,
and how many torch operators load + finish call, views among them, and how many of those wait for the device (a tensor read
as a list, once at the end of jetrl's, is not among what a CPU shows). The quantizer's arithmetic, which is one launch on a
GPU and dozens of operators here, is taken out; what calls it stays. So is what VeRL does for each tensor on both sides.
"""

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from pathlib import Path

import jetrl_kernels.ops  # noqa: F401
import torch
from harness import print_table
from rollout_engines import SHAPES
from torch.utils._python_dispatch import TorchDispatchMode

from jetrl.integrations.verl.wire import quantized_on_the_way
from jetrl.integrations.vllm.refit_plan import attach

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


def receive(subject: tuple, items: list, buckets: int) -> tuple[float, float]:
    """(seconds of load, seconds of finish)."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model, config = subject
    began = time.perf_counter()
    for i in range(buckets):
        model.load_weights(items[i * len(items) // buckets : (i + 1) * len(items) // buckets])
    loaded = time.perf_counter()
    process_weights_after_loading(model, config, torch.device("cpu"))
    return loaded - began, time.perf_counter() - loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--profile", choices=PATHS, help="print where this path's time goes")
    arguments = parser.parse_args()
    config = SHAPES["qwen3-8b"] | SIZES | {"num_hidden_layers": arguments.layers, "vocab_size": 2048}
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
    for turn in range(arguments.repeats + 1):
        for path, (engine, wire, buckets) in PATHS.items():
            began = time.perf_counter()
            formats = matrices if wire == "fp8" else {}
            items = list(quantized_on_the_way(iter(weights.items()), formats, "cpu"))
            sender = time.perf_counter() - began
            found = (sender, *receive(subjects[engine], items, buckets))
            seconds[path] += [found] if turn else []
            if turn != arguments.repeats:
                continue
            with Calls() as calls:
                receive(subjects[engine], items, buckets)
            least = [1e3 * min(s) for s in zip(*seconds[path], strict=True)]
            rows.append(
                {"path": path, "tensors": len(items), "sender_ms": least[0], "load_ms": least[1], "finish_ms": least[2],
                 "receive_ms": least[1] + least[2], "operators": calls.all, "waits": calls.waits}
            )  # fmt: skip
            if path == arguments.profile:
                profiler.enable()
                for _ in range(arguments.repeats):
                    receive(subjects[engine], items, buckets)
                profiler.disable()
    print_table(rows)
    if arguments.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    del replaced


if __name__ == "__main__":
    main()
