"""Grouped GEMMs on the GPU: every group has the bits of the plain op on that group, DeepGEMM's and Triton's alike."""

import jetrl_kernels.ops  # noqa: F401
import pytest
import torch
from jetrl_kernels import gemm_grouped_triton, gemm_triton

pytestmark = pytest.mark.gpu
JETRL = torch.ops.jetrl
# Tokens of each expert, padded: one without any, one of a single tile.
SIZES = (128, 0, 1024, 384, 2048)


@pytest.mark.parametrize("n,k", ((1536, 2048), (2048, 768), (100, 384)))
def test_grouped_m_has_the_bits_of_each_group(n, k):
    m = sum(SIZES)
    groups = torch.repeat_interleave(torch.arange(len(SIZES), dtype=torch.int32), torch.tensor(SIZES)).cuda()
    a = JETRL.quantize_tiles((torch.randn(m, k) * torch.exp(torch.randn(1, k))).bfloat16().cuda(), "fp32")
    b = [JETRL.quantize_blocks(torch.randn(n, k, device="cuda"), "fp32") for _ in SIZES]
    b = torch.stack([codes[:n] for codes, _ in b]), torch.stack([scale for _, scale in b])
    got = JETRL.gemm_nt_grouped_m(*a, *b, groups, "bfloat16")
    triton = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    gemm_grouped_triton.gemm_nt_grouped_m(a[0], a[1], *b, groups, triton)
    assert torch.equal(got, triton)
    start = 0
    for group, size in enumerate(SIZES):
        if size:
            rows = slice(start, start + size)
            expected = JETRL.gemm_nt(a[0][rows], a[1][rows], b[0][group], b[1][group], "bfloat16")
            assert torch.equal(got[rows], expected), group
        start += size


@pytest.mark.parametrize("m,n", ((1536, 2048), (2048, 768), (70, 100)))
def test_grouped_k_has_the_bits_of_each_group(m, n):
    tokens = sum(SIZES)
    a, b = (JETRL.quantize_tiles_transposed(torch.randn(tokens, w, device="cuda"), "fp32") for w in (m, n))
    out = torch.randn(len(SIZES), m, n, device="cuda")
    expected, triton = out.clone(), out.clone()
    JETRL.gemm_nt_grouped_k(*a, *b, list(SIZES), out)
    start = 0
    for group, size in enumerate(SIZES):
        if size:
            columns, tiles = slice(start, start + size), slice(start // 128, (start + size) // 128)
            operands = [t for c, s in (a, b) for t in (c[:, columns].contiguous(), s[:, tiles])]
            JETRL.gemm_nt_accumulate(*operands, expected[group])
            views = (a[0][:, columns], a[1][:, tiles], b[0][:, columns], b[1][:, tiles])
            gemm_triton.gemm_nt_accumulate(*views, triton[group])
        start += size
    assert torch.equal(out, expected) and torch.equal(out, triton)
