"""One quantized weight matrix in one tensor: how the FP8 wire carries it.

(N, K) padded to 128 in both dimensions gives Np x Kp codes and Np/128 x Kp/128 float32 scales. The scales' bytes follow the codes'
in as many more rows of Kp bytes as they need. One tensor and not two, because what a weight sync waits for is not the bytes but
the host's work for each tensor, on both sides.
"""

import torch
from jetrl_kernels.constants import E4M3, TILE, ceil_div, pad_to_tile

from jetrl.linear import quantize_weight_into


def packed_shape(weight_shape: tuple[int, int]) -> tuple[int, int]:
    """Of the E4M3 tensor that carries a weight of `weight_shape`."""
    rows, columns = (pad_to_tile(n) for n in weight_shape)
    return rows + ceil_div(4 * (rows // TILE) * (columns // TILE), columns), columns


def parts(packed: torch.Tensor, weight_shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """codes (Np, Kp) E4M3 and scale (Np/128, Kp/128) float32: views, or of a copy where a buffer holds them at an odd address."""
    rows, columns = (pad_to_tile(n) for n in weight_shape)
    if packed.storage_offset() % 4:
        packed = packed.clone()
    words = packed.view(torch.float32)
    shape = (rows // TILE, columns // TILE)
    return packed[:rows], words.as_strided(shape, (shape[1], 1), words.storage_offset() + rows * columns // 4)


def quantize_packed(weight: torch.Tensor, scale_format: str) -> torch.Tensor:
    """weight (N, K) bfloat16 or float32 -> what `quantize_weight` makes of it, in one tensor of `packed_shape`."""
    packed = torch.empty(packed_shape(weight.shape), dtype=E4M3, device=weight.device)
    quantize_weight_into(weight, scale_format, *parts(packed, weight.shape))
    return packed
