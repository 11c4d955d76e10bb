"""Triton quantizers give the bytes and scales of the torch references (interpreter on a CPU, compiled on a GPU)."""

import pytest
import torch
from hostile_data import KINDS, matrix
from jetrl_kernels import quantize_reference as reference
from jetrl_kernels.constants import TILE, pad_to_tile

quantize_triton = pytest.importorskip("jetrl_kernels.quantize_triton", reason="Triton is not installed")
weight_triton = pytest.importorskip("jetrl_kernels.weight_triton", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = ("fp32", "pow2")
SHAPES = ((1, 128), (37, 200), (130, 131), (0, 64))


def assert_same(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for g, e in zip(got, expected, strict=True):
        assert g.shape == e.shape and g.dtype == e.dtype
        if e.dtype == torch.float32:
            assert torch.equal(g.isnan().cpu(), e.isnan())
            g, e = g.cpu().nan_to_num(0.0), e.nan_to_num(0.0)
            assert torch.equal(g, e)
        else:
            assert torch.equal(g.cpu().view(torch.uint8), e.view(torch.uint8))


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tile_quantizers_match_reference(shape, kind, scale_format, generator):
    dtype = torch.bfloat16 if generator.seed() % 2 else torch.float32
    x = matrix(kind, *shape, dtype, generator)
    rows = reference.quantize_tiles(x, scale_format)
    columns = reference.quantize_tiles_transposed(x, scale_format)
    on_device = x.to(DEVICE)
    assert_same(quantize_triton.quantize_tiles(on_device, scale_format), rows)
    assert_same(quantize_triton.quantize_tiles_transposed(on_device, scale_format), columns)
    assert_same(quantize_triton.quantize_tiles_both(on_device, scale_format), (*rows, *columns))


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_requantize_matches_reference(kind, scale_format, generator):
    m, k = 150, 140
    codes, scale = reference.quantize_tiles(matrix(kind, m, k, torch.bfloat16, generator), scale_format)
    expected = reference.requantize_tiles_transposed(codes, scale, k, scale_format)
    got = quantize_triton.requantize_tiles_transposed(codes.to(DEVICE), scale.to(DEVICE), k, scale_format)
    assert_same(got, expected)


@pytest.mark.parametrize("rows,columns", ((8, 128), (16, 32), (64, 64)))
def test_both_orientations_in_other_steps_give_the_same_bytes(rows, columns, generator, monkeypatch):
    monkeypatch.setattr(quantize_triton, "BOTH_ROWS", rows)
    monkeypatch.setattr(quantize_triton, "BOTH_COLUMNS", columns)
    x = matrix("spread", 130, 140, torch.bfloat16, generator)
    expected = (*reference.quantize_tiles(x, "fp32"), *reference.quantize_tiles_transposed(x, "fp32"))
    assert_same(quantize_triton.quantize_tiles_both(x.to(DEVICE), "fp32"), expected)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("kind", KINDS)
def test_weight_quantizer_matches_reference_in_both_orientations(kind, dtype, scale_format, generator):
    w = matrix(kind, 200, 130, dtype, generator)
    codes, scale = reference.quantize_blocks(w, scale_format)
    transposed = codes.view(torch.uint8).t().contiguous().view(codes.dtype), scale.t().contiguous()
    assert_same(weight_triton.quantize_blocks(w.to(DEVICE), scale_format), (codes, scale))
    # Into the middle of storage that holds something: all of its own part is written, and nothing around it.
    rows, full = torch.full((768, 256), 0x5A, dtype=torch.uint8, device=DEVICE), torch.full((6, 2), 7.0, device=DEVICE)
    weight_triton.quantize_blocks_into(w.to(DEVICE), scale_format, rows[256:512].view(codes.dtype), full[2:4])
    assert_same((rows[256:512].view(codes.dtype), full[2:4]), (codes, scale))
    assert (rows[:256] == 0x5A).all() and (rows[512:] == 0x5A).all() and (full[:2] == 7).all() and (full[4:] == 7).all()
    assert_same(weight_triton.quantize_blocks_both(w.to(DEVICE), scale_format), (codes, scale, *transposed))
    assert_same(weight_triton.quantize_blocks_transposed(w.to(DEVICE), scale_format), transposed)
    assert_same(weight_triton.transpose_blocks(codes.to(DEVICE), scale.to(DEVICE)), transposed)


def test_strided_input_gives_the_same_bytes(generator):
    wide = matrix("normal", 64, 600, torch.bfloat16, generator).to(DEVICE)
    for x in (wide[:, 100:300], wide[:, ::2], wide.t()):
        expected = reference.quantize_tiles(x.cpu().contiguous(), "fp32")
        assert_same(quantize_triton.quantize_tiles(x, "fp32"), expected)


def test_padding_holds_code_zero(generator):
    x = matrix("normal", 5, 130, torch.bfloat16, generator).to(DEVICE)
    codes, _, codes_t, _ = quantize_triton.quantize_tiles_both(x, "fp32")
    assert codes.shape == (5, pad_to_tile(130)) and not codes[:, 130:].view(torch.uint8).any()
    assert codes_t.shape == (130, TILE) and not codes_t[:, 5:].view(torch.uint8).any()


def test_wrong_dtype_and_rank_are_named():
    with pytest.raises(ValueError, match="float16"):
        quantize_triton.quantize_tiles(torch.zeros(4, 4, dtype=torch.float16, device=DEVICE), "fp32")
    with pytest.raises(ValueError, match="3 dimensions"):
        quantize_triton.quantize_tiles(torch.zeros(1, 4, 4, device=DEVICE), "fp32")
    with pytest.raises(ValueError, match="scale_format='mx'"):
        quantize_triton.quantize_tiles(torch.zeros(4, 4, device=DEVICE), "mx")
