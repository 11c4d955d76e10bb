"""The numbers every quantizer, kernel and host agrees on."""

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E4M3_NAN_CODE = 0x7F

# One length for tiles (1x128 along the contraction) and blocks (128x128 of a weight).
TILE = 128

# Floor on amax, not on the scale: it only keeps the scale of an all-zero tile finite and normal.
# Gradients of 1e-7 must keep their relative precision, so the floor lies far below them.
AMAX_FLOOR = 2.0**-100

SCALE_FORMATS = ("fp32", "pow2")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def pad_to_tile(n: int) -> int:
    """The smallest multiple of TILE that holds n."""
    return ceil_div(n, TILE) * TILE
