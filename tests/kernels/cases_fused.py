"""Norm and SiLU kernels: fused bytes equal quantizing the unfused output; values against float64."""

import pytest
import torch
from cases_quantize import DEVICE, assert_same
from jetrl_kernels import norm_reference
from jetrl_kernels import quantize_reference as reference

norm_triton = pytest.importorskip("jetrl_kernels.norm_triton", reason="Triton is not installed")
silu_triton = pytest.importorskip("jetrl_kernels.silu_triton", reason="Triton is not installed")

BF16 = torch.bfloat16
# One rounding to bfloat16 (8-bit significand) moves a value by at most 2**-8 of it.
BF16_ROUNDING = 2.0**-8


def _randn(generator, *shape, dtype=BF16):
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("scale_format", ("fp32", "pow2"))
@pytest.mark.parametrize("with_residual", (False, True))
@pytest.mark.parametrize("m,k", ((3, 576), (5, 200), (2, 128), (0, 64)))
def test_fused_norm_gives_the_bytes_of_norm_then_quantize(m, k, with_residual, scale_format, generator):
    x, w = _randn(generator, m, k), _randn(generator, k)
    residual = _randn(generator, m, k) if with_residual else None
    on = [None if t is None else t.to(DEVICE) for t in (x, residual, w)]
    y, hidden, rstd = norm_triton.rms_norm(*on, 1e-6)
    fused = norm_triton.rms_norm_quantize(*on, 1e-6, scale_format)
    assert_same(fused[:2], reference.quantize_tiles(y.cpu(), scale_format))
    assert torch.equal(fused[2], hidden) and torch.equal(fused[3], rstd)
    expected, expected_hidden, expected_rstd = norm_reference.rms_norm(x, residual, w, 1e-6)
    if with_residual:
        assert torch.equal(hidden.cpu(), expected_hidden)
    # rstd differs in the order of a float32 sum; that can move the first rounding to bfloat16 by one unit (2**-7, two
    # roundings' worth), and the product with the weight is rounded once more on each side.
    torch.testing.assert_close(rstd.cpu(), expected_rstd, rtol=1e-5, atol=0)
    torch.testing.assert_close(y.cpu().float(), expected.float(), rtol=4 * BF16_ROUNDING, atol=0)


@pytest.mark.parametrize("rows", (2, 4))
@pytest.mark.parametrize("with_residual", (False, True))
@pytest.mark.parametrize("m,k", ((7, 576), (5, 4224)))
def test_the_norm_in_programs_that_walk_rows_gives_the_same_bits(m, k, with_residual, rows, generator, monkeypatch):
    """4224 columns lie in two chunks, 576 in one, where the next row is loaded ahead."""
    x, w = _randn(generator, m, k).to(DEVICE), _randn(generator, k).to(DEVICE)
    residual = _randn(generator, m, k).to(DEVICE) if with_residual else None

    def outputs():
        fused = norm_triton.rms_norm_quantize(x, residual, w, 1e-6, "fp32")
        return *fused, *norm_triton.rms_norm(x, residual, w, 1e-6)

    one_row = outputs()
    monkeypatch.setattr(norm_triton, "FORWARD_ROWS", rows)
    assert_same(outputs(), tuple(t.cpu() for t in one_row))


def test_a_row_of_the_norm_has_the_same_bits_for_any_number_of_rows(generator):
    x, w = _randn(generator, 9, 576).to(DEVICE), _randn(generator, 576).to(DEVICE)
    whole, _, _ = norm_triton.rms_norm(x, None, w, 1e-6)
    for rows in (1, 2, 5):
        part, _, _ = norm_triton.rms_norm(x[:rows], None, w, 1e-6)
        assert torch.equal(part, whole[:rows])


@pytest.mark.parametrize("m,k", ((19, 576), (3, 200), (0, 64), (9, 4200), (2, 12288), (1, 16400)))
def test_norm_backward_matches_float64_autograd(m, k, generator):
    x, w, grad, grad_hidden = (_randn(generator, *s) for s in ((m, k), (k,), (m, k), (m, k)))
    x64, w64 = x.double().requires_grad_(), w.double().requires_grad_()
    n = x64 * torch.rsqrt(x64.pow(2).mean(-1, keepdim=True) + 1e-6)
    ((n * w64 * grad.double()).sum() + (x64 * grad_hidden.double()).sum()).backward()
    _, _, rstd = norm_reference.rms_norm(x, None, w, 1e-6)
    dh, dw = norm_triton.rms_norm_backward(*(t.to(DEVICE) for t in (grad, grad_hidden, x, w, rstd)))
    # dh: float32 arithmetic on values of order 10, then one rounding to bfloat16.
    torch.testing.assert_close(dh.cpu().double(), x64.grad, rtol=BF16_ROUNDING, atol=1e-4)
    # dw sums m products of grad with a bfloat16-rounded n: each off by BF16_ROUNDING * |grad * n|.
    bound = (grad.double() * n.detach()).abs().sum(0) * BF16_ROUNDING + 1e-5
    assert ((dw.cpu().double() - w64.grad).abs() <= bound).all()


@pytest.mark.parametrize("m,k", ((5, 384), (17, 200), (0, 64)))
def test_silu_mul_and_its_quantization(m, k, generator):
    both = _randn(generator, m, 2 * k).to(DEVICE)
    gate, up = both[:, :k], both[:, k:]
    y = silu_triton.silu_mul(gate, up)
    for scale_format in ("fp32", "pow2"):
        assert_same(
            silu_triton.silu_mul_quantize(gate, up, scale_format), reference.quantize_tiles(y.cpu(), scale_format)
        )
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    # Two roundings to bfloat16; exp and the reciprocal are good to a few units of float32.
    torch.testing.assert_close(y.double(), expected, rtol=2.1 * BF16_ROUNDING, atol=1e-7)


@pytest.mark.parametrize("m,k", ((5, 384), (17, 200), (0, 64)))
def test_silu_backward_matches_float64_and_its_codes_are_those_of_its_output(m, k, generator):
    grad, gate, up = (_randn(generator, m, k) for _ in range(3))
    gate64, up64 = gate.double().requires_grad_(), up.double().requires_grad_()
    (torch.nn.functional.silu(gate64) * up64 * grad.double()).sum().backward()
    dgate, dup, *codes = silu_triton.silu_mul_quantize_backward(*(t.to(DEVICE) for t in (grad, gate, up)), "fp32")
    # dgate has a factor 1 + g (1 - s) that cancels near its zero (g = -1.28): absolute float32 error there.
    torch.testing.assert_close(dgate.cpu().double(), gate64.grad, rtol=BF16_ROUNDING * 1.01, atol=1e-5)
    torch.testing.assert_close(dup.cpu().double(), up64.grad, rtol=2.1 * BF16_ROUNDING, atol=1e-7)
    assert_same(codes[:2], reference.quantize_tiles(dgate.cpu(), "fp32"))
    assert_same(codes[2:], reference.quantize_tiles(dup.cpu(), "fp32"))
