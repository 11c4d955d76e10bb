"""Other ways to compute what a shared operator computes: a rounding left out, another split of a sum, or a tiny fault.

Each is of the size that a kernel swapped on one engine only would have, and the same on either side. Pure functions.
"""

import torch
from torch import nn

# Of a weight scale, a temperature: one part in 256.
FAULT = 1.0 + 2.0**-8
# Of a value that may still be rounded to BF16: at least one place there.
BF16_FAULT = 1.0 + 2.0**-7


def rstd_in_parts(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / rms over the last dimension, kept: the squares are summed in four parts, which are rounded to BF16."""
    parts = [part.sum(-1, keepdim=True).to(torch.bfloat16).float() for part in x.float().pow(2).chunk(4, dim=-1)]
    return torch.rsqrt(sum(parts) / x.shape[-1] + eps)


def normed(x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """weight * T(x * rstd), as the shared RMSNorm rounds; rstd (..., 1)."""
    return weight.to(x.dtype) * (x.float() * rstd).to(x.dtype)


def norm_in_parts(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return normed(x, rstd_in_parts(x, eps), weight)


def norm_in_one_rounding(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def silu_mul_in_one_rounding(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def one_place_off(x: torch.Tensor) -> torch.Tensor:
    """A copy in which the first value of every row has the next bit pattern."""
    x = x.clone()
    x.view({2: torch.int16, 4: torch.int32}[x.element_size()])[..., 0] += 1
    return x


def rotary_in_one_rounding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (..., D); cos and sin (..., R / 2) broadcast against it: products and sum in FP32, rounded at the end."""
    half = cos.shape[-1]
    x1, x2, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = (x1 * cos.float() - x2 * sin.float(), x2 * cos.float() + x1 * sin.float())
    return torch.cat((*(t.to(x.dtype) for t in turned), rest), dim=-1)


def linear_in_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The contraction in two halves, the first of which is rounded to the carrier."""
    half = x.shape[-1] // 2
    first = nn.functional.linear(x[..., :half], weight[:, :half])
    return first + nn.functional.linear(x[..., half:], weight[:, half:], bias)


def attention_in_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """q (T, H, D), k and v (L, Hkv, D): token t attends to the first seen[t] keys, in two parts merged after rounding.

    Returns (T, H, D) in the dtype of q.
    """
    qs, ks, vs = (t.transpose(0, 1).float() for t in (q, k, v))
    repeat = qs.shape[0] // ks.shape[0]
    ks, vs = ks.repeat_interleave(repeat, 0), vs.repeat_interleave(repeat, 0)
    scores = qs @ ks.transpose(1, 2) * scale
    hidden = torch.arange(ks.shape[1], device=q.device) >= seen.to(q.device)[:, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    half, parts = max(ks.shape[1] // 2, 1), []
    for keys in (slice(0, half), slice(half, None)):
        if not scores[:, :, keys].shape[2]:
            continue
        lse = torch.logsumexp(scores[:, :, keys], -1, keepdim=True)
        weights = (scores[:, :, keys] - lse.clamp_min(-1e30)).exp()
        parts.append(((weights @ vs[:, keys]).to(q.dtype).float(), lse))
    total = torch.logsumexp(torch.cat([lse for _, lse in parts], -1), -1, keepdim=True)
    return sum(y * (lse - total).exp() for y, lse in parts).transpose(0, 1).to(q.dtype)


def log_probs_in_parts(logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, vocab: int) -> torch.Tensor:
    """A token's log-probability (M) float32 with the sum over the vocabulary in two halves."""
    z = logits[:, :vocab].float() / temperature.unsqueeze(1)
    halves = [torch.logsumexp(part, -1) for part in z.chunk(2, dim=-1)]
    return z.gather(1, ids.long().unsqueeze(1)).squeeze(1) - torch.logaddexp(*halves)


def other_scales(args: tuple) -> tuple:
    """Arguments of a quantizer, with the other scale format."""
    x, scale_format = args
    return x.contiguous(), "fp32" if scale_format == "pow2" else "pow2"


def one_scale_off(args: tuple) -> tuple:
    """Arguments of a block-scaled GEMM, with one weight scale off."""
    a, a_scale, b, b_scale, *rest = args
    b_scale = b_scale.clone()
    b_scale[0, 0] *= FAULT
    return (a, a_scale, b, b_scale, *rest)
