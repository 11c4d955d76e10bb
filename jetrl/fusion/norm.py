"""RMSNorm through jetrl.rms_norm with autograd, and norm or activation followed by a linear layer's quantizer."""

import torch
from torch import nn

from jetrl.precision.formats import LinearFormat
from jetrl.wgrad import KEEPS_FPROP_OPERAND, Kept, quantize_kept


def norm_quantize(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, fmt: LinearFormat, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, Kept, torch.Tensor, torch.Tensor]:
    """rms_norm(x + residual) quantized for fprop: codes, scale, kept for wgrad, hidden (x + residual), rstd.

    The unquantized output is written only where the format's wgrad reads it.
    """
    ops = torch.ops.jetrl
    if keep and fmt.wgrad not in KEEPS_FPROP_OPERAND:
        y, hidden, rstd = ops.rms_norm(x, residual, weight, eps)
        codes, scale, kept = quantize_kept(y, fmt, keep)
    else:
        codes, scale, hidden, rstd = ops.rms_norm_quantize(x, residual, weight, eps, fmt.x.scale_format)
        kept = (codes, scale) if keep else ()
    return codes, scale, kept, x if residual is None else hidden, rstd


def silu_mul_quantize(
    gate: torch.Tensor, up: torch.Tensor, fmt: LinearFormat, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, Kept]:
    """silu(gate) * up quantized for fprop: codes, scale, kept for wgrad."""
    ops = torch.ops.jetrl
    if keep and fmt.wgrad not in KEEPS_FPROP_OPERAND:
        return quantize_kept(ops.silu_mul(gate, up), fmt, keep)
    codes, scale = ops.silu_mul_quantize(gate, up, fmt.x.scale_format)
    return codes, scale, (codes, scale) if keep else ()


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        y, _, rstd = torch.ops.jetrl.rms_norm(x, None, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = torch.ops.jetrl.rms_norm_backward(dy.contiguous(), None, x, weight, rstd)
        return dx, dweight.to(weight.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x (..., K) bfloat16 or float32, weight (K): jetrl.rms_norm over the last dimension, differentiable."""
    return _RMSNormFunction.apply(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)


_classes: dict[type, type] = {}


def swap_norm(module: nn.Module) -> None:
    """Make a Hugging Face RMSNorm compute through `rms_norm`. Its class keeps its name, which wrap policies look for."""
    stock = type(module)
    if stock not in _classes:

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            if self.computes_stock:
                return stock.forward(self, hidden_states)
            return rms_norm(hidden_states, self.weight, self.variance_epsilon)

        members = {"forward": forward, "computes_stock": False, "__module__": stock.__module__}
        _classes[stock] = type(stock.__name__, (stock,), members)
    module.__class__ = _classes[stock]
