"""Memory-bound kernels against the device's copy bandwidth: quantizers, norm + quantize, SiLU-mul + quantize.

    python benchmarks/bench_quantize.py [--sweep] [--out FOLDER]

`of_copy` is bytes that must move (each input read once, each output written once) over time, over the measured rate of a
2 GiB device-to-device copy. The bar is 0.80, 0.65 for kernels that transpose. --sweep times cuts of the re-quantizer and of
the norm's backward instead, fastest first.
"""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import jetrl_kernels.ops  # noqa: F401
import torch
from harness import copy_bandwidth, input_sets, print_table, require_gpu, time_calls, write_results
from jetrl_kernels import norm_triton, quantize_triton

TOKENS = 8192
SHAPES = ((TOKENS, 4096), (TOKENS, 12288))


def _cases(m: int, k: int):
    """(name, bar, bytes, function of a set of inputs, maker of a set)."""
    jetrl, bf16, n = torch.ops.jetrl, torch.bfloat16, m * k
    scales = n / 32  # 4 bytes per 128 codes

    def matrices(count: int):
        return lambda: tuple(torch.randn(m, k, device="cuda", dtype=bf16) for _ in range(count))

    def saved():
        return jetrl.quantize_tiles(torch.randn(m, k, device="cuda", dtype=bf16), "fp32")

    def master(dtype):
        return lambda: (torch.randn(m, k, device="cuda").to(dtype),)

    weight, rstd = torch.randn(k, device="cuda", dtype=bf16), torch.rand(m, device="cuda") + 0.5
    for scale_format in ("fp32", "pow2"):
        f = scale_format
        tag = "" if f == "fp32" else " pow2"
        yield f"quantize_tiles{tag}", 0.80, 3 * n + scales, lambda x, f=f: jetrl.quantize_tiles(x, f), matrices(1)
        yield (
            f"quantize_tiles_transposed{tag}",
            0.65,
            3 * n + scales,
            lambda x, f=f: jetrl.quantize_tiles_transposed(x, f),
            matrices(1),
        )
        yield (
            f"quantize_tiles_both{tag}",
            0.65,
            4 * n + 2 * scales,
            lambda x, f=f: jetrl.quantize_tiles_both(x, f),
            matrices(1),
        )
        yield (
            f"requantize_tiles_transposed{tag}",
            0.65,
            2 * n + 2 * scales,
            lambda c, s, f=f: jetrl.requantize_tiles_transposed(c, s, k, f),
            saved,
        )
    yield (
        "rms_norm_quantize",
        0.80,
        3 * n + scales,
        lambda x: jetrl.rms_norm_quantize(x, None, weight, 1e-6, "fp32"),
        matrices(1),
    )
    yield (
        "rms_norm_quantize +residual",
        0.80,
        7 * n + scales,
        lambda x, r: jetrl.rms_norm_quantize(x, r, weight, 1e-6, "fp32"),
        matrices(2),
    )
    yield (
        "rms_norm_backward",
        0.80,
        6 * n,
        lambda g, h: jetrl.rms_norm_backward(g, None, h, weight, rstd),
        matrices(2),
    )
    yield "silu_mul_quantize", 0.80, 5 * n + scales, lambda g, u: jetrl.silu_mul_quantize(g, u, "fp32"), matrices(2)
    yield (
        "silu_mul_quantize_backward",
        0.80,
        12 * n + 2 * scales,
        lambda d, g, u: jetrl.silu_mul_quantize_backward(d, g, u, "fp32"),
        matrices(3),
    )
    for name, dtype in (("fp32", torch.float32), ("bf16", bf16)):
        size = torch.finfo(dtype).bits // 8
        yield (
            f"quantize_blocks {name}",
            0.80,
            (size + 1) * n,
            lambda w: jetrl.quantize_blocks(w, "fp32"),
            master(dtype),
        )
        yield (
            f"quantize_blocks_transposed {name}",
            0.65,
            (size + 1) * n,
            lambda w: jetrl.quantize_blocks_transposed(w, "fp32"),
            master(dtype),
        )
        yield (
            f"quantize_blocks_both {name}",
            0.65,
            (size + 2) * n,
            lambda w: jetrl.quantize_blocks_both(w, "fp32"),
            master(dtype),
        )


def _cuts(kernel: str) -> Iterator[tuple]:
    """Make one cut after the other the current one, and yield it; the shipped one is back at the end."""
    if kernel == "requantize_tiles_transposed":
        names = "REQUANTIZE_COLUMNS", "REQUANTIZE_WARPS", "REQUANTIZE_VECTOR"
        shipped = [getattr(quantize_triton, name) for name in names]
        for cut in [*itertools.product((32, 64, 128), (1, 2, 4, 8), (4, 8, 16)), shipped]:
            for name, value in zip(names, cut, strict=True):
                setattr(quantize_triton, name, value)
            yield tuple(cut)
    elif kernel == "rms_norm_backward":
        shipped = norm_triton._backward_cut
        for rows, warps, stages in itertools.product((16, 32, 64), (8, 16), (1, 2, 3)):
            cut = norm_triton.BackwardCut(rows, norm_triton.LARGEST_CHUNK, warps, stages)
            norm_triton._backward_cut = lambda grad, with_grad_hidden, cut=cut: cut
            yield tuple(cut)
        norm_triton._backward_cut = shipped


def _sweep(bandwidth: float) -> None:
    for m, k in SHAPES:
        for name, _, size, call, make in _cases(m, k):
            sets, rows = [make() for _ in range(input_sets(2 * m * k))], []
            for cut in _cuts(name):
                us = time_calls([lambda s=s, call=call: call(*s) for s in sets], repeats=2).us
                rows.append({"kernel": name, "shape": f"{m}x{k}", "cut": cut, "us": us})
                rows[-1]["of_copy"] = size / (us * 1e-6) / bandwidth
            if rows:
                print_table(sorted(rows, key=lambda row: row["us"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the JSON (default benchmarks/results)")
    parser.add_argument("--sweep", action="store_true", help="time other cuts of two kernels")
    arguments = parser.parse_args()
    require_gpu()
    out = arguments.out
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e9:.0f} GB/s")
    if arguments.sweep:
        _sweep(bandwidth)
        return
    rows = []
    for m, k in SHAPES:
        for name, bar, size, call, make in _cases(m, k):
            sets = [make() for _ in range(input_sets(2 * m * k))]
            timing = time_calls([lambda s=s, call=call: call(*s) for s in sets], repeats=2)
            share = size / (timing.us * 1e-6) / bandwidth
            rows.append(
                {
                    "kernel": name,
                    "shape": f"{m}x{k}",
                    "us": timing.us,
                    "spread": timing.spread,
                    "of_copy": share,
                    "bar": bar,
                    "met": share >= bar,
                }
            )
    print_table(rows)
    print(write_results("quantize", rows, out, copy_bytes_per_second=bandwidth))


if __name__ == "__main__":
    main()
