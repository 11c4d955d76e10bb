"""Triton quantizers: 1x128 tiles along either dimension, both at once, or from a saved FP8 copy.

Same codes and scales as `quantize_reference`, bit for bit. Every kernel walks (rows x 128) pieces, one program each.
Row and column offsets are 64-bit: activations of long packed batches pass 2**31 elements.
"""

import torch
import triton
import triton.language as tl

from jetrl_kernels.constants import E4M3, TILE, ceil_div, pad_to_tile
from jetrl_kernels.ops import check_matrix, new_codes, new_column_major_scale
from jetrl_kernels.rounding_triton import INTERPRETED, abs_max4, amax, encode, encode4, scale_of
from jetrl_kernels.scale import check_scale_format

# Rows of one program of the row-wise quantizer, and warps per kernel: the fastest of a sweep on an H200
# (benchmarks/bench_quantize.py --sweep).
ROWS = 8
ROW_WARPS = 1
COLUMNS = 64
COLUMN_WARPS = 2
REQUANTIZE_COLUMNS = 64
REQUANTIZE_WARPS = 4
# Adjacent codes that a thread of the re-quantizer holds: half of what a load could bring, which halves the columns, and
# with them the scales and reciprocals, that each thread works out for itself.
REQUANTIZE_VECTOR = 8
BOTH_WARPS = 2
# Rows and columns of a step of the kernel that writes both orientations.
BOTH_ROWS = 32
BOTH_COLUMNS = 64


@triton.jit
def load_float32(x, row, col, m, k, stride_m, stride_k):
    """x[row, col] as float32, 0 outside (m, k)."""
    inside = (row < m)[:, None] & (col < k)[None, :]
    return tl.load(x + row[:, None] * stride_m + col[None, :] * stride_k, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_rows(
    value,
    codes,
    scale,
    row,
    col,
    tile,
    m,
    kp,
    stride_scale,
    POW2: tl.constexpr,
    BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Quantize (ROWS, 128) along columns and write it where it came from."""
    s = scale_of(amax(value, 1, INTERPRETED), POW2, INTERPRETED)
    code = encode(value, s[:, None], POW2, BF16, INTERPRETED)
    tl.store(codes + row[:, None] * kp + col[None, :], code, mask=(row < m)[:, None])
    tl.store(scale + tile * stride_scale + row, s, mask=row < m)


@triton.jit
def _store_columns(
    x0,
    x1,
    x2,
    x3,
    words,
    scale,
    col,
    tile,
    k,
    mp,
    stride_scale,
    POW2: tl.constexpr,
    BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Quantize 128 rows along rows and write them transposed; x_i (32, COLUMNS) holds the rows 4r + i."""
    s = scale_of(amax(abs_max4(x0, x1, x2, x3), 0, INTERPRETED), POW2, INTERPRETED)
    word = tl.trans(encode4(x0, x1, x2, x3, s[None, :], POW2, BF16, INTERPRETED))
    at = tile * 32 + tl.arange(0, 32)
    tl.store(words + col[:, None] * (mp // 4) + at[None, :], word, mask=(col < k)[:, None])
    tl.store(scale + tile * stride_scale + col, s, mask=col < k)


@triton.jit
def _tiles_kernel(
    x, codes, scale, m, k, kp, stride_m, stride_k, stride_scale,
    ROWS: tl.constexpr, POW2: tl.constexpr, BF16: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    tiles = kp // 128
    tile = (tl.program_id(0) % tiles).to(tl.int64)
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tile * 128 + tl.arange(0, 128)
    value = load_float32(x, row, col, m, k, stride_m, stride_k)
    store_rows(value, codes, scale, row, col, tile, m, kp, stride_scale, POW2, BF16, INTERPRETED)


@triton.jit
def _transposed_kernel(
    x, words, scale, m, k, mp, stride_m, stride_k, stride_scale,
    COLUMNS: tl.constexpr, POW2: tl.constexpr, BF16: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    pieces = tl.cdiv(k, COLUMNS)
    tile = (tl.program_id(0) // pieces).to(tl.int64)
    row = tile * 128 + 4 * tl.arange(0, 32)
    col = (tl.program_id(0) % pieces).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    x0 = load_float32(x, row, col, m, k, stride_m, stride_k)
    x1 = load_float32(x, row + 1, col, m, k, stride_m, stride_k)
    x2 = load_float32(x, row + 2, col, m, k, stride_m, stride_k)
    x3 = load_float32(x, row + 3, col, m, k, stride_m, stride_k)
    _store_columns(x0, x1, x2, x3, words, scale, col, tile, k, mp, stride_scale, POW2, BF16, INTERPRETED)


@triton.jit
def _both_kernel(
    x, codes, scale, words_t, scale_t, m, k, kp, mp, stride_m, stride_k, stride_scale, stride_scale_t,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, POW2: tl.constexpr, BF16: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    tiles = kp // 128
    tile_k = (tl.program_id(0) % tiles).to(tl.int64)
    tile_m = (tl.program_id(0) // tiles).to(tl.int64)
    # The piece is read twice, the second time from L1: holding it would take the registers that hide memory latency.
    col = tile_k * 128 + tl.arange(0, 128)
    for i in range(128 // ROWS):
        row = tile_m * 128 + ROWS * i + tl.arange(0, ROWS)
        value = load_float32(x, row, col, m, k, stride_m, stride_k)
        store_rows(value, codes, scale, row, col, tile_k, m, kp, stride_scale, POW2, BF16, INTERPRETED)
    row = tile_m * 128 + 4 * tl.arange(0, 32)
    for i in range(128 // COLUMNS):
        part = tile_k * 128 + COLUMNS * i + tl.arange(0, COLUMNS)
        x0 = load_float32(x, row, part, m, k, stride_m, stride_k)
        x1 = load_float32(x, row + 1, part, m, k, stride_m, stride_k)
        x2 = load_float32(x, row + 2, part, m, k, stride_m, stride_k)
        x3 = load_float32(x, row + 3, part, m, k, stride_m, stride_k)
        _store_columns(x0, x1, x2, x3, words_t, scale_t, part, tile_m, k, mp, stride_scale_t, POW2, BF16, INTERPRETED)


@triton.jit
def load_dequantized(codes, scale, row, col, m, k, kp, stride_sm):
    inside = (row < m)[:, None] & (col < k)[None, :]
    code = tl.load(codes + row[:, None] * kp + col[None, :], mask=inside, other=0)
    s = tl.load(scale + row * stride_sm, mask=row < m, other=1.0)
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * s[:, None]


@triton.jit
def _requantize_kernel(
    codes, scale, words_t, scale_t, m, k, kp, mp, stride_sm, stride_sk, stride_scale_t,
    COLUMNS: tl.constexpr, VECTOR: tl.constexpr, POW2: tl.constexpr, BF16: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    pieces = tl.cdiv(k, COLUMNS)
    tile = (tl.program_id(0) // pieces).to(tl.int64)
    first = (tl.program_id(0) % pieces).to(tl.int64) * COLUMNS
    col = first + tl.max_contiguous(tl.multiple_of(tl.arange(0, COLUMNS), VECTOR), VECTOR)
    scale += (first // 128) * stride_sk
    row = tile * 128 + 4 * tl.arange(0, 32)
    x0 = load_dequantized(codes, scale, row, col, m, k, kp, stride_sm)
    x1 = load_dequantized(codes, scale, row + 1, col, m, k, kp, stride_sm)
    x2 = load_dequantized(codes, scale, row + 2, col, m, k, kp, stride_sm)
    x3 = load_dequantized(codes, scale, row + 3, col, m, k, kp, stride_sm)
    _store_columns(x0, x1, x2, x3, words_t, scale_t, col, tile, k, mp, stride_scale_t, POW2, BF16, INTERPRETED)


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    """Kernels move codes as bytes; the interpreter has no float8 loads."""
    return codes.view(torch.uint8)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Four codes at a time: the rows of a code matrix are multiples of 128 bytes."""
    return codes.view(torch.int32)


def quantize_tiles(x: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, K) -> codes (M, Kp), scale (M, Kp/128), on x's device. Any strides; M or K may be 0."""
    check_matrix("x", x)
    check_scale_format(scale_format)
    (m, k), kp = x.shape, pad_to_tile(x.shape[1])
    codes, scale = new_codes(m, kp, x.device), new_column_major_scale(m, kp // TILE, x.device)
    if codes.numel():
        _tiles_kernel[(ceil_div(m, ROWS) * (kp // TILE),)](
            x, _bytes(codes), scale, m, k, kp, *x.stride(), scale.stride(1),
            ROWS=ROWS, POW2=scale_format == "pow2", BF16=x.dtype == torch.bfloat16, INTERPRETED=INTERPRETED, num_warps=ROW_WARPS,
        )  # fmt: skip
    return codes, scale


def quantize_tiles_transposed(x: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, K) -> codes (K, Mp), scale (K, Mp/128): tiles of 128 rows."""
    check_matrix("x", x)
    check_scale_format(scale_format)
    (m, k), mp = x.shape, pad_to_tile(x.shape[0])
    codes, scale = new_codes(k, mp, x.device), new_column_major_scale(k, mp // TILE, x.device)
    if codes.numel():
        _transposed_kernel[(ceil_div(k, COLUMNS) * (mp // TILE),)](
            x, _words(codes), scale, m, k, mp, *x.stride(), scale.stride(1),
            COLUMNS=COLUMNS, POW2=scale_format == "pow2", BF16=x.dtype == torch.bfloat16, INTERPRETED=INTERPRETED, num_warps=COLUMN_WARPS,
        )  # fmt: skip
    return codes, scale


def quantize_tiles_both(
    x: torch.Tensor, scale_format: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """codes, scale of `quantize_tiles` and codes, scale of `quantize_tiles_transposed`, reading x once."""
    check_matrix("x", x)
    check_scale_format(scale_format)
    (m, k), mp, kp = x.shape, pad_to_tile(x.shape[0]), pad_to_tile(x.shape[1])
    codes, scale = new_codes(m, kp, x.device), new_column_major_scale(m, kp // TILE, x.device)
    codes_t, scale_t = new_codes(k, mp, x.device), new_column_major_scale(k, mp // TILE, x.device)
    if x.numel():
        _both_kernel[((mp // TILE) * (kp // TILE),)](
            x, _bytes(codes), scale, _words(codes_t), scale_t, m, k, kp, mp, *x.stride(),
            scale.stride(1), scale_t.stride(1),
            ROWS=BOTH_ROWS, COLUMNS=BOTH_COLUMNS, POW2=scale_format == "pow2", BF16=x.dtype == torch.bfloat16,
            INTERPRETED=INTERPRETED, num_warps=BOTH_WARPS,
        )  # fmt: skip
    return codes, scale, codes_t, scale_t


def requantize_tiles_transposed(
    codes: torch.Tensor, scale: torch.Tensor, k: int, scale_format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """codes (M, Kp), scale (M, Kp/128) -> codes (k, Mp), scale (k, Mp/128): dequantize, transpose, quantize."""
    check_scale_format(scale_format)
    if codes.dtype != E4M3 or not codes.is_contiguous():
        raise ValueError(f"codes must be contiguous {E4M3}, got {codes.dtype} with strides {codes.stride()}")
    (m, kp), mp = codes.shape, pad_to_tile(codes.shape[0])
    codes_t, scale_t = new_codes(k, mp, codes.device), new_column_major_scale(k, mp // TILE, codes.device)
    if codes_t.numel():
        _requantize_kernel[(ceil_div(k, REQUANTIZE_COLUMNS) * (mp // TILE),)](
            _bytes(codes), scale, _words(codes_t), scale_t, m, k, kp, mp, *scale.stride(), scale_t.stride(1),
            COLUMNS=REQUANTIZE_COLUMNS, VECTOR=REQUANTIZE_VECTOR, POW2=scale_format == "pow2", BF16=False,
            INTERPRETED=INTERPRETED, num_warps=REQUANTIZE_WARPS,
        )  # fmt: skip
    return codes_t, scale_t
