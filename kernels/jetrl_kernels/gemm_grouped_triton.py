"""Triton grouped GEMM over rows (gemm_triton.py's kernel with the weight chosen by the group of a tile's first row), and the
reordering of codes that DeepGEMM's grouped weight gradient wants."""

import torch
import triton
import triton.language as tl

from jetrl_kernels.constants import TILE, ceil_div

# 128 rows share a group, so tiles of 64 rows never span two.
BLOCK_M, BLOCK_N = 64, 128


@triton.jit
def _grouped_m_kernel(
    a, a_scale, b, b_scale, group_of_row, out, m, n, k, stride_am, stride_bg, stride_bn, stride_as, stride_bs_g, stride_bs_n,
    stride_om, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = m // BLOCK_M, tl.cdiv(n, BLOCK_N)
    pid = tl.program_id(0)
    first_m = pid // (GROUP * tiles_n) * GROUP
    rows_in_group = tl.minimum(tiles_m - first_m, GROUP)
    tile_m = first_m + (pid % (GROUP * tiles_n)) % rows_in_group
    tile_n = (pid % (GROUP * tiles_n)) // rows_in_group
    expert = tl.load(group_of_row + tile_m * BLOCK_M).to(tl.int64)
    row = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Columns past the end read one that exists and are dropped at the store: no masks in the loop.
    safe_col = tl.where(col < n, col, 0).to(tl.int64)
    depth = tl.arange(0, 128)
    a_at = a + row[:, None] * stride_am + depth[None, :]
    b_at = b + expert * stride_bg + safe_col[None, :] * stride_bn + depth[:, None]
    as_at = a_scale + row
    bs_at = b_scale + expert * stride_bs_g + (safe_col // 128) * stride_bs_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, k // 128):
        partial = tl.dot(tl.load(a_at), tl.load(b_at))
        acc += partial * (tl.load(as_at)[:, None] * tl.load(bs_at)[None, :])
        a_at += 128
        b_at += 128
        as_at += stride_as
        bs_at += 1
    tl.store(out + row[:, None] * stride_om + col[None, :], acc.to(out.dtype.element_ty), mask=(col < n)[None, :])


def gemm_nt_grouped_m(a, a_scale, b, b_scale, group_of_row, out: torch.Tensor) -> None:
    """out (M, N) bfloat16 or float32, contiguous; M a multiple of 128, N and K positive; a_scale column-major."""
    (m, k), n = a.shape, b.shape[1]
    _grouped_m_kernel[(m // BLOCK_M * ceil_div(n, BLOCK_N),)](
        a, a_scale, b, b_scale, group_of_row, out, m, n, k, a.stride(0), b.stride(0), b.stride(1), a_scale.stride(1),
        b_scale.stride(0), b_scale.stride(1), out.stride(0),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, GROUP=8, num_warps=4, num_stages=4,
    )  # fmt: skip


@triton.jit
def _pack_kernel(words, out, first, count, rows, ROWS: tl.constexpr):
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    start, size = tl.load(first + tile).to(tl.int64), tl.load(count + tile).to(tl.int64)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    word = tl.arange(0, 32)[None, :]
    value = tl.load(words + (row * tiles + tile) * 32 + word, mask=row < rows, other=0)
    tl.store(out + (start * rows + row * size + (tile - start)) * 32 + word, value, mask=row < rows)


def pack_groups(codes: torch.Tensor, first: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """codes (rows, T) contiguous -> the same bytes, flat: for each group its (rows, tokens of the group), row-major.

    first, count (T / 128) int32: of each tile of 128 tokens, the first tile and the number of tiles of its group.
    """
    rows, tiles = codes.shape[0], codes.shape[1] // TILE
    out = torch.empty(codes.numel(), dtype=codes.dtype, device=codes.device)
    _pack_kernel[(tiles, ceil_div(rows, 64))](
        codes.view(torch.int32), out.view(torch.int32), first, count, rows, ROWS=64, num_warps=2
    )
    return out
