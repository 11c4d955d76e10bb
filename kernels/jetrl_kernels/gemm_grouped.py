"""CUDA side of the grouped GEMMs: DeepGEMM's grouped kernels where they fit, else Triton with the same bits."""

import functools
from collections.abc import Sequence

import torch

from jetrl_kernels import backends, gemm_grouped_triton, gemm_triton
from jetrl_kernels.constants import TILE
from jetrl_kernels.gemm import column_major
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

    Under a CUDA graph: the first call with new sizes copies them to the device, which no capture allows; call once before.
    """
    check_grouped_k(a, a_scale, b, b_scale, sizes, out)
    if not out.numel() or not a.shape[1]:
        return
    a, a_scale, b, b_scale = a.contiguous(), column_major(a_scale), b.contiguous(), column_major(b_scale)
    # Bulk stores of float32 rows need multiples of 16 bytes.
    if backends.current().gemm == "deepgemm" and a.shape[0] % 4 == 0 and b.shape[0] % 4 == 0:
        per_group, first, count = _on_device(tuple(sizes), a.device)
        # DeepGEMM wants each group's operand as a matrix of its own, one behind the other.
        packed = [gemm_grouped_triton.pack_groups(codes, first, count) for codes in (a, b)]
        backends.deep_gemm().k_grouped_fp8_gemm_nt_contiguous(
            (packed[0], a_scale), (packed[1], b_scale), out, list(sizes), per_group, out
        )
        return
    for group, start, end in spans(sizes):
        tiles = slice(start // TILE, end // TILE)
        operands = a[:, start:end], a_scale[:, tiles], b[:, start:end], b_scale[:, tiles]
        gemm_triton.gemm_nt_accumulate(*operands, out[group])


@functools.lru_cache(maxsize=64)
def _on_device(sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int32 on the device: sizes; and of every tile of 128, the first tile and the number of tiles of its group."""
    tiles = torch.tensor(sizes, dtype=torch.int32) // TILE
    first = torch.repeat_interleave(tiles.cumsum(0).to(torch.int32) - tiles, tiles)
    return tuple(t.to(device) for t in (tiles * TILE, first, torch.repeat_interleave(tiles, tiles)))
