"""Every kernel once on small ragged sizes, for compute-sanitizer:

compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python tests/gpu/sanitize.py
compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize.py
"""

import jetrl_kernels.ops  # noqa: F401
import torch
from jetrl_kernels import few_rows_gemm, gemm_grouped_triton, gemm_triton


def _grouped() -> None:
    """Two experts with tokens and one without; 72 and 136 columns, which fill no tile."""
    jetrl, sizes = torch.ops.jetrl, [128, 0, 256]
    groups = torch.tensor([0] * 128 + [2] * 256, device="cuda", dtype=torch.int32)
    x, dy = (torch.randn(384, width, device="cuda") for width in (72, 136))
    a, (b, b_scale) = (
        jetrl.quantize_tiles(x, "fp32"),
        jetrl.quantize_blocks(torch.randn(136, 72, device="cuda"), "fp32"),
    )
    b, b_scale = b[None, :136].repeat(3, 1, 1), b_scale[None].repeat(3, 1, 1)
    gemm_grouped_triton.gemm_nt_grouped_m(*a, b, b_scale, groups, torch.empty(384, 136, device="cuda"))
    xt, dyt = (jetrl.quantize_tiles_transposed(t, "fp32") for t in (x, dy))
    jetrl.gemm_nt_grouped_k(*dyt, *xt, sizes, torch.zeros(3, 136, 72, device="cuda"))


def main() -> None:
    jetrl, bf16 = torch.ops.jetrl, torch.bfloat16
    for m, k, n in ((3, 200, 72), (130, 256, 136)):
        x = torch.randn(m, k, device="cuda", dtype=bf16)
        norm = torch.randn(k, device="cuda", dtype=bf16)
        codes, scale = jetrl.quantize_tiles(x, "fp32")
        jetrl.quantize_tiles_transposed(x, "pow2")
        codes_t = jetrl.quantize_tiles_both(x.float(), "fp32")[2:]
        jetrl.requantize_tiles_transposed(codes, scale, k, "fp32")
        w_codes, w_scale, *transposed = jetrl.quantize_blocks_both(torch.randn(n, k, device="cuda"), "fp32")
        jetrl.transpose_blocks(*transposed)
        jetrl.rms_norm_quantize(x, x, norm, 1e-6, "fp32")
        _, hidden, rstd = jetrl.rms_norm(x, x, norm, 1e-6)
        jetrl.rms_norm_backward(x, x, hidden, norm, rstd)
        jetrl.silu_mul_quantize(x, x, "fp32")
        jetrl.silu_mul_quantize_backward(x, x, x, "fp32")
        jetrl.silu_mul_backward(x, x, x)
        jetrl.silu_mul_backward_quantize(x, x, x, "fp32")
        jetrl.requantize_blocks_transposed(codes, scale, k, "pow2")
        for transposed in (False, True):
            jetrl.quantize_blocks_stacked([x, x[:1]], "fp32", transposed)
        q, kv, gain = (torch.randn(*shape, device="cuda", dtype=bf16) for shape in ((m, 9, 64), (m, 3, 64), (64,)))
        cos, sin = torch.randn(2, m, 32, device="cuda", dtype=bf16)
        rstds = jetrl.qk_norm_rotary(q, kv, gain, gain, 1e-6, cos, sin, None)[2:]
        jetrl.qk_norm_rotary_backward(q, kv, kv, q, kv, gain, gain, *rstds, cos, sin)
        jetrl.qk_norm_rotary_backward(q, kv, kv, q, kv, None, None, None, None, cos, sin)
        gemm_triton.gemm_nt(codes, scale, w_codes[:n], w_scale, False, bf16)
        out = torch.zeros(k, k, device="cuda")
        gemm_triton.gemm_nt_accumulate(*codes_t, *codes_t, out)
        if m <= few_rows_gemm.MAX_ROWS:
            y = torch.empty(m, n, device="cuda", dtype=bf16)
            few_rows_gemm.gemm_nt(codes, scale, w_codes[:n], w_scale, y)
    _grouped()
    torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
