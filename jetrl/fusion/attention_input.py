"""From the residual stream to what attention reads: norm, q, k and v in one GEMM, q/k norm, rotary. One autograd step."""

from dataclasses import dataclass

import torch

from jetrl.fusion.norm import norm_quantize
from jetrl.fusion.projection import Projection
from jetrl.fusion.trace import scope
from jetrl.wgrad import quantize_gradient

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True)
class AttentionInput:
    """The fixed part of one layer. head_norms: whether q and k are normed per head; eps: of all the norms."""

    qkv: Projection
    head_dim: int
    head_norms: bool
    eps: float
    head_eps: float

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, self.head_dim))

    def __call__(self, hidden, norm_weight, head_weights, cos, sin, weights, biases):
        """hidden (T, K); head_weights: of q_norm and k_norm, or (None, None); cos, sin (T, D / 2).

        Returns q (T, heads, D), k and v (T, KV heads, D), and hidden itself: who reads the stream after this step must
        read that, so that its gradient arrives here and is added within the norm's backward.
        """
        return _AttentionInputFunction.apply(
            self, torch.is_grad_enabled(), hidden, norm_weight, *head_weights, cos, sin, *weights, *biases
        )


class _AttentionInputFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, step, keep, hidden, norm_weight, q_norm, k_norm, cos, sin, qw, kw, vw, qb, kb, vb):
        ops, weights, biases = torch.ops.jetrl, (qw, kw, vw), (qb, kb, vb)
        with scope("input_layernorm"):
            codes, scale, kept, _, rstd = norm_quantize(hidden, None, norm_weight, step.eps, step.qkv.format, keep)
        with scope(*QKV):
            merged = step.qkv.fprop(codes, scale, weights, biases, hidden.dtype)
        q, k, v = (step.heads(part) for part in step.qkv.parts(merged))
        if step.head_norms:
            with scope("self_attn.q_norm", "self_attn.k_norm", "self_attn.rotary"):
                q_out, k_out, q_rstd, k_rstd = ops.qk_norm_rotary(q, k, q_norm, k_norm, step.head_eps, cos, sin, None)
            before = (merged, q_rstd, k_rstd)
        else:
            with scope("self_attn.rotary"):
                q_out, k_out = ops.rotary(q, k, cos, sin, None, False)
            # Attention keeps v: as a view it would keep q and k from before the rotation as well.
            v, before = v.contiguous(), ()
        if keep:
            ctx.save_for_backward(hidden, norm_weight, rstd, cos, sin, qw, kw, vw, q_norm, k_norm, *before, *kept)
            ctx.step, ctx.kept = step, len(kept)
            ctx.bias_dtypes = [None if b is None else b.dtype for b in biases]
        return q_out, k_out, v, hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, dq, dk, dv, grad_hidden):
        hidden, norm_weight, rstd, cos, sin, qw, kw, vw, q_norm, k_norm, *rest = ctx.saved_tensors
        step, kept = ctx.step, tuple(rest[len(rest) - ctx.kept :])
        dq, dk, dv = (_rows_contiguous(g) for g in (dq, dk, dv))
        q, k, q_rstd, k_rstd = dq, dk, None, None
        if step.head_norms:
            q, k, _ = (step.heads(part) for part in step.qkv.parts(rest[0]))
            q_rstd, k_rstd = rest[1:3]
        merged, dq_norm, dk_norm = torch.ops.jetrl.qk_norm_rotary_backward(
            dq, dk, dv, q, k, q_norm, k_norm, q_rstd, k_rstd, cos, sin
        )
        needs = ctx.needs_input_grad
        wants_weights = any(needs[8:11])
        rows, columns = quantize_gradient(merged, step.qkv.format, True, wants_weights)
        dx = step.qkv.dgrad(rows, (qw, kw, vw), hidden.dtype)
        dhidden, dnorm = torch.ops.jetrl.rms_norm_backward(dx, grad_hidden, hidden, norm_weight, rstd)
        dweights = step.qkv.wgrad(columns, kept, qw.dtype) if wants_weights else (None, None, None)
        head_grads = (dq_norm.to(q_norm.dtype), dk_norm.to(k_norm.dtype)) if step.head_norms else (None, None)
        biases = step.qkv.bias_gradients(merged, ctx.bias_dtypes)
        return None, None, dhidden, dnorm.to(norm_weight.dtype), *head_grads, None, None, *dweights, *biases


def _rows_contiguous(grad: torch.Tensor) -> torch.Tensor:
    return grad if grad.stride(-1) == 1 else grad.contiguous()
