"""Triton block-scaled GEMMs with DeepGEMM's bits: a large-tile kernel and one with swapped operands for few rows.

Per 128 of K: `partial` from zero on the tensor core (wgmma, in one chain), then
`acc = fma(partial, a_scale * b_scale, acc)`, blocks in order. Which operand feeds which side of the tensor core changes
no bit; a tile of fewer than 64 rows on the left would (it is not a wgmma tile), so the swapped kernel puts the weight there.
"""

import torch
import triton
import triton.language as tl

from jetrl_kernels.constants import TILE, ceil_div

SWAPPED_ROWS = 64
BLOCK_M, BLOCK_N = 64, 128


@triton.jit
def _gemm_kernel(
    a, a_scale, b, b_scale, out, m, n, k, stride_am, stride_bn, stride_as, stride_bs_n, stride_bs_k, stride_om,
    B_TILED: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    pid = tl.program_id(0)
    group = pid // (GROUP * tiles_n)
    first_m = group * GROUP
    rows_in_group = tl.minimum(tiles_m - first_m, GROUP)
    tile_m = first_m + (pid % (GROUP * tiles_n)) % rows_in_group
    tile_n = (pid % (GROUP * tiles_n)) // rows_in_group
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end read a row that exists and are dropped at the store: no masks in the loop.
    safe_row = tl.where(row < m, row, 0).to(tl.int64)
    safe_col = tl.where(col < n, col, 0).to(tl.int64)
    depth = tl.arange(0, 128)
    a_at = a + safe_row[:, None] * stride_am + depth[None, :]
    b_at = b + safe_col[None, :] * stride_bn + depth[:, None]
    as_at = a_scale + safe_row
    if B_TILED:
        bs_at = b_scale + safe_col * stride_bs_n
    else:
        bs_at = b_scale + (safe_col // 128) * stride_bs_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, k // 128):
        partial = tl.dot(tl.load(a_at), tl.load(b_at))
        acc += partial * (tl.load(as_at)[:, None] * tl.load(bs_at)[None, :])
        a_at += 128
        b_at += 128
        as_at += stride_as
        bs_at += stride_bs_k
    out_at = out + row.to(tl.int64)[:, None] * stride_om + col[None, :]
    inside = (row < m)[:, None] & (col < n)[None, :]
    if ACCUMULATE:
        acc += tl.load(out_at, mask=inside, other=0.0)
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swapped_kernel(
    a, a_scale, b, b_scale, out, m, n, k, stride_am, stride_bn, stride_as, stride_bs_n, stride_bs_k, stride_om,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out (m, n) with the weight on the tensor core's left. BLOCK_N, at most 128, divides 128: one scale per 128 of K."""
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    safe_col = tl.where(col < n, col, 0).to(tl.int64)
    safe_row = tl.where(row < m, row, 0)
    depth = tl.arange(0, 128)
    b_at = b + safe_col[:, None] * stride_bn + depth[None, :]
    a_at = a + safe_row[None, :] * stride_am + depth[:, None]
    as_at = a_scale + safe_row
    bs_at = b_scale + (tl.program_id(0) * BLOCK_N // 128) * stride_bs_n
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for _ in tl.range(0, k // (128 * UNROLL), num_stages=STAGES):
        for u in tl.static_range(UNROLL):
            partial = tl.dot(tl.load(b_at + u * 128), tl.load(a_at + u * 128))
            s = tl.load(as_at + u * stride_as)[None, :] * tl.load(bs_at + u * stride_bs_k)
            acc += partial * s
        a_at += 128 * UNROLL
        b_at += 128 * UNROLL
        as_at += stride_as * UNROLL
        bs_at += stride_bs_k * UNROLL
    out_at = out + row[None, :] * stride_om + col[:, None]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=(row < m)[None, :] & (col < n)[:, None])


def _launch(a, a_scale, b, b_scale, tiled: bool, out: torch.Tensor, accumulate: bool) -> None:
    (m, k), n = a.shape, b.shape[0]
    strides = (a.stride(0), b.stride(0), a_scale.stride(1), b_scale.stride(0), b_scale.stride(1))
    if m <= SWAPPED_ROWS and not tiled and not accumulate:
        unroll = 4 if (k // TILE) % 4 == 0 and m <= 16 else 1
        _swapped_kernel[(ceil_div(n, 64),)](
            a, a_scale, b, b_scale, out, m, n, k, *strides, out.stride(0),
            BLOCK_M=max(16, triton.next_power_of_2(m)), BLOCK_N=64, STAGES=4 if unroll == 4 else 8, UNROLL=unroll,
            num_warps=4,
        )  # fmt: skip
        return
    _gemm_kernel[(ceil_div(m, BLOCK_M) * ceil_div(n, BLOCK_N),)](
        a, a_scale, b, b_scale, out, m, n, k, *strides, out.stride(0), B_TILED=tiled, ACCUMULATE=accumulate,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, GROUP=8, num_warps=4, num_stages=4,
    )  # fmt: skip


def gemm_nt(a, a_scale, b, b_scale, tiled: bool, dtype: torch.dtype) -> torch.Tensor:
    """(M, N) in dtype; M, N, K positive; scales column-major for tiles, row-major for blocks."""
    out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    _launch(a, a_scale, b, b_scale, tiled, out, accumulate=False)
    return out


def gemm_nt_accumulate(a, a_scale, b, b_scale, out: torch.Tensor) -> None:
    """out (M, N) float32 += a b^T, both operands in tiles."""
    _launch(a, a_scale, b, b_scale, True, out, accumulate=True)
