"""GEMMs of at most 64 rows (decoding) in CUDA graphs, weights past L2, against DeepGEMM and the time to read the weight.

    python benchmarks/bench_decode.py [--sweep] [--out FOLDER]

`of_floor` is the time to read the weight at the measured copy bandwidth over the time taken; bars 0.70 and, over DeepGEMM,
1.2, as geometric means. `alone` is our kernel without the overlap of its start with the kernel in front. --sweep times
every cut of the work instead.
"""

import argparse
from pathlib import Path

import jetrl_kernels.ops  # noqa: F401
import torch
from harness import copy_bandwidth, geometric_mean, input_sets, print_table, require_gpu, time_calls, write_results
from jetrl_kernels import backends, few_rows_gemm

SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
ROWS = (1, 8, 16, 32, 64)
CUTS = tuple((rows, depth, kib) for rows in (16, 32, 64) for depth in (2, 4, 8) for kib in (75, 110, 210))


def _weights(n: int, k: int) -> list:
    return [
        torch.ops.jetrl.quantize_blocks(torch.randn(n, k, device="cuda", dtype=torch.bfloat16), "fp32")
        for _ in range(input_sets(n * k))
    ]


def _calls(n: int, k: int, m: int, weights: list):
    a = torch.ops.jetrl.quantize_tiles(torch.randn(m, k, device="cuda", dtype=torch.bfloat16), "fp32")
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    repeats = max(1, 24 // len(weights))

    def ours(shape=None, overlap=True):
        calls = [lambda w=w: few_rows_gemm.gemm_nt(*a, *w, out, shape, overlap) for w in weights]
        return time_calls(calls, repeats)

    def deep_gemm():
        calls = [lambda w=w: backends.deep_gemm().fp8_gemm_nt(a, w, out, disable_ue8m0_cast=True) for w in weights]
        return time_calls(calls, repeats)

    def op():
        return time_calls([lambda w=w: torch.ops.jetrl.gemm_nt(*a, *w, "bfloat16") for w in weights], repeats)

    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    plain = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(input_sets(2 * n * k))]
    return ours, deep_gemm, op, lambda: time_calls([lambda w=w: torch.mm(x, w.t()) for w in plain], repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the JSON (default benchmarks/results)")
    parser.add_argument("--sweep", action="store_true", help="time every cut of the work")
    arguments = parser.parse_args()
    require_gpu()
    bandwidth = copy_bandwidth()
    rows = []
    for n, k in SHAPES:
        floor, weights = n * k / bandwidth * 1e6, _weights(n, k)
        for m in ROWS:
            ours, deep_gemm, op, bf16 = _calls(n, k, m, weights)
            if arguments.sweep:
                cuts = {}
                for weight_rows, depth, kib in CUTS:
                    shape = few_rows_gemm.plan(m, n, k, weight_rows, depth, kib << 10)
                    if few_rows_gemm.shared_bytes(few_rows_gemm.row_class(m), shape) <= 227 << 10:
                        cuts[f"{weight_rows}/{depth}/{kib}"] = ours(shape).us
                best = sorted(cuts.items(), key=lambda item: item[1])[:5]
                dg = deep_gemm().us
                print(
                    n,
                    k,
                    m,
                    f"floor {floor:.1f} deepgemm {dg:.1f}",
                    *(f"{name}={us:.1f}" for name, us in best),
                    flush=True,
                )
                continue
            mine, theirs, alone, plain = op(), deep_gemm(), ours(overlap=False), bf16()
            rows.append(
                {
                    "shape": f"{n}x{k}",
                    "rows": m,
                    "us": mine.us,
                    "alone_us": alone.us,
                    "deepgemm_us": theirs.us,
                    "bf16_us": plain.us,
                    "floor_us": floor,
                    "of_floor": floor / mine.us,
                    "over_deepgemm": theirs.us / mine.us,
                    "spread": max(mine.spread, theirs.spread),
                }
            )
    if arguments.sweep:
        return
    print_table(rows)
    means = {name: geometric_mean([row[name] for row in rows]) for name in ("of_floor", "over_deepgemm")}
    print(means)
    print(write_results("decode", rows, arguments.out, copy_bytes_per_second=bandwidth, means=means))


if __name__ == "__main__":
    main()
