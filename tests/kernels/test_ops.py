"""The custom ops on a CPU: declarations agree with what runs, autocast changes nothing, empty inputs, refusals."""

import jetrl_kernels.ops  # noqa: F401
import pytest
import torch
from jetrl_kernels.constants import E4M3

JETRL = torch.ops.jetrl
BF16 = torch.bfloat16


def _x(m: int = 130, k: int = 200) -> torch.Tensor:
    return torch.randn(m, k).to(BF16)


def _calls():
    x = _x()
    codes, scale = JETRL.quantize_tiles(x, "fp32")
    columns = JETRL.quantize_tiles_transposed(x, "fp32")
    weight = JETRL.quantize_blocks(x, "fp32")
    yield JETRL.quantize_tiles, (x, "pow2")
    yield JETRL.quantize_tiles_both, (x, "fp32")
    yield JETRL.requantize_tiles_transposed, (codes, scale, 200, "fp32")
    yield JETRL.quantize_blocks_both, (x, "fp32")
    yield JETRL.quantize_blocks_transposed, (x, "fp32")
    yield JETRL.quantize_blocks_into, (x, "pow2", *(torch.zeros_like(t) for t in weight))
    yield JETRL.transpose_blocks, weight
    yield JETRL.rms_norm, (x, None, x[0].clone(), 1e-6)
    yield JETRL.rms_norm_quantize, (x, x, x[0].clone(), 1e-6, "fp32")
    yield JETRL.rms_norm_backward, (x, None, x, x[0].clone(), torch.rand(130))
    yield JETRL.silu_mul, (x, x)
    yield JETRL.silu_mul_quantize, (x, x, "fp32")
    yield JETRL.silu_mul_quantize_backward, (x, x, x, "fp32")
    heads, angle = _x(6, 512).view(6, 4, 128), torch.rand(6, 64).to(BF16)
    yield JETRL.rotary, (heads, heads[:, :2], angle, angle, None, False)
    yield JETRL.rotary, (heads, heads[:, :2], angle, angle, torch.arange(6), True)
    yield JETRL.qk_norm_rotary, (heads, heads[:, :2], x[0, :128].clone(), x[1, :128].clone(), 1e-6, angle, angle, None)
    keys, gain = heads[:, :2], x[0, :128].clone()
    rstds = torch.rand(6, 4), torch.rand(6, 2)
    yield JETRL.qk_norm_rotary_backward, (heads, keys, keys, heads, keys, gain, gain, *rstds, angle, angle)
    yield JETRL.qk_norm_rotary_backward, (heads, keys, keys, heads, keys, None, None, None, None, angle, angle)
    yield JETRL.silu_mul_backward, (x, x, x)
    yield JETRL.silu_mul_backward_quantize, (x, x, x, "pow2")
    yield JETRL.quantize_blocks_stacked, ([x, x[:1]], "fp32", False)
    yield JETRL.quantize_blocks_stacked, ([x, x[:1]], "fp32", True)
    yield JETRL.requantize_blocks_transposed, (codes, scale, 200, "fp32")
    yield JETRL.token_logprobs, (x, torch.arange(130), torch.rand(130) + 0.5, 190)
    yield JETRL.token_logprobs_backward, (torch.rand(130), x, torch.arange(130), torch.ones(130), torch.rand(130), 190)
    yield JETRL.gemm_nt, (codes, scale, *weight, "bfloat16")
    yield JETRL.gemm_nt, (*columns, *columns, "float32")
    yield JETRL.gemm_nt_accumulate, (*columns, *columns, torch.zeros(200, 200))


@pytest.mark.parametrize("op,args", list(_calls()), ids=lambda value: str(value) if callable(value) else "")
def test_declaration_agrees_with_what_runs(op, args):
    torch.library.opcheck(op.default, args, test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))


@pytest.mark.parametrize("op,args", list(_calls()), ids=lambda value: str(value) if callable(value) else "")
def test_autocast_changes_no_bit(op, args):
    def outputs():
        own = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        result = op(*own)
        return own[-1] if result is None else result  # gemm_nt_accumulate adds to its last operand

    plain = outputs()
    with torch.autocast("cpu", dtype=BF16):
        inside = outputs()
    for a, b in zip(*((t,) if isinstance(t, torch.Tensor) else t for t in (plain, inside)), strict=True):
        assert a.dtype == b.dtype and torch.equal(a.float().nan_to_num(), b.float().nan_to_num())


def test_no_tokens():
    codes, scale = JETRL.quantize_tiles(_x(0), "fp32")
    weight = JETRL.quantize_blocks(_x(128), "fp32")
    assert JETRL.gemm_nt(codes, scale, *weight, "bfloat16").shape == (0, 128)
    columns = JETRL.quantize_tiles_transposed(_x(0), "fp32")
    assert torch.equal(JETRL.gemm_nt(*columns, *columns, "float32"), torch.zeros(200, 200))


def test_wrong_operands_are_refused_by_name():
    codes, scale = JETRL.quantize_tiles(_x(), "fp32")
    with pytest.raises(ValueError, match="b_scale is"):
        JETRL.gemm_nt(codes, scale, codes, scale[:3], "bfloat16")
    with pytest.raises(ValueError, match="out_dtype='half'"):
        JETRL.gemm_nt(codes, scale, codes, scale, "half")
    codes, scale = JETRL.quantize_blocks(_x(), "fp32")
    with pytest.raises(ValueError, match=r"blocks of \(130, 200\) fill codes \(256, 256\)"):
        JETRL.quantize_blocks_into(_x(), "fp32", codes[:128], scale)
    with pytest.raises(ValueError, match="must be contiguous"):
        JETRL.quantize_blocks_into(_x(), "fp32", codes, scale.t())
    with pytest.raises(ValueError, match=str(E4M3)):
        JETRL.gemm_nt(_x(4, 128), torch.ones(4, 1), codes, scale, "float32")
