"""Torch reference of the rotary embedding and of Qwen3's q/k norm followed by it, in Hugging Face's operation order."""

import torch

from jetrl_kernels import norm_reference


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    inverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x cos + rotate_half(x) sin over the first 2 * (columns of cos) of a head; the rest of the head passes through.

    Each product is rounded to the dtype of x, then their sum: the bits of `apply_rotary_pos_emb` of Hugging Face's Llama
    and Qwen in eager mode. `inverse` turns the other way, which is the backward (eager autograd rounds alike).
    q (T, Hq, D), k (T, Hk, D); cos, sin (rows, R / 2), in the dtype of q; positions (T) names each token's row.
    """
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _turn(q, cos, -sin if inverse else sin), _turn(k, cos, -sin if inverse else sin)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    x1, x2, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), dim=-1)


def qk_norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMSNorm of every head by itself, then `rotary`. Returns q', k' and 1 / rms of each head, (T, Hq) and (T, Hk) float32."""
    normed, rstds = [], []
    for x, weight in ((q, q_weight), (k, k_weight)):
        y, _, rstd = norm_reference.rms_norm(x.reshape(-1, x.shape[-1]), None, weight, eps)
        normed.append(y.view(x.shape))
        rstds.append(rstd.view(x.shape[:2]))
    return (*rotary(*normed, cos, sin, positions, False), *rstds)
