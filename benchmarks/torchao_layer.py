"""torchao's blockwise FP8 training linear, as bench_layer.py and bench_update.py time it.

    python benchmarks/torchao_layer.py [PROCESSES]

compiles what its autotuning will try into Triton's cache, in parallel: 45 configurations of three quantizers, one after
another, take minutes.
"""

import functools
import subprocess
import sys
import time

import torch
import triton
from torch import nn
from torchao.prototype.blockwise_fp8_training import kernels
from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear

TOKENS = 8192


def blockwise(linear: nn.Linear, use_triton: bool = False) -> Float8BlockwiseLinear:
    """linear: BF16, without bias, features in multiples of 128. use_triton: torchao's own GEMMs, else torch._scaled_mm."""
    layer = Float8BlockwiseLinear.from_float(linear)
    layer.use_triton, layer.dtype, layer.block_size = use_triton, torch.bfloat16, 128
    return layer


def _autotuners() -> list:
    return [kernel for kernel in vars(kernels).values() if isinstance(kernel, triton.runtime.Autotuner)]


def shorten_autotuning() -> None:
    """13 ms for each configuration of a shape instead of Triton's 125 are enough to rank them."""
    for kernel in _autotuners():
        kernel._do_bench = functools.partial(triton.testing.do_bench, warmup=3, rep=10)


def _compile_share(part: int, parts: int) -> None:
    for kernel in _autotuners():
        kernel.configs = kernel.configs[part::parts] or kernel.configs[:1]
        kernel._do_bench = lambda call, quantiles: (call(), torch.cuda.synchronize(), (1.0, 1.0, 1.0))[2]
    layer = blockwise(nn.Linear(4096, 6144, bias=False, device="cuda", dtype=torch.bfloat16))
    x = torch.randn(TOKENS, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).backward(torch.randn(TOKENS, 6144, device="cuda", dtype=torch.bfloat16))
    torch.cuda.synchronize()


def main() -> None:
    if len(sys.argv) == 3:
        _compile_share(int(sys.argv[1]), int(sys.argv[2]))
        return
    parts, began = int(sys.argv[1]) if len(sys.argv) == 2 else 15, time.perf_counter()
    running = [subprocess.Popen([sys.executable, __file__, str(i), str(parts)]) for i in range(parts)]
    failed = sum(process.wait() != 0 for process in running)
    print(f"torchao's quantizers compiled in {time.perf_counter() - began:.0f} s, {failed} of {parts} processes failed")


if __name__ == "__main__":
    main()
