"""A linear layer forward and backward with all its quantization, against BF16 nn.Linear and others, Qwen3-8B at 8192 tokens.

    python benchmarks/bench_layer.py [--out FOLDER]

Every layer is the real module under autograd (weights BF16, gradients of input and weight). Bar: 1.45 times BF16, geometric
mean over the model's shapes. "blocks" is the option wgrad=blocks; "codes kept" has the weight's codes from an earlier
micro-batch of the same optimizer step. torchao's blockwise FP8 training linear is timed where torchao is installed, with
torch._scaled_mm and, under --torchao-triton, with its own Triton GEMMs (which autotune for minutes); Transformer Engine's
linear with its block scaling (1x128 and 128x128) where that is installed. Their quantizers: `torchao_layer.py` compiles them
in parallel first.
"""

import argparse
import time
from pathlib import Path

import torch
from harness import geometric_mean, print_table, require_gpu, time_calls, write_results
from torch import nn

from jetrl.linear import Float8Linear
from jetrl.precision.formats import LinearFormat
from jetrl.weight_cache import CachePolicy, weights_changed

TOKENS = 8192
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
REPEATS = 4


def _time(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[float, float]:
    """Microseconds of forward + backward on the GPU (median) and spread, replayed from a graph so that Python stays out."""

    def step() -> None:
        torch.autograd.grad(layer(x), (x, layer.weight), dy)

    with torch.cuda.stream(torch.cuda.Stream()):
        timing = time_calls([step], REPEATS)
    torch.cuda.synchronize()
    return timing.us, timing.spread


def _layers(n: int, k: int, torchao_triton: bool):
    def plain() -> nn.Linear:
        return nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)

    yield "bf16", plain()
    yield "jetrl fp32", Float8Linear.from_linear(plain(), LinearFormat.fp8_blockwise("fp32"))
    yield "jetrl pow2", Float8Linear.from_linear(plain(), LinearFormat.fp8_blockwise("pow2"))
    yield "jetrl fp32 blocks", Float8Linear.from_linear(plain(), LinearFormat.fp8_blockwise("fp32", "blocks"))
    weights_changed()  # before it, nothing is kept
    kept = CachePolicy("step")
    yield "jetrl fp32, codes kept", Float8Linear.from_linear(plain(), LinearFormat.fp8_blockwise("fp32"), kept)
    yield from _torchao(plain, torchao_triton)
    yield from _transformer_engine(n, k)


def _torchao(plain, torchao_triton: bool):
    try:
        from torchao_layer import blockwise, shorten_autotuning
    except ImportError as error:
        print(f"torchao is not timed: {error}")
        return
    shorten_autotuning()
    yield "torchao scaled_mm", blockwise(plain())
    if torchao_triton:
        yield "torchao triton", blockwise(plain(), use_triton=True)


class _UnderAutocast(nn.Module):
    """Transformer Engine chooses a layer's precision by a context manager around its call."""

    def __init__(self, layer: nn.Module, autocast) -> None:
        super().__init__()
        self.layer, self.autocast = layer, autocast

    @property
    def weight(self) -> torch.Tensor:
        return self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            return self.layer(x)


def _transformer_engine(n: int, k: int):
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8BlockScaling
    except ImportError as error:
        print(f"Transformer Engine is not timed: {error}")
        return
    layer = te.Linear(k, n, bias=False, params_dtype=torch.bfloat16, device="cuda")
    yield "transformer engine", _UnderAutocast(layer, lambda: te.autocast(enabled=True, recipe=Float8BlockScaling()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the JSON (default benchmarks/results)")
    parser.add_argument("--torchao-triton", action="store_true", help="also time torchao with its Triton GEMMs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no layer after this")
    arguments = parser.parse_args()
    require_gpu()
    rows, deadline = [], time.perf_counter() + arguments.seconds
    for n, k in SHAPES:
        x = torch.randn(TOKENS, k, device="cuda", dtype=torch.bfloat16).requires_grad_()
        dy = torch.randn(TOKENS, n, device="cuda", dtype=torch.bfloat16)
        bf16_us = None
        for name, layer in _layers(n, k, arguments.torchao_triton):
            if time.perf_counter() > deadline:
                print(f"no time for {name} {n}x{k}")
                continue
            try:
                us, spread = _time(layer, x, dy)
            except (RuntimeError, ValueError, TypeError, AssertionError) as error:
                print(f"{name} {n}x{k} failed: {str(error).splitlines()[0]}")
                continue
            bf16_us = bf16_us or us
            rows.append({"layer": name, "shape": f"{n}x{k}", "us": us, "spread": spread, "ratio": bf16_us / us})
            print(rows[-1], flush=True)
            del layer
        # After every shape: some of the layers take long to get ready, and what was measured must not be lost with them.
        path, means = _write(rows, arguments.out)
    print_table(rows)
    for name, mean in means.items():
        print(f"{name}: geometric mean {mean:.3f}")
    print(path)


def _write(rows: list[dict], out: Path | None) -> tuple[Path, dict[str, float]]:
    names = dict.fromkeys(row["layer"] for row in rows)
    means = {name: geometric_mean([row["ratio"] for row in rows if row["layer"] == name]) for name in names}
    return write_results("layer", rows, out, tokens=TOKENS, means=means), means


if __name__ == "__main__":
    main()
