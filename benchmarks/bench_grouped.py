"""Grouped GEMMs of a mixture-of-experts layer against torch's grouped BF16 product, all in one process.

    python benchmarks/bench_grouped.py [--out FOLDER]

Shapes of Qwen3-30B-A3B: 128 experts, 8192 tokens to 8 experts each, so 512 rows an expert on average; shares are uneven
(multiples of 128, seeded). Operands are quantized beforehand; `ratio` is BF16 time over ours. No bar is set.
"""

import argparse
from pathlib import Path

import jetrl_kernels.ops  # noqa: F401
import torch
from harness import input_sets, print_table, require_gpu, time_calls, write_results
from jetrl_kernels import gemm_grouped_triton

EXPERTS, ROWS = 128, 65536
SHAPES = ((1536, 2048), (2048, 768))
BF16 = torch.bfloat16


def shares(generator: torch.Generator) -> list[int]:
    """Rows of each expert, multiples of 128 that add up to ROWS; some experts may get none."""
    owner = torch.randint(0, EXPERTS, (ROWS // 128,), generator=generator)
    return (128 * torch.bincount(owner, minlength=EXPERTS)).tolist()


def _rows(name: str, shape: str, flops: int, baseline, calls: dict) -> list[dict]:
    reference = time_calls(baseline)
    rows = [{"gemm": name, "backend": "bf16 torch._grouped_mm", "shape": shape, "us": reference.us, "ratio": 1.0}]
    for backend, call in calls.items():
        timing = time_calls(call)
        ratio = reference.us / timing.us
        rows.append({"gemm": name, "backend": backend, "shape": shape, "us": timing.us, "ratio": ratio})
        rows[-1] |= {"tflops": flops / timing.us / 1e6, "spread": max(reference.spread, timing.spread)}
    rows[0] |= {"tflops": flops / reference.us / 1e6, "spread": reference.spread}
    return rows


def measure(n: int, k: int, sizes: list[int]) -> list[dict]:
    jetrl, flops = torch.ops.jetrl, 2 * ROWS * n * k
    ends = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    groups = torch.repeat_interleave(torch.arange(EXPERTS, dtype=torch.int32), torch.tensor(sizes)).cuda()
    w = torch.randn(EXPERTS, n, k, device="cuda", dtype=BF16)
    blocks = [jetrl.quantize_blocks(expert, "fp32") for expert in w]
    b = torch.stack([codes for codes, _ in blocks]), torch.stack([scale for _, scale in blocks])
    sets = input_sets(ROWS * k)
    x = [torch.randn(ROWS, k, device="cuda", dtype=BF16) for _ in range(sets)]
    a = [jetrl.quantize_tiles(one, "fp32") for one in x]
    out = torch.empty(ROWS, n, device="cuda", dtype=BF16)
    calls = {
        "op": [lambda q=q: jetrl.gemm_nt_grouped_m(*q, *b, groups, "bfloat16") for q in a],
        "triton": [lambda q=q: gemm_grouped_triton.gemm_nt_grouped_m(*q, *b, groups, out) for q in a],
    }
    rows = _rows("fprop", f"{n}x{k}", flops, [lambda one=one: torch._grouped_mm(one, w.mT, ends) for one in x], calls)
    dy = torch.randn(ROWS, n, device="cuda", dtype=BF16)
    dyt, xt = jetrl.quantize_tiles_transposed(dy, "fp32"), [jetrl.quantize_tiles_transposed(one, "fp32") for one in x]
    into = torch.zeros(EXPERTS, n, k, device="cuda")
    calls = {"op": [lambda q=q: jetrl.gemm_nt_grouped_k(*dyt, *q, sizes, into) for q in xt]}
    baseline = [lambda one=one: torch._grouped_mm(dy.t(), one, ends) for one in x]
    return rows + _rows("wgrad", f"{n}x{k}", flops, baseline, calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the JSON (default benchmarks/results)")
    out = parser.parse_args().out
    require_gpu()
    sizes = shares(torch.Generator().manual_seed(0))
    rows = [row for n, k in SHAPES for row in measure(n, k, sizes)]
    print_table(rows)
    print(
        write_results("grouped", rows, out, experts=EXPERTS, rows_in_all=ROWS, largest=max(sizes), smallest=min(sizes))
    )


if __name__ == "__main__":
    main()
