"""Fused backward kernels: bytes equal quantizing what the unfused kernel gives; values against the torch references."""

import pytest
import torch
from cases_quantize import DEVICE, assert_same
from jetrl_kernels import fused_reference, rotary_reference
from jetrl_kernels import quantize_reference as reference
from jetrl_kernels.constants import pad_to_tile

fused_triton = pytest.importorskip("jetrl_kernels.fused_triton", reason="Triton is not installed")

BF16 = torch.bfloat16
# The backward of a norm is float32 arithmetic on values of order 10 and one rounding: to bfloat16 (2**-8 of the value, and a
# neighbour where the float32 sums differ in order, another 2**-8) or none.
RTOL = {BF16: 2.0**-7, torch.float32: 1e-5}


def _randn(generator, *shape, dtype=BF16):
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", (BF16, torch.float32))
@pytest.mark.parametrize("norms", (True, False))
@pytest.mark.parametrize("tokens,heads,kv_heads,size", ((37, 4, 2, 32), (33, 9, 3, 64)))
def test_rotary_and_head_norm_backward_into_the_merged_gradient(tokens, heads, kv_heads, size, norms, dtype, generator):
    merged = _randn(generator, tokens, heads * size + 2 * kv_heads * size, dtype=dtype)
    q = merged[:, : heads * size].unflatten(1, (heads, size))
    k = merged[:, heads * size : (heads + kv_heads) * size].unflatten(1, (kv_heads, size))
    weights = [_randn(generator, size, dtype=dtype) for _ in range(2)]
    angle = torch.randn(tokens, size // 2, generator=generator)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    rstds = rotary_reference.qk_norm_rotary(q, k, *weights, 1e-6, cos, sin, None)[2:]
    # As attention's backward hands it over: heads before tokens.
    dq = _randn(generator, heads, tokens, size, dtype=dtype).transpose(0, 1)
    dk, dv = (_randn(generator, tokens, kv_heads, size, dtype=dtype) for _ in range(2))
    fixed = (*weights, *rstds) if norms else (None,) * 4
    want = fused_reference.qk_norm_rotary_backward(dq, dk, dv, q, k, *fixed, cos, sin)
    on = [None if t is None else t.to(DEVICE) for t in (dq, dk, dv, q, k, *fixed, cos, sin)]
    got = fused_triton.qk_norm_rotary_backward(*on)
    starts = [0, pad_to_tile(heads * size), pad_to_tile(heads * size) + pad_to_tile(kv_heads * size)]
    assert got[0].shape == (tokens, starts[2] + pad_to_tile(kv_heads * size))
    assert not got[0][:, heads * size : starts[1]].any()
    if norms:
        torch.testing.assert_close(got[0].cpu(), want[0], rtol=RTOL[dtype], atol=1e-4)
        for g, w in zip(got[1:], want[1:], strict=True):
            torch.testing.assert_close(g.cpu(), w, rtol=1e-4, atol=1e-3)
    else:
        assert torch.equal(got[0].cpu(), want[0]) and not got[1].numel()


@pytest.mark.parametrize("dtype", (BF16, torch.float32))
@pytest.mark.parametrize("scale_format", ("fp32", "pow2"))
@pytest.mark.parametrize("m,k", ((37, 200), (130, 64)))
def test_fused_activation_gradient_gives_the_bytes_of_both_quantizers(m, k, scale_format, dtype, generator):
    grad, gate, up = (_randn(generator, m, k, dtype=dtype) for _ in range(3))
    on = [t.to(DEVICE) for t in (grad, gate, up)]
    merged = fused_triton.silu_mul_backward(*on)
    want = fused_reference.silu_mul_backward(grad, gate, up)
    # exp differs by a unit in the last place between devices: one rounding more.
    torch.testing.assert_close(merged.cpu(), want, rtol=RTOL[dtype], atol=1e-5)
    got = fused_triton.silu_mul_backward_quantize(*on, scale_format)
    assert_same(got[:2], reference.quantize_tiles(merged.cpu(), scale_format))
    assert_same(got[2:], reference.quantize_tiles_transposed(merged.cpu(), scale_format))


@pytest.mark.parametrize("scale_format", ("fp32", "pow2"))
@pytest.mark.parametrize("m,k", ((37, 200), (130, 64)))
def test_tiles_requantized_into_transposed_blocks(m, k, scale_format, generator):
    codes, scale = reference.quantize_tiles(_randn(generator, m, k), scale_format)
    want = fused_reference.requantize_blocks_transposed(codes, scale, k, scale_format)
    got = fused_triton.requantize_blocks_transposed(codes.to(DEVICE), scale.to(DEVICE), k, scale_format)
    assert_same(got, want)


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("dtype", (BF16, torch.float32))
def test_stacked_weights_have_each_ones_codes(dtype, transposed, generator):
    weights = [_randn(generator, n, 200, dtype=dtype) for n in (130, 64, 256)]
    parts = [reference.quantize_blocks(w, "fp32") for w in weights]
    want = [torch.cat([p[i].view(torch.uint8) if i == 0 else p[i] for p in parts]) for i in range(2)]
    codes, scale = fused_triton.quantize_blocks_stacked([w.to(DEVICE) for w in weights], "fp32", transposed)
    got = (codes.t(), scale.t()) if transposed else (codes, scale)
    assert torch.equal(got[0].cpu().contiguous().view(torch.uint8), want[0]) and torch.equal(got[1].cpu(), want[1])
