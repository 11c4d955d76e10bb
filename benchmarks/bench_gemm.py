"""FP8 GEMMs of Qwen3-8B at 8192 tokens against torch in BF16, all in one process: fprop, dgrad, wgrad, every backend.

    python benchmarks/bench_gemm.py [--out FOLDER]

Operands are quantized beforehand; `ratio` is BF16 time over ours. Bars, as geometric means: fprop and dgrad 1.7, wgrad 1.25,
wgrad with one operand in 128x128 blocks 1.6 (a format option; its cost in SQNR is printed beside it).
"""

import argparse
from pathlib import Path

import jetrl_kernels.ops  # noqa: F401
import torch
from harness import geometric_mean, input_sets, print_table, require_gpu, time_calls, write_results
from jetrl_kernels import backends, gemm, gemm_triton

TOKENS = 8192
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
BF16 = torch.bfloat16


def _weight_gemms(kind: str, m: int, n: int, k: int) -> list[dict]:
    """x (m, k) in tiles by a weight (n, k) in blocks: fprop, or dgrad with n and k exchanged."""
    sets = input_sets(m * k + n * k)
    plain = [
        (torch.randn(m, k, device="cuda", dtype=BF16), torch.randn(n, k, device="cuda", dtype=BF16))
        for _ in range(sets)
    ]
    ours = [(*torch.ops.jetrl.quantize_tiles(x, "fp32"), *torch.ops.jetrl.quantize_blocks(w, "fp32")) for x, w in plain]
    calls = {
        "op": lambda a, s, b, t: torch.ops.jetrl.gemm_nt(a, s, b, t, "bfloat16"),
        "cublaslt": lambda a, s, b, t: gemm._scaled_mm(a, s, b, t, False, BF16),
        "triton": lambda a, s, b, t: gemm_triton.gemm_nt(a, s, b, t, False, BF16),
    }
    return _rows(kind, m, n, k, [lambda x=x, w=w: torch.mm(x, w.t()) for x, w in plain], ours, calls)


def _wgrad_gemms(m: int, n: int, k: int) -> list[dict]:
    """dy^T (n, m) by x^T (k, m), contracted over m tokens."""
    sets = input_sets(m * k + m * n)
    plain = [
        (torch.randn(m, n, device="cuda", dtype=BF16), torch.randn(m, k, device="cuda", dtype=BF16))
        for _ in range(sets)
    ]
    quantize = torch.ops.jetrl.quantize_tiles_transposed
    ours = [(*quantize(dy, "fp32"), *quantize(x, "fp32")) for dy, x in plain]
    into = torch.zeros(n, k, device="cuda")
    calls = {
        "op bfloat16": lambda a, s, b, t: torch.ops.jetrl.gemm_nt(a, s, b, t, "bfloat16"),
        "op float32": lambda a, s, b, t: torch.ops.jetrl.gemm_nt(a, s, b, t, "float32"),
        "op accumulate": lambda a, s, b, t: torch.ops.jetrl.gemm_nt_accumulate(a, s, b, t, into),
        "triton": lambda a, s, b, t: gemm_triton.gemm_nt(a, s, b, t, True, torch.float32),
    }
    baseline = [lambda dy=dy, x=x: torch.mm(dy.t(), x) for dy, x in plain]
    rows = _rows("wgrad", m, n, k, baseline, ours, calls)
    blocks = [(*quantize(dy, "fp32"), *torch.ops.jetrl.quantize_blocks(x.t(), "fp32")) for dy, x in plain]
    calls = {"op bfloat16": lambda a, s, b, t: torch.ops.jetrl.gemm_nt(a, s, b, t, "bfloat16")}
    rows += _rows("wgrad blocks", m, n, k, baseline, blocks, calls)
    exact = plain[0][0].double().t() @ plain[0][1].double()
    for row, operands in ((rows[0], ours[0]), (rows[-1], blocks[0])):
        got = torch.ops.jetrl.gemm_nt(*operands, "float32").double()
        row["sqnr_db"] = float(20 * torch.log10(exact.norm() / (got - exact).norm()))
    return rows


def _rows(kind, m, n, k, baseline, operands, calls) -> list[dict]:
    flops = 2 * m * n * k
    reference = time_calls(baseline)
    rows = []
    for name, call in calls.items():
        timing = time_calls([lambda o=o, call=call: call(*o) for o in operands])
        rows.append(
            {
                "gemm": kind,
                "backend": name,
                "shape": f"{m}x{n}x{k}",
                "bf16_tflops": flops / reference.us / 1e6,
                "tflops": flops / timing.us / 1e6,
                "ratio": reference.us / timing.us,
                "spread": max(reference.spread, timing.spread),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the JSON (default benchmarks/results)")
    out = parser.parse_args().out
    require_gpu()
    print(backends.describe_backends())
    rows = []
    for n, k in SHAPES:
        rows += _weight_gemms("fprop", TOKENS, n, k)
        rows += _weight_gemms("dgrad", TOKENS, k, n)
        rows += _wgrad_gemms(TOKENS, n, k)
    print_table(rows)
    means = {}
    for kind, backend in dict.fromkeys((row["gemm"], row["backend"]) for row in rows):
        ratios = [row["ratio"] for row in rows if (row["gemm"], row["backend"]) == (kind, backend)]
        means[f"{kind}, {backend}"] = {"geometric_mean": geometric_mean(ratios), "minimum": min(ratios)}
        print(f"{kind}, {backend}: geometric mean {geometric_mean(ratios):.3f}, minimum {min(ratios):.3f}")
    print(write_results("gemm", rows, out, backends=backends.describe_backends(), means=means))


if __name__ == "__main__":
    main()
