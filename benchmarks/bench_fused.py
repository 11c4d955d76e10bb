"""The fused backward kernels at Qwen3-8B's shape, 16384 tokens: microseconds, and bytes moved against a copy's rate.

    python benchmarks/bench_fused.py [--sweep] [--out FOLDER]

Beside each fused kernel stands what it replaces: the separate kernels in one call. Bar: 0.65 of copy (they transpose).
--sweep tries other launch parameters.
"""

import argparse
from pathlib import Path

import torch
from harness import copy_bandwidth, print_table, require_gpu, time_calls, write_results
from jetrl_kernels import fused_triton

T, HIDDEN, FFN, HEADS, KV_HEADS, SIZE = 16384, 4096, 12288, 32, 8, 128
OPS = torch.ops.jetrl


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def activation():
    grad, merged = _bf16(T, FFN), _bf16(T, 2 * FFN)
    gate, up = merged[:, :FFN], merged[:, FFN:]

    def separate() -> None:
        OPS.quantize_tiles_both(OPS.silu_mul_backward(grad, gate, up), "fp32")

    yield "silu_mul_backward_quantize", 10 * T * FFN, lambda: OPS.silu_mul_backward_quantize(grad, gate, up, "fp32")
    yield "  silu_mul_backward, quantize_tiles_both", 10 * T * FFN, separate


def heads():
    width = (HEADS + 2 * KV_HEADS) * SIZE
    merged, dq = _bf16(T, width), _bf16(T, HEADS, SIZE)
    dk, dv = _bf16(T, KV_HEADS, SIZE), _bf16(T, KV_HEADS, SIZE)
    q = merged[:, : HEADS * SIZE].unflatten(1, (HEADS, SIZE))
    k = merged[:, HEADS * SIZE : (HEADS + KV_HEADS) * SIZE].unflatten(1, (KV_HEADS, SIZE))
    qw, kw, cos, sin = _bf16(SIZE), _bf16(SIZE), _bf16(T, SIZE // 2), _bf16(T, SIZE // 2)
    rstds = OPS.qk_norm_rotary(q, k, qw, kw, 1e-6, cos, sin, None)[2:]
    moved = 2 * T * (3 * HEADS + 5 * KV_HEADS) * SIZE
    yield (
        "qk_norm_rotary",
        4 * T * (HEADS + KV_HEADS) * SIZE,
        lambda: OPS.qk_norm_rotary(q, k, qw, kw, 1e-6, cos, sin, None),
    )
    yield (
        "qk_norm_rotary_backward",
        moved,
        lambda: OPS.qk_norm_rotary_backward(dq, dk, dv, q, k, qw, kw, *rstds, cos, sin),
    )


def requantize():
    codes, scale = OPS.quantize_tiles(_bf16(T, FFN), "fp32")
    moved = 2 * T * FFN
    yield "requantize_blocks_transposed", moved, lambda: OPS.requantize_blocks_transposed(codes, scale, FFN, "fp32")
    yield "  requantize_tiles_transposed", moved, lambda: OPS.requantize_tiles_transposed(codes, scale, FFN, "fp32")


def weights():
    parts = [_bf16(FFN, HIDDEN), _bf16(FFN, HIDDEN)]
    moved = 3 * 2 * FFN * HIDDEN
    for transposed in (False, True):
        name = "quantize_blocks_stacked" + (" transposed" if transposed else "")
        yield name, moved, lambda t=transposed: OPS.quantize_blocks_stacked(parts, "fp32", t)


GROUPS = {"activation": activation, "heads": heads, "requantize": requantize, "weights": weights}
SWEEPS = {
    "activation": [{"QUANTIZE_WARPS": w} for w in (4, 8, 16)],
    "heads": [
        {"TOKENS": t, "HEADS": h, "HEAD_WARPS": w}
        for t in (8, 16, 32)
        for h in (4, 8)
        for w in (2, 4, 8)
        if t * 2 >= w * 4
    ],
    "requantize": [{"REQUANTIZE_WARPS": w} for w in (2, 4, 8)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the JSON (default benchmarks/results)")
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    require_gpu()
    copy, rows = copy_bandwidth(), []
    for group, cases in GROUPS.items():
        for setting in SWEEPS.get(group, [{}]) if arguments.sweep else [{}]:
            for name, value in setting.items():
                setattr(fused_triton, name, value)
            for name, moved, call in list(cases())[: 1 if setting and group != "heads" else None]:
                if setting and name == "qk_norm_rotary":
                    continue
                timing = time_calls([call], repeats=2)
                fraction = moved / (timing.us * 1e-6) / copy
                rows.append({"what": name, "us": timing.us, "spread": timing.spread, "of copy": fraction, **setting})
                print(rows[-1], flush=True)
    print_table(rows)
    if not arguments.sweep:
        print(write_results("fused", rows, arguments.out, tokens=T, copy_bandwidth=copy))


if __name__ == "__main__":
    main()
