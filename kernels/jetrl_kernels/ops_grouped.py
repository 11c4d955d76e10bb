"""Grouped GEMMs of mixture-of-experts layers as torch custom ops, registered with ops.py's.

Tokens are sorted by expert and every expert's share is padded to a multiple of 128 rows with rows of zeros, so that no tile
of the quantizers and of the GEMMs spans two experts. Padding belongs to its expert: zero codes give zero rows and add nothing
to a weight gradient. (DeepGEMM calls this the contiguous layout; its -1 for padding is not used here, since rows that
no kernel writes would reach the next quantizer.)

  gemm_nt_grouped_m(a, a_scale, b, b_scale, group_of_row, out_dtype) -> (M, N)
      fprop and dgrad: row i of a (M, K), in tiles, by b[group_of_row[i]] of b (G, N, K), in blocks (G, N/128, K/128).
      group_of_row (M) int32, constant within every 128 rows.
  gemm_nt_grouped_k(a, a_scale, b, b_scale, sizes, out) -> None
      wgrad: out (G, M, N) float32, out[g] += a[:, span g] b[:, span g]^T; a (M, T), b (N, T) both in tiles along T; sizes are
      the G lengths of the spans, multiples of 128 that add up to T. They are host integers: a launch needs them.
Every group has the bits of gemm_nt, or gemm_nt_accumulate, on that group alone.
"""

from collections.abc import Sequence

import torch

from jetrl_kernels import gemm_reference
from jetrl_kernels.constants import E4M3, TILE, ceil_div
from jetrl_kernels.ops import _check_out_dtype, _define, check_gemm_operands


def check_grouped_m(a, a_scale, b, b_scale, group_of_row) -> None:
    """Refuse operands of gemm_nt_grouped_m that do not fit each other. Raises ValueError."""
    if b.dim() != 3 or a.dim() != 2:
        raise ValueError(
            f"gemm_nt_grouped_m takes a (M, K) and b (groups, N, K), got {tuple(a.shape)}, {tuple(b.shape)}"
        )
    (m, k), (groups, n, kb) = a.shape, b.shape
    if a.dtype != E4M3 or b.dtype != E4M3:
        raise ValueError(f"gemm_nt_grouped_m takes {E4M3} operands, got {a.dtype} and {b.dtype}")
    if k != kb or k % TILE:
        raise ValueError(
            f"gemm_nt_grouped_m contracts over equal lengths that are multiples of {TILE}, got {k} and {kb}"
        )
    if m % TILE:
        raise ValueError(f"gemm_nt_grouped_m takes groups padded to {TILE} rows each, got {m} rows in all")
    if a_scale.shape != (m, k // TILE):
        raise ValueError(f"a_scale is {tuple(a_scale.shape)}; 1x{TILE} tiles of a {(m, k)} need {(m, k // TILE)}")
    if b_scale.shape != (groups, ceil_div(n, TILE), k // TILE):
        wanted = (groups, ceil_div(n, TILE), k // TILE)
        raise ValueError(f"b_scale is {tuple(b_scale.shape)}; blocks of b {(groups, n, k)} need {wanted}")
    if group_of_row.shape != (m,) or group_of_row.dtype != torch.int32:
        raise ValueError(
            f"group_of_row must be int32 of shape {(m,)}, got {group_of_row.dtype} {tuple(group_of_row.shape)}"
        )


def check_grouped_k(a, a_scale, b, b_scale, sizes: Sequence[int], out) -> None:
    """Refuse operands of gemm_nt_grouped_k that do not fit each other. Raises ValueError."""
    check_gemm_operands(a, a_scale, b, b_scale)
    if b_scale.shape[0] != b.shape[0]:
        raise ValueError(f"gemm_nt_grouped_k takes both operands in tiles; b_scale {tuple(b_scale.shape)} is in blocks")
    if any(size < 0 or size % TILE for size in sizes) or sum(sizes) != a.shape[1]:
        raise ValueError(
            f"sizes must be multiples of {TILE} that add up to the contracted length {a.shape[1]}, got {list(sizes)}"
        )
    wanted = (len(sizes), a.shape[0], b.shape[0])
    if out.shape != wanted or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(
            f"out must be a contiguous float32 {wanted}, got {out.dtype} {tuple(out.shape)} with strides {out.stride()}"
        )


def spans(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """(group, start, end) of every group that has tokens."""
    found, start = [], 0
    for group, size in enumerate(sizes):
        if size:
            found.append((group, start, start + size))
        start += size
    return found


def _grouped_m(a, a_scale, b, b_scale, group_of_row, out_dtype):
    check_grouped_m(a, a_scale, b, b_scale, group_of_row)
    out = torch.zeros(a.shape[0], b.shape[1], dtype=_check_out_dtype(out_dtype), device=a.device)
    groups = group_of_row.view(-1, TILE)
    if bool((groups != groups[:, :1]).any()) or bool((groups < 0).any()) or bool((groups >= b.shape[0]).any()):
        raise ValueError(f"group_of_row must be constant within every {TILE} rows and lie in 0..{b.shape[0] - 1}")
    for group in groups[:, 0].unique().tolist():
        rows = group_of_row == group
        out[rows] = gemm_reference.gemm_nt(a[rows], a_scale[rows], b[group], b_scale[group], out.dtype)
    return out


def _fake_grouped_m(a, a_scale, b, b_scale, group_of_row, out_dtype):
    check_grouped_m(a, a_scale, b, b_scale, group_of_row)
    return torch.empty(a.shape[0], b.shape[1], dtype=_check_out_dtype(out_dtype), device=a.device)


def _grouped_k(a, a_scale, b, b_scale, sizes, out):
    check_grouped_k(a, a_scale, b, b_scale, sizes, out)
    for group, start, end in spans(sizes):
        tiles = slice(start // TILE, end // TILE)
        operands = a[:, start:end], a_scale[:, tiles], b[:, start:end], b_scale[:, tiles]
        out[group] += gemm_reference.gemm_nt(*operands, torch.float32)


_define(
    "gemm_nt_grouped_m(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor group_of_row, str out_dtype) -> Tensor",
    _grouped_m,
    "gemm_grouped",
    _fake_grouped_m,
)
_define(
    "gemm_nt_grouped_k(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, SymInt[] sizes, Tensor(a!) out) -> ()",
    _grouped_k,
    "gemm_grouped",
    check_grouped_k,
)
