"""Rotary embedding with autograd, on the operator that the rollout calls."""

import jetrl_kernels.ops  # noqa: F401  (registers torch.ops.jetrl)
import torch


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, positions):
        ctx.save_for_backward(cos, sin, positions)
        return torch.ops.jetrl.rotary(q, k, cos, sin, positions, False)

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin, positions = ctx.saved_tensors
        dq, dk = (_rows_contiguous(d) for d in (dq, dk))
        return *torch.ops.jetrl.rotary(dq, dk, cos, sin, positions, True), None, None, None


class _QkNormRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, eps, cos, sin, positions):
        q_out, k_out, q_rstd, k_rstd = torch.ops.jetrl.qk_norm_rotary(
            q, k, q_weight, k_weight, eps, cos, sin, positions
        )
        ctx.save_for_backward(q, k, q_weight, k_weight, q_rstd, k_rstd, cos, sin, positions)
        return q_out, k_out

    @staticmethod
    def backward(ctx, dq, dk):
        q, k, q_weight, k_weight, q_rstd, k_rstd, cos, sin, positions = ctx.saved_tensors
        dq, dk = (_rows_contiguous(d) for d in (dq, dk))
        dq, dk = torch.ops.jetrl.rotary(dq, dk, cos, sin, positions, True)
        dq, dq_weight = _norm_backward(dq, q, q_weight, q_rstd)
        dk, dk_weight = _norm_backward(dk, k, k_weight, k_rstd)
        return dq, dk, dq_weight, dk_weight, None, None, None, None


def _norm_backward(d, x, weight, rstd):
    rows = (t.reshape(-1, t.shape[-1]) for t in (d, x))
    grad, hidden = rows
    dx, dweight = torch.ops.jetrl.rms_norm_backward(grad, None, hidden, weight, rstd.reshape(-1))
    return dx.view(x.shape), dweight.to(weight.dtype)


def _rows_contiguous(d: torch.Tensor) -> torch.Tensor:
    return d if d.stride(-1) == 1 else d.contiguous()


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (T, Hq, D), k (T, Hk, D), cos and sin (rows, R / 2): see jetrl_kernels.ops_exact. Differentiable in q and k."""
    return _Rotary.apply(q, k, cos, sin, positions)


def qk_norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of each head, then `rotary`. Differentiable in q, k and both weights (D)."""
    return _QkNormRotary.apply(q, k, q_weight, k_weight, eps, cos, sin, positions)
