"""GEMMs and the whole layer against FP64.

SQNR of one E4M3 quantization: a value with significand t in [1, 2) has step 2**-3, error variance 2**-6 / 12, so noise over
signal is 2**-6 / 12 * E[1 / t^2]; significands of smooth data are spread like 1 / t, which gives 0.541: 31.5 dB. A product of
independently quantized operands adds their noises: 28.5 dB for fprop and dgrad. wgrad re-quantizes x, three quantizations
in all: 26.7 dB. Rounding the output to bfloat16 (62 dB) and the tensor core's own errors do not show. Bounds leave 0.5 dB.
"""

import jetrl_kernels.ops  # noqa: F401
import pytest
import torch
from jetrl_kernels import quantize_reference as reference

from jetrl.linear import fp8_linear
from jetrl.precision.formats import LinearFormat

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
TWO_QUANTIZATIONS, THREE_QUANTIZATIONS = 28.0, 26.2


def _sqnr(got: torch.Tensor, expected: torch.Tensor) -> float:
    noise = (got.double() - expected).norm()
    return float(20 * torch.log10(expected.norm() / noise))


@pytest.mark.parametrize("tiled", (False, True))
@pytest.mark.parametrize("m,n,k", ((16, 512, 4096), (300, 512, 4096), (512, 256, 12288)))
def test_gemm_is_the_product_of_its_dequantized_operands(m, n, k, tiled):
    """A Hopper FP8 wgmma aligns 32 products and the running sum to the largest of them and drops what lies below 2**-13 of
    it. The 4 steps of a 128-long block so lose at most 4 * 33 * 2**-13 of the largest magnitude in sight, which the block's
    sum of |a b| bounds; scaling and the float32 sum over blocks are far finer.
    """
    x, w = torch.randn(m, k, device="cuda", dtype=BF16), torch.randn(n, k, device="cuda", dtype=BF16)
    a = torch.ops.jetrl.quantize_tiles(x, "fp32")
    b = (torch.ops.jetrl.quantize_tiles if tiled else torch.ops.jetrl.quantize_blocks)(w, "fp32")
    got = torch.ops.jetrl.gemm_nt(*a, *b, "float32").double()
    left = reference.dequantize_tiles(*a).double()
    right = (reference.dequantize_tiles if tiled else reference.dequantize_blocks)(*b).double()
    error = (got - left @ right.t()).abs()
    bound = 4 * 33 * 2.0**-13 * (left.abs() @ right.abs().t())
    assert (error <= bound).all()
    # The errors of products are independent, so they add like a random walk: far below the worst case.
    assert error.norm() / got.norm() < 2.0**-9


@pytest.mark.parametrize("scale_format", ("fp32", "pow2"))
@pytest.mark.parametrize("tokens,n,k", ((1000, 4096, 4096), (4096, 1536, 576)))
def test_layer_forward_and_gradients_against_float64(tokens, n, k, scale_format):
    x = torch.randn(tokens, k, device="cuda", dtype=BF16).requires_grad_()
    w = (torch.randn(n, k, device="cuda") / k**0.5).to(BF16).requires_grad_()
    dy = torch.randn(tokens, n, device="cuda", dtype=BF16) * 1e-6
    y = fp8_linear(x, w, None, LinearFormat.fp8_blockwise(scale_format))
    y.backward(dy)
    x64, w64, dy64 = x.detach().double(), w.detach().double(), dy.double()
    assert _sqnr(y.detach(), x64 @ w64.t()) > TWO_QUANTIZATIONS
    assert _sqnr(x.grad, dy64 @ w64) > TWO_QUANTIZATIONS
    assert _sqnr(w.grad, dy64.t() @ x64) > THREE_QUANTIZATIONS


def test_wgrad_accumulates_into_a_float32_buffer():
    dy = torch.ops.jetrl.quantize_tiles_transposed(torch.randn(1024, 512, device="cuda", dtype=BF16), "fp32")
    x = torch.ops.jetrl.quantize_tiles_transposed(torch.randn(1024, 384, device="cuda", dtype=BF16), "fp32")
    out = torch.randn(512, 384, device="cuda")
    before = out.clone()
    torch.ops.jetrl.gemm_nt_accumulate(*dy, *x, out)
    alone = torch.ops.jetrl.gemm_nt(*dy, *x, "float32")
    # Both are float32 sums of the same 8 blocks, in one order or another, on values of order 100.
    torch.testing.assert_close(out - before, alone, rtol=1e-3, atol=1e-1)
