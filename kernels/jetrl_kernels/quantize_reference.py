"""Torch references of the tile and block quantizers: the CPU backend, and the oracle of the Triton kernels."""

import torch
import torch.nn.functional as F

from jetrl_kernels.constants import TILE, ceil_div, pad_to_tile
from jetrl_kernels.scale import encode, scale_from_amax


def _as_padded_float32(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """`x` (R, C) in float32, zero-padded to (rows, cols). A zero never raises an amax, so padding changes nothing."""
    return F.pad(x.to(torch.float32), (0, cols - x.shape[1], 0, rows - x.shape[0]))


def quantize_tiles(x: torch.Tensor, scale_format: str = "fp32") -> tuple[torch.Tensor, torch.Tensor]:
    """1x128 tiles along the last dimension.

    x: (M, K) float32 or bfloat16. Returns codes (M, Kp) E4M3 and scales (M, Kp/128) float32 with Kp = K rounded up
    to 128; columns beyond K hold code 0.
    """
    m, k = x.shape
    kp = pad_to_tile(k)
    tiles = _as_padded_float32(x, m, kp).view(m, kp // TILE, TILE)
    scale = scale_from_amax(tiles.abs().amax(dim=-1), scale_format)
    return encode(tiles, scale.unsqueeze(-1)).view(m, kp), scale


def quantize_tiles_transposed(x: torch.Tensor, scale_format: str = "fp32") -> tuple[torch.Tensor, torch.Tensor]:
    """1x128 tiles of x^T, that is, tiles of 128 rows of `x`, for a GEMM that contracts over rows (wgrad: tokens).

    x: (M, K). Returns codes (K, Mp) E4M3 and scales (K, Mp/128) float32.
    """
    return quantize_tiles(x.t(), scale_format)


def requantize_tiles_transposed(
    codes: torch.Tensor, scale: torch.Tensor, k: int, scale_format: str = "fp32"
) -> tuple[torch.Tensor, torch.Tensor]:
    """From a saved 1x128 copy (what fprop consumed) to tiles along rows: dequantize, transpose, quantize again.

    codes: (M, Kp) E4M3, scale: (M, Kp/128) float32, k: the true column count. Returns codes (k, Mp), scales (k, Mp/128).
    """
    return quantize_tiles_transposed(dequantize_tiles(codes, scale)[:, :k], scale_format)


def quantize_blocks(weight: torch.Tensor, scale_format: str = "fp32") -> tuple[torch.Tensor, torch.Tensor]:
    """128x128 blocks of one logical weight matrix, always from bf16(weight).

    The engines hold different master dtypes (float32 in the trainer, whatever arrived in the rollout); rounding to
    bfloat16 first is what makes both quantize the same numbers.
    weight: (N, K) any float dtype. Returns codes (Np, Kp) E4M3 and scales (Np/128, Kp/128) float32.
    """
    n, k = weight.shape
    np_, kp = pad_to_tile(n), pad_to_tile(k)
    padded = _as_padded_float32(weight.to(torch.bfloat16), np_, kp)
    blocks = padded.view(np_ // TILE, TILE, kp // TILE, TILE)
    scale = scale_from_amax(blocks.abs().amax(dim=(1, 3)), scale_format)
    codes = encode(blocks, scale[:, None, :, None]).reshape(np_, kp)
    return codes, scale


def dequantize_tiles(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(M, Kp) E4M3 with (M, Kp/128) scales -> (M, Kp) float32."""
    m, kp = codes.shape
    return (codes.to(torch.float32).view(m, kp // TILE, TILE) * scale.unsqueeze(-1)).view(m, kp)


def dequantize_blocks(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(Np, Kp) E4M3 with (Np/128, Kp/128) scales -> (Np, Kp) float32."""
    np_, kp = codes.shape
    assert scale.shape == (ceil_div(np_, TILE), ceil_div(kp, TILE)), (codes.shape, scale.shape)
    return codes.to(torch.float32) * scale.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
