"""Every backend gives DeepGEMM's bits, and a row has the same bits for any number of rows."""

import jetrl_kernels.ops  # noqa: F401
import pytest
import torch
from gpu.shapes import ALL_SHAPES
from jetrl_kernels import backends, few_rows_gemm, gemm, gemm_triton
from jetrl_kernels.ops import new_column_major_scale

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
MANY_ROWS = 8192


def _first_rows(codes: torch.Tensor, scale: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    return codes[:m], new_column_major_scale(m, scale.shape[1], scale.device).copy_(scale[:m])


def _operands(n: int, k: int, m: int = MANY_ROWS):
    """Columns of very different sizes, so that scales differ and a wrong order of adding shows."""
    spread = torch.exp(2 * torch.randn(1, k, device="cuda"))
    x = (torch.randn(m, k, device="cuda") * spread).to(BF16)
    w = torch.randn(n, k, device="cuda") * torch.exp(torch.randn(n, 1, device="cuda"))
    w_codes, w_scale = torch.ops.jetrl.quantize_blocks(w, "fp32")
    return torch.ops.jetrl.quantize_tiles(x, "fp32"), (w_codes[:n], w_scale)


def _deep_gemm(a, a_scale, b, b_scale) -> torch.Tensor:
    out = torch.full((a.shape[0], b.shape[0]), float("nan"), device="cuda", dtype=BF16)
    backends.deep_gemm().fp8_gemm_nt((a, a_scale), (b, b_scale), out, disable_ue8m0_cast=True)
    return out


@pytest.mark.parametrize("n,k", ALL_SHAPES)
def test_backends_and_row_counts_share_bits(n, k):
    a, b = _operands(n, k)
    expected = _deep_gemm(*a, *b)
    assert expected.isfinite().all()
    assert torch.equal(gemm_triton.gemm_nt(*a, *b, False, BF16), expected), "Triton, 8192 rows"
    assert torch.equal(gemm._scaled_mm(*a, *b, False, BF16), expected), "cuBLASLt, 8192 rows"
    assert torch.equal(torch.ops.jetrl.gemm_nt(*a, *b, "float32").to(BF16), expected), "float32 output, 8192 rows"
    for m in (128, 300, 2048):
        rows = _first_rows(*a, m)
        assert torch.equal(_deep_gemm(*rows, *b), expected[:m]), f"DeepGEMM, {m} rows"
        assert torch.equal(gemm._scaled_mm(*rows, *b, False, BF16), expected[:m]), f"cuBLASLt, {m} rows"
        assert torch.equal(gemm_triton.gemm_nt(*rows, *b, False, BF16), expected[:m]), f"Triton, {m} rows"
    for m in range(1, 65):
        rows = _first_rows(*a, m)
        out = torch.full((m, n), float("nan"), device="cuda", dtype=BF16)
        few_rows_gemm.gemm_nt(*rows, *b, out)
        assert torch.equal(out, expected[:m]), f"few_rows_gemm, {m} rows"
        assert torch.equal(gemm_triton.gemm_nt(*rows, *b, False, BF16), expected[:m]), f"Triton, {m} rows"
    for m in (1, 7, 33, 64):
        assert torch.equal(_deep_gemm(*_first_rows(*a, m), *b), expected[:m]), f"DeepGEMM, {m} rows"


@pytest.mark.parametrize("weight_rows,depth", ((16, 8), (32, 2), (32, 4), (32, 8), (64, 2), (64, 4)))
def test_every_cut_of_the_few_row_kernel_shares_bits(weight_rows, depth):
    for m, n, k in ((3, 6144, 4096), (16, 1000, 640), (33, 576, 1536), (64, 4096, 128)):
        a, b = _operands(n, k, m)
        out = torch.full((m, n), float("nan"), device="cuda", dtype=BF16)
        few_rows_gemm.gemm_nt(*a, *b, out, few_rows_gemm.plan(m, n, k, weight_rows, depth, 200 << 10))
        assert torch.equal(out, gemm_triton.gemm_nt(*a, *b, False, BF16)), (m, n, k)


@pytest.mark.parametrize("m,n,k", ((65, 576, 1536), (127, 192, 576), (130, 1000, 384), (257, 100, 256), (1, 49, 128)))
def test_odd_shapes_through_the_op_share_bits(m, n, k):
    k = -(-k // 128) * 128
    a, b = _operands(n, k, m)
    expected = gemm_triton.gemm_nt(*a, *b, False, BF16)
    assert torch.equal(torch.ops.jetrl.gemm_nt(*a, *b, "bfloat16"), expected)
    assert torch.equal(torch.ops.jetrl.gemm_nt(*a, *b, "float32").to(BF16), expected)


@pytest.mark.parametrize("k", (128, 640, 2048, 16384, 65536))
def test_k_as_a_constant_or_not_shares_bits(k):
    a, b = _operands(1024, k, 512)
    kernels = [torch.ops.jetrl.gemm_nt(*a, *b, "bfloat16", k_varies) for k_varies in (False, True)]
    assert torch.equal(*kernels)


def test_empty_operands():
    a, b = _operands(256, 128, 1)
    none = a[0][:0], new_column_major_scale(0, 1, torch.device("cuda"))
    assert torch.ops.jetrl.gemm_nt(*none, *b, "bfloat16").shape == (0, 256)
    no_tokens = torch.ops.jetrl.quantize_tiles_transposed(torch.empty(0, 64, device="cuda"), "fp32")
    assert torch.equal(torch.ops.jetrl.gemm_nt(*no_tokens, *no_tokens, "float32"), torch.zeros(64, 64, device="cuda"))
