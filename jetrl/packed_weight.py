"""One quantized weight matrix in one tensor: how the FP8 wire carries it.

(N, K) padded to 128 in both dimensions gives Np x Kp codes and Np/128 x Kp/128 float32 scales. The scales' bytes follow the codes'
in as many more rows of Kp bytes as they need. One tensor and not two, because what a weight sync waits for is not the bytes but
the host's work for each tensor, on both sides.
"""

import functools

import torch
from jetrl_kernels.constants import E4M3, TILE, ceil_div, pad_to_tile

from jetrl.linear import quantize_weight_into


@functools.cache
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


class Slab:
    """Memory for packed weights, one right behind the other, so that they can be sent as one tensor (weight_bundle.py)."""

    def __init__(self, size: int, device: torch.device) -> None:
        """size: bytes; a multiple of 128, as a packed weight's are."""
        self._codes = torch.empty(size, dtype=E4M3, device=device)
        self._words = self._codes.view(torch.float32)
        self._size, self._used = size, 0

    def has_room_for(self, size: int) -> bool:
        return self._used + size <= self._size

    def quantize(self, weight: torch.Tensor, scale_format: str) -> torch.Tensor:
        """weight (N, K) bfloat16 or float32 -> what `quantize_weight` makes of it, in one tensor of `packed_shape`."""
        shape, start = packed_shape(weight.shape), self._used
        rows, columns = pad_to_tile(weight.shape[0]), shape[1]
        # Three views and no more: each is some microseconds, and a model has hundreds of matrices.
        packed = self._codes.as_strided(shape, (columns, 1), start)
        codes = self._codes.as_strided((rows, columns), (columns, 1), start)
        blocks = columns // TILE
        scale = self._words.as_strided((rows // TILE, blocks), (blocks, 1), (start + rows * columns) // 4)
        quantize_weight_into(weight, scale_format, codes, scale)
        self._used = start + shape[0] * columns
        return packed


def packed_bytes(weight_shape: tuple[int, int]) -> int:
    rows, columns = packed_shape(weight_shape)
    return rows * columns
