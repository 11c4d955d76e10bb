"""The shared FP8 linear layer against float64, and the properties both engines rely on.

Where a bound is stated in dB: one E4M3 operand of Gaussian data in 1x128 tiles has an SQNR of about 31.8 dB (3 mantissa
bits, round to nearest, scale from amax); a product of two independently quantized operands loses 3 dB, 28.8 dB. wgrad's x
is quantized twice (along K, then along tokens), so its two operands carry 28.8 dB and 31.8 dB of noise: the sum of
relative noise powers 10^-2.88 + 10^-3.18 = 10^-2.70, 27.0 dB. Bounds are 1 dB below; the spread over seeds is < 0.1 dB
at these sizes.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from jetrl_kernels.quantize_reference import dequantize_blocks, dequantize_tiles
from torch import nn

from jetrl.linear import Float8Linear, QuantizedWeight, fp8_linear, fprop, quantize_input, quantize_weight
from jetrl.precision.formats import LinearFormat

FP8 = LinearFormat.fp8_blockwise("fp32")
SHAPES = [(256, 128, 384), (37, 200, 300), (1, 64, 192), (300, 576, 1536)]  # tokens, in, out; ragged ones on purpose


def sqnr_db(exact: torch.Tensor, got: torch.Tensor) -> float:
    noise = (got.double() - exact).square().mean()
    return (10 * torch.log10(exact.square().mean() / noise)).item()


def make(shape, dtype=torch.float32, bias=True, seed=0):
    tokens, k, n = shape
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, k, generator=g).to(dtype).requires_grad_()
    w = (torch.randn(n, k, generator=g) / k**0.5).requires_grad_()
    b = torch.randn(n, generator=g).requires_grad_() if bias else None
    dy = torch.randn(tokens, n, generator=g).to(dtype)
    return x, w, b, dy


@pytest.mark.parametrize("shape", SHAPES)
def test_three_gemms_keep_the_sqnr_of_their_quantized_operands(shape):
    x, w, b, dy = make(shape)
    fp8_linear(x, w, b, FP8).backward(dy)
    xd, wd, dyd = x.detach().double(), w.detach().double(), dy.double()
    y = fp8_linear(x, w, None, FP8)
    assert sqnr_db(xd @ wd.t(), y.detach()) > 27.8
    assert sqnr_db(dyd @ wd, x.grad) > 27.8
    if shape[0] >= 37:  # a single token leaves one product per element: no averaging, the dB figure does not apply
        assert sqnr_db(dyd.t() @ xd, w.grad) > 26.0
    torch.testing.assert_close(b.grad, dy.sum(0), rtol=2**-20, atol=1e-5)  # float32 sums of <= 300 terms


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_fprop_equals_the_product_of_its_dequantized_operands(shape, scale_format):
    """Kernel error apart from quantization error: partials are exact, so only the float32 scale multiplications and
    additions round: (2 per block + 1) * 2^-24 relative to the sum of magnitudes."""
    x, w, _, _ = make(shape)
    codes, scale = quantize_input(x.detach(), scale_format)
    weight = quantize_weight(w.detach(), scale_format)
    y = fprop(codes, scale, weight, None, torch.float32)
    a, b = dequantize_tiles(codes, scale).double(), dequantize_blocks(weight.codes, weight.scale).double()[: shape[2]]
    blocks = codes.shape[1] // 128
    bound = (3 * blocks + 2) * 2.0**-24 * (a.abs() @ b.abs().t())
    assert ((y.double() - a @ b.t()).abs() <= bound).all()


def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch():
    x, w, b, _ = make((300, 576, 1536), torch.bfloat16)
    whole = fp8_linear(x, w, b, FP8)
    for rows in ([0], [299], [5, 6], list(range(0, 300, 7))):
        assert torch.equal(fp8_linear(x[rows], w, b, FP8), whole[rows])


def test_merged_projection_gives_each_logical_matrix_its_own_bits():
    """What vLLM's qkv_proj stores against what the trainer's q, k, v compute, with sizes that are no multiples of 128."""
    x, _, _, _ = make((33, 576, 128), torch.bfloat16)
    sizes = (576, 192, 192)
    parts = [torch.randn(n, 576) for n in sizes]
    quantized = [quantize_weight(p, "fp32") for p in parts]
    merged = QuantizedWeight(torch.cat([q.codes for q in quantized]), torch.cat([q.scale for q in quantized]), sizes)
    got = fprop(*quantize_input(x, "fp32"), merged, None, torch.bfloat16)
    want = torch.cat([fp8_linear(x, p, None, FP8) for p in parts], dim=1)
    assert torch.equal(got, want)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_bits_depend_neither_on_training_mode_nor_on_autocast(training, autocast):
    x, w, b, _ = make((40, 200, 300), torch.bfloat16)
    layer = Float8Linear.from_linear(nn.Linear(200, 300), FP8)
    with torch.no_grad():
        layer.weight.copy_(w)
        layer.bias.copy_(b)
    layer.train(training)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        got = layer(x)
    assert torch.equal(got, fp8_linear(x, w, b, FP8))
    assert got.dtype == torch.bfloat16


def test_weight_is_quantized_from_its_bfloat16_rounding():
    w = torch.randn(256, 128)
    a, b = quantize_weight(w, "fp32"), quantize_weight(w.to(torch.bfloat16), "fp32")
    assert torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8)) and torch.equal(a.scale, b.scale)


def test_a_nan_in_one_token_reaches_that_token_only():
    x, w, b, _ = make((64, 256, 128), torch.bfloat16)
    with torch.no_grad():
        x[7, 3] = float("nan")
        x[9, 200] = float("inf")
    y = fp8_linear(x, w, b, FP8)
    bad = torch.isnan(y).all(dim=1)
    assert bad[7] and bad[9] and int(bad.sum()) == 2
    assert torch.isfinite(y[~bad]).all()


def test_gradient_checkpointing_and_accumulation_match_the_plain_pass():
    from torch.utils.checkpoint import checkpoint

    x, w, b, dy = make((50, 256, 384), torch.bfloat16)
    fp8_linear(x, w, b, FP8).backward(dy)
    plain = [t.grad.clone() for t in (x, w, b)]
    for t in (x, w, b):
        t.grad = None
    checkpoint(lambda: fp8_linear(x, w, b, FP8), use_reentrant=False).backward(dy)
    for got, want in zip((x.grad, w.grad, b.grad), plain, strict=True):
        assert torch.equal(got, want)


def test_tiny_gradients_keep_their_relative_precision():
    """1e-7 is where a floor on the scale (not on amax) would flatten gradients."""
    x, w, _, dy = make((128, 256, 128), bias=False)
    fp8_linear(x, w, None, FP8).backward(dy * 1e-7)
    assert sqnr_db(dy.double() * 1e-7 @ w.detach().double(), x.grad) > 27.8


def test_no_tokens():
    x, w, b, _ = make((0, 256, 128), torch.bfloat16)
    y = fp8_linear(x, w, b, FP8)
    y.sum().backward()
    assert y.shape == (0, 128) and torch.equal(w.grad, torch.zeros_like(w))


def test_swap_keeps_parameters_and_tying():
    layer = nn.Linear(128, 128)
    weight = layer.weight
    other = nn.Embedding(128, 128)
    other.weight = weight
    state = copy.deepcopy(layer.state_dict())
    swapped = Float8Linear.from_linear(layer, FP8)
    assert swapped is layer and layer.weight is weight is other.weight
    assert list(layer.state_dict()) == list(state)


def test_unsupported_formats_and_modules_are_refused():
    with pytest.raises(ValueError, match="one scale format"):
        Float8Linear.from_linear(nn.Linear(128, 128), LinearFormat.bf16())
    with pytest.raises(ValueError, match="plain nn.Linear"):
        Float8Linear.from_linear(Float8Linear.from_linear(nn.Linear(128, 128), FP8), FP8)
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        quantize_input(torch.zeros(1, 128, dtype=torch.float16), "fp32")


def test_leading_dimensions_are_kept():
    x, w, b, _ = make((24, 128, 256), torch.bfloat16)
    assert fp8_linear(x.view(2, 3, 4, 128), w, b, FP8).shape == (2, 3, 4, 256)
    assert F.linear(x.float(), w, b).shape == (24, 256)
