"""CUDA side of the grouped GEMMs: DeepGEMM's grouped kernels where they fit, else Triton with the same bits."""

from collections.abc import Sequence

import torch

from jetrl_kernels import backends, gemm_grouped_triton
from jetrl_kernels.constants import TILE
from jetrl_kernels.gemm import accumulate_tiles, column_major
from jetrl_kernels.ops import OUT_DTYPES
from jetrl_kernels.ops_grouped import check_grouped_k, check_grouped_m, spans

# Bulk stores of bfloat16 rows need multiples of 16 bytes.
_BF16_ROW = 8


def gemm_nt_grouped_m(a, a_scale, b, b_scale, group_of_row, out_dtype: str) -> torch.Tensor:
    """a (M, K) tiles by b (G, N, K) blocks, the group of each 128 rows from group_of_row -> (M, N). See ops_grouped.py.

    The group numbers are not read on the host: what they promise (constant within 128 rows, below G) is not checked here.
    """
    check_grouped_m(a, a_scale, b, b_scale, group_of_row)
    a, a_scale, b, b_scale = a.contiguous(), column_major(a_scale), b.contiguous(), b_scale.contiguous()
    group_of_row = group_of_row.contiguous()
    out = torch.empty(a.shape[0], b.shape[1], dtype=OUT_DTYPES[out_dtype], device=a.device)
    if not out.numel() or not a.shape[1]:
        return out.zero_()
    if backends.current().gemm == "deepgemm" and out.dtype == torch.bfloat16 and b.shape[1] % _BF16_ROW == 0:
        backends.deep_gemm().m_grouped_fp8_gemm_nt_contiguous(
            (a, a_scale), (b, b_scale), out, group_of_row, disable_ue8m0_cast=True
        )
    else:
        gemm_grouped_triton.gemm_nt_grouped_m(a, a_scale, b, b_scale, group_of_row, out)
    return out


def gemm_nt_grouped_k(a, a_scale, b, b_scale, sizes: Sequence[int], out: torch.Tensor) -> None:
    """out[g] (M, N) float32 += a[:, span g] b[:, span g]^T, both in tiles along the contraction. See ops_grouped.py.

    One launch per group that has tokens, on views: no operand is copied into another order first.
    """
    check_grouped_k(a, a_scale, b, b_scale, sizes, out)
    if not out.numel():
        return
    a, a_scale, b, b_scale = a.contiguous(), column_major(a_scale), b.contiguous(), column_major(b_scale)
    for group, start, end in spans(sizes):
        tiles = slice(start // TILE, end // TILE)
        accumulate_tiles(a[:, start:end], a_scale[:, tiles], b[:, start:end], b_scale[:, tiles], out[group])
