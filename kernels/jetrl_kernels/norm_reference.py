"""Torch references of RMSNorm and SiLU-mul, forward and backward, in the operation order of Hugging Face's Llama and Qwen.

The row statistics are taken over one row at a time in float32; nothing depends on how many rows there are.
"""

import torch


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y = weight * T(h * rsqrt(mean(h^2) + eps)) with h = T(x + residual), T the dtype of x (HF *RMSNorm.forward).

    x, residual (M, K), weight (K). Returns y (M, K), h (M, K) (a new tensor, also without residual), rstd (M) float32.
    """
    hidden = x.clone() if residual is None else x + residual
    h = hidden.to(torch.float32)
    rstd = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * (h * rstd).to(x.dtype), hidden, rstd.squeeze(-1)


def rms_norm_backward(
    grad: torch.Tensor, grad_hidden: torch.Tensor | None, hidden: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of h (which are those of x and of residual) and of weight, everything in float32 until the end.

    dh = rstd * (g - n * mean(g * n)) + grad_hidden with g = grad * weight, n = h * rstd; dweight = sum over rows of
    grad * T(n). Returns dh (M, K) in grad's dtype and dweight (K) float32.
    """
    n = hidden.to(torch.float32) * rstd.unsqueeze(-1)
    grad32 = grad.to(torch.float32)
    g = grad32 * weight.to(torch.float32)
    dh = rstd.unsqueeze(-1) * (g - n * (g * n).mean(-1, keepdim=True))
    if grad_hidden is not None:
        dh = dh + grad_hidden.to(torch.float32)
    return dh.to(grad.dtype), (grad32 * n.to(hidden.dtype).to(torch.float32)).sum(0)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """T(T(silu(gate)) * up), silu in float32, T the dtype of gate (HF *MLP.forward; vLLM's silu_and_mul rounds alike)."""
    g = gate.to(torch.float32)
    return (g / (1.0 + torch.exp(-g))).to(gate.dtype) * up


def silu_mul_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dgate = grad * up * s * (1 + gate * (1 - s)), dup = grad * T(gate * s), s = sigmoid(gate); float32, then T."""
    g, u, d = gate.to(torch.float32), up.to(torch.float32), grad.to(torch.float32)
    s = 1.0 / (1.0 + torch.exp(-g))
    silu = (g / (1.0 + torch.exp(-g))).to(gate.dtype).to(torch.float32)
    return (d * u * (s * (1.0 + g * (1.0 - s)))).to(gate.dtype), (d * silu).to(gate.dtype)
