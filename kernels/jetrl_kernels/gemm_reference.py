"""Torch reference of the block-scaled GEMM D = A B^T: the CPU backend, and the oracle of the GPU backends.

Numerics: the products of one 128-long block of K are summed on their own (`partial`), then
`acc += partial * (a_scale * b_scale)` in float32, blocks in order. Here a partial is the *exact* sum rounded once to
float32: an E4M3 product is a multiple of 2**-18 below 2**18, so 128 of them need 43 bits and float64 (53 bits) holds
every intermediate sum exactly. The result therefore depends neither on the order in which a BLAS adds nor on the number of
rows M, which is what lets a one-token decode and a packed training forward agree bit for bit on a CPU.
"""

import torch

from jetrl_kernels.constants import TILE


def gemm_nt(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """a (M, K) E4M3 with a_scale (M, K/128); b (N, K) E4M3 with b_scale (N/128, K/128) for blocks or (N, K/128) for tiles.

    K a multiple of 128. Returns (M, N) in out_dtype.
    """
    m, k = a.shape
    n = b.shape[0]
    assert b.shape[1] == k and k % TILE == 0, (a.shape, b.shape)
    b_is_tiled = b_scale.shape[0] == n
    acc = torch.zeros(m, n, dtype=torch.float32, device=a.device)
    # Autocast would silently turn the float64 product into a bfloat16 one.
    with torch.autocast(a.device.type, enabled=False):
        a64, b64 = a.to(torch.float64), b.to(torch.float64)
        for i in range(k // TILE):
            columns = slice(i * TILE, (i + 1) * TILE)
            partial = (a64[:, columns] @ b64[:, columns].t()).to(torch.float32)
            b_scale_row = b_scale[:, i] if b_is_tiled else b_scale[:, i].repeat_interleave(TILE)[:n]
            acc += partial * (a_scale[:, i].unsqueeze(1) * b_scale_row.unsqueeze(0))
    return acc.to(out_dtype)
