"""Grouped GEMMs on a CPU: each group has the bits of the plain op on that group alone; declarations; refusals."""

import jetrl_kernels.ops  # noqa: F401
import pytest
import torch

JETRL = torch.ops.jetrl
SIZES = (128, 0, 384)


def _grouped_m():
    groups = torch.tensor([0] * 128 + [2] * 384, dtype=torch.int32)
    a = JETRL.quantize_tiles(torch.randn(512, 200), "fp32")
    b = [JETRL.quantize_blocks(torch.randn(130, 200), "fp32") for _ in SIZES]
    return *a, torch.stack([codes for codes, _ in b]), torch.stack([scale for _, scale in b]), groups


def _grouped_k():
    a, b = (JETRL.quantize_tiles_transposed(torch.randn(512, n), "fp32") for n in (70, 130))
    return *a, *b, list(SIZES), torch.randn(3, 70, 130)


def test_grouped_m_is_gemm_nt_of_each_group():
    a, a_scale, b, b_scale, groups = _grouped_m()
    out = JETRL.gemm_nt_grouped_m(a, a_scale, b, b_scale, groups, "bfloat16")
    for group, rows in ((0, slice(0, 128)), (2, slice(128, 512))):
        expected = JETRL.gemm_nt(a[rows], a_scale[rows], b[group], b_scale[group], "bfloat16")
        assert torch.equal(out[rows], expected)


def test_grouped_k_adds_the_weight_gradient_of_each_group_and_leaves_the_empty_one():
    a, a_scale, b, b_scale, sizes, out = _grouped_k()
    before, expected = out.clone(), out.clone()
    JETRL.gemm_nt_grouped_k(a, a_scale, b, b_scale, sizes, out)
    JETRL.gemm_nt_accumulate(a[:, :128], a_scale[:, :1], b[:, :128], b_scale[:, :1], expected[0])
    JETRL.gemm_nt_accumulate(a[:, 128:], a_scale[:, 1:], b[:, 128:], b_scale[:, 1:], expected[2])
    assert torch.equal(out, expected) and torch.equal(out[1], before[1]) and not torch.equal(out[2], before[2])


@pytest.mark.parametrize(
    "make,op,extra", ((_grouped_m, "gemm_nt_grouped_m", ("float32",)), (_grouped_k, "gemm_nt_grouped_k", ()))
)
def test_declaration_agrees_with_what_runs(make, op, extra):
    torch.library.opcheck(getattr(JETRL, op).default, (*make(), *extra), test_utils=("test_faketensor",))


def test_wrong_operands_are_refused_by_name():
    a, a_scale, b, b_scale, groups = _grouped_m()
    with pytest.raises(ValueError, match="constant within every 128 rows"):
        JETRL.gemm_nt_grouped_m(a, a_scale, b, b_scale, groups.roll(1), "bfloat16")
    with pytest.raises(ValueError, match="padded to 128 rows"):
        JETRL.gemm_nt_grouped_m(a[:100], a_scale[:100], b, b_scale, groups[:100], "bfloat16")
    with pytest.raises(ValueError, match="b_scale is"):
        JETRL.gemm_nt_grouped_m(a, a_scale, b, b_scale[:, :1], groups, "bfloat16")
    with pytest.raises(ValueError, match="int32"):
        JETRL.gemm_nt_grouped_m(a, a_scale, b, b_scale, groups.long(), "bfloat16")
    a, a_scale, b, b_scale, sizes, out = _grouped_k()
    with pytest.raises(ValueError, match="add up to the contracted length 512"):
        JETRL.gemm_nt_grouped_k(a, a_scale, b, b_scale, [128, 0, 256], out)
    with pytest.raises(ValueError, match="out must be a contiguous float32"):
        JETRL.gemm_nt_grouped_k(a, a_scale, b, b_scale, sizes, out.bfloat16())
