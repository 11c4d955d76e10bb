"""Torch references of the fused backward ops (see ops_fused.py)."""

import torch
import torch.nn.functional as F

from jetrl_kernels import norm_reference, quantize_reference, rotary_reference
from jetrl_kernels.constants import TILE, pad_to_tile
from jetrl_kernels.scale import encode, scale_from_amax


def _merge(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([F.pad(p, (0, pad_to_tile(p.shape[1]) - p.shape[1])) for p in parts], dim=1)


def qk_norm_rotary_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    q_rstd: torch.Tensor | None,
    k_rstd: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rotation turned back, rounded to the carrier as eager autograd does, then the norm of every head by itself."""
    parts, weights = [], []
    for turned, x, weight, rstd in zip(
        rotary_reference.rotary(dq, dk, cos, sin, None, True),
        (q, k),
        (q_weight, k_weight),
        (q_rstd, k_rstd),
        strict=True,
    ):
        rows = turned.reshape(-1, turned.shape[-1])
        dw = rows.new_empty(0, dtype=torch.float32)
        if weight is not None:
            rows, dw = norm_reference.rms_norm_backward(rows, None, x.reshape(rows.shape), weight, rstd.reshape(-1))
        parts.append(rows.reshape(turned.shape[0], -1))
        weights.append(dw)
    return _merge(*parts, dv.reshape(dv.shape[0], -1)), *weights


def silu_mul_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return _merge(*norm_reference.silu_mul_backward(grad, gate, up))


def requantize_blocks_transposed(
    codes: torch.Tensor, scale: torch.Tensor, k: int, scale_format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    m, kp = codes.shape[0], pad_to_tile(k)
    mp = pad_to_tile(m)
    x = quantize_reference.dequantize_tiles(codes, scale)[:, :k].t()
    blocks = F.pad(x, (0, mp - m, 0, kp - k)).view(kp // TILE, TILE, mp // TILE, TILE)
    block_scale = scale_from_amax(blocks.abs().amax(dim=(1, 3)), scale_format)
    return encode(blocks, block_scale[:, None, :, None]).reshape(kp, mp), block_scale
