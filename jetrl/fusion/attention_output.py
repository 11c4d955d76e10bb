"""From attention's output to the next residual stream: o projection, norm, gated MLP, both additions.

One autograd step, `_AttentionOutputFunction`, keeps everything and computes the whole backward. It leaves the last GEMM's
forward to a second step that keeps nothing: gradient checkpointing stops recomputing a layer once it has what the layer had
kept, and so never repeats that GEMM.
"""

from dataclasses import dataclass

import torch

from jetrl.fusion.norm import norm_quantize, silu_mul_quantize
from jetrl.fusion.projection import Projection
from jetrl.fusion.trace import scope
from jetrl.wgrad import quantize_gradient, quantize_kept


@dataclass(frozen=True)
class AttentionOutput:
    """The fixed part of one layer. eps: of the norm before the MLP."""

    o: Projection
    gate_up: Projection
    down: Projection
    eps: float

    def __call__(self, attention, hidden, o_weight, o_bias, norm_weight, gate_weight, up_weight, down_weight):
        """attention (T, heads * D), hidden (T, K): the stream before this layer. Returns the stream behind it (T, K)."""
        weights = (o_weight, o_bias, norm_weight, gate_weight, up_weight, down_weight)
        gradient, codes, scale, stream = _AttentionOutputFunction.apply(
            self, torch.is_grad_enabled(), attention, hidden, *weights
        )
        return _DownFunction.apply(self, gradient, codes, scale, stream, down_weight)


class _AttentionOutputFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, step, keep, attention, hidden, ow, ob, norm_weight, gw, uw, dw):
        dtype = hidden.dtype
        with scope("self_attn.o_proj"):
            codes, scale, kept_o = quantize_kept(attention, step.o.format, keep)
            projected = _unpadded(step.o, step.o.fprop(codes, scale, (ow,), (ob,), dtype))
        with scope("post_attention_layernorm"):
            codes, scale, kept_x, stream, rstd = norm_quantize(
                projected, hidden, norm_weight, step.eps, step.gate_up.format, keep
            )
        del projected
        with scope("mlp.gate_proj", "mlp.up_proj"):
            gate_up = step.gate_up.fprop(codes, scale, (gw, uw), (None, None), dtype)
        with scope("mlp.act_fn"):
            codes, scale, kept_a = silu_mul_quantize(*step.gate_up.parts(gate_up), step.down.format, keep)
        if keep:
            ctx.save_for_backward(stream, norm_weight, rstd, gate_up, ow, gw, uw, dw, *kept_o, *kept_x, *kept_a)
            ctx.step, ctx.kept = step, len(kept_o)
            ctx.bias_dtype = None if ob is None else ob.dtype
        ctx.mark_non_differentiable(codes, scale, stream)
        # Stands for the layer's output in the autograd graph: its gradient comes here. NaN, so that no value of it can be used.
        gradient = hidden.new_full((1, 1), float("nan")).expand(hidden.shape)
        return gradient, codes, scale, stream

    @staticmethod
    def backward(ctx, grad, *_):
        stream, norm_weight, rstd, gate_up, ow, gw, uw, dw, *rest = ctx.saved_tensors
        step, n = ctx.step, ctx.kept
        kept_o, kept_x, kept_a = (tuple(rest[i * n : (i + 1) * n]) for i in range(3))
        needs, dtype, grad = ctx.needs_input_grad, stream.dtype, grad.contiguous()
        d_ow = d_ob = d_dw = None
        d_gw = d_uw = None

        rows, columns = quantize_gradient(grad, step.down.format, True, needs[9])
        d_act = step.down.dgrad(rows, (dw,), dtype)
        if needs[9]:
            (d_dw,) = step.down.wgrad(columns, kept_a, dw.dtype)
        del rows, columns

        rows, columns = _gate_up_gradient(d_act, gate_up, step.gate_up, needs[7] or needs[8])
        del d_act
        dx = step.gate_up.dgrad(rows, (gw, uw), dtype)
        if needs[7] or needs[8]:
            d_gw, d_uw = step.gate_up.wgrad(columns, kept_x, gw.dtype)
        del rows, columns

        d_stream, d_norm = torch.ops.jetrl.rms_norm_backward(dx, grad, stream, norm_weight, rstd)
        rows, columns = quantize_gradient(d_stream, step.o.format, True, needs[4])
        d_attention = step.o.dgrad(rows, (ow,), dtype)
        if needs[4]:
            (d_ow,) = step.o.wgrad(columns, kept_o, ow.dtype)
        if ctx.bias_dtype is not None:
            d_ob = d_stream.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype)
        return None, None, d_attention, d_stream, d_ow, d_ob, d_norm.to(norm_weight.dtype), d_gw, d_uw, d_dw


class _DownFunction(torch.autograd.Function):
    """down_proj and the addition behind it. The gradient passes through to the step that can use it."""

    @staticmethod
    def forward(ctx, step, gradient, codes, scale, stream, weight):
        with scope("mlp.down_proj"):
            out = _unpadded(step.down, step.down.fprop(codes, scale, (weight,), (None,), stream.dtype))
        return out.add_(stream)

    @staticmethod
    def backward(ctx, grad):
        return None, grad, None, None, None, None


def _gate_up_gradient(d_act: torch.Tensor, gate_up: torch.Tensor, projection: Projection, for_wgrad: bool):
    """The activation's backward with both gradients quantized; dgate and dup are written only where wgrad reads them."""
    gate, up = projection.parts(gate_up)
    if projection.format.wgrad == "bf16" or not for_wgrad:
        return quantize_gradient(torch.ops.jetrl.silu_mul_backward(d_act, gate, up), projection.format, True, for_wgrad)
    four = torch.ops.jetrl.silu_mul_backward_quantize(d_act, gate, up, projection.format.dy.scale_format)
    return four[:2], four[2:]


def _unpadded(projection: Projection, y: torch.Tensor) -> torch.Tensor:
    (n,) = projection.sizes
    return y if y.shape[1] == n else y[:, :n].contiguous()
