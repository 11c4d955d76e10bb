"""The ops under CUDA graphs, torch.compile and activation checkpointing, with the bits of the plain call."""

import jetrl_kernels.ops  # noqa: F401
import pytest
import torch

from jetrl.linear import fp8_linear
from jetrl.precision.formats import LinearFormat

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def _decode_step(x, gate_up, norm):
    codes, scale, _, _ = torch.ops.jetrl.rms_norm_quantize(x, None, norm, 1e-6, "fp32")
    y = torch.ops.jetrl.gemm_nt(codes, scale, *gate_up, "bfloat16")
    half = y.shape[1] // 2
    return torch.ops.jetrl.silu_mul_quantize(y[:, :half], y[:, half:], "fp32")


@pytest.mark.parametrize("m", (1, 17, 64, 200))
def test_a_captured_step_replays_with_the_bits_of_the_plain_call_after_new_weights(m):
    norm = torch.randn(1024, device="cuda", dtype=BF16)
    weights = torch.ops.jetrl.quantize_blocks(torch.randn(2048, 1024, device="cuda"), "fp32")
    x = torch.randn(m, 1024, device="cuda", dtype=BF16)
    _decode_step(x, weights, norm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _decode_step(x, weights, norm)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        for old, new in zip(
            weights, torch.ops.jetrl.quantize_blocks(torch.randn(2048, 1024, device="cuda"), "fp32"), strict=True
        ):
            old.copy_(new)
        captured[0].view(torch.uint8).fill_(0x7F)
        graph.replay()
        for got, want in zip(captured, _decode_step(x, weights, norm), strict=True):
            assert torch.equal(got.to(torch.float32), want.to(torch.float32))


def test_compiled_step_has_the_bits_of_the_plain_call():
    norm = torch.randn(1024, device="cuda", dtype=BF16)
    weights = torch.ops.jetrl.quantize_blocks(torch.randn(2048, 1024, device="cuda"), "fp32")
    x = torch.randn(40, 1024, device="cuda", dtype=BF16)
    compiled = torch.compile(_decode_step, fullgraph=True, dynamic=True)
    for got, want in zip(compiled(x, weights, norm), _decode_step(x, weights, norm), strict=True):
        assert torch.equal(got.to(torch.float32), want.to(torch.float32))


def test_checkpointed_layer_has_the_gradients_of_the_plain_one():
    fmt = LinearFormat.fp8_blockwise("fp32")
    w = torch.randn(512, 384, device="cuda", dtype=BF16).requires_grad_()
    x = torch.randn(100, 384, device="cuda", dtype=BF16).requires_grad_()
    plain = torch.autograd.grad(fp8_linear(x, w, None, fmt).square().sum(), (x, w))
    y = torch.utils.checkpoint.checkpoint(fp8_linear, x, w, None, fmt, use_reentrant=False)
    again = torch.autograd.grad(y.square().sum(), (x, w))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_autocast_changes_nothing():
    x = torch.randn(33, 384, device="cuda")
    plain = torch.ops.jetrl.quantize_tiles(x, "fp32")
    with torch.autocast("cuda", dtype=BF16):
        inside = torch.ops.jetrl.quantize_tiles(x, "fp32")
    assert all(torch.equal(a.to(torch.float32), b.to(torch.float32)) for a, b in zip(plain, inside, strict=True))


def test_op_declarations_agree_with_what_runs():
    x = torch.randn(130, 200, device="cuda", dtype=BF16)
    codes, scale = torch.ops.jetrl.quantize_tiles(x, "fp32")
    weight = torch.ops.jetrl.quantize_blocks(x, "fp32")
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")
    for op, args in (
        (torch.ops.jetrl.quantize_tiles_both, (x, "fp32")),
        (torch.ops.jetrl.requantize_tiles_transposed, (codes, scale, 200, "fp32")),
        (torch.ops.jetrl.quantize_blocks_both, (x, "fp32")),
        (torch.ops.jetrl.quantize_blocks_transposed, (x, "fp32")),
        (torch.ops.jetrl.transpose_blocks, weight),
        (torch.ops.jetrl.rms_norm, (x, x, x[0].clone(), 1e-6)),
        (torch.ops.jetrl.rms_norm_quantize, (x, None, x[0].clone(), 1e-6, "fp32")),
        (torch.ops.jetrl.rms_norm_backward, (x, None, x, x[0].clone(), torch.rand(130, device="cuda"))),
        (torch.ops.jetrl.silu_mul, (x, x)),
        (torch.ops.jetrl.silu_mul_quantize_backward, (x, x, x, "fp32")),
        (torch.ops.jetrl.gemm_nt, (codes, scale, *weight, "bfloat16")),
    ):
        torch.library.opcheck(op.default, args, test_utils=checks)
