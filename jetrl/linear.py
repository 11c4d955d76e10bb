"""The shared FP8 linear layer: one set of functions that the vLLM rollout and the VeRL trainer both call.

The rollout calls `quantize_weight` when weights arrive and `fprop` per step; the trainer's `Float8Linear` calls the same
two inside an autograd function that adds dgrad and wgrad. There is no branch on training or evaluation mode, on autocast
or on the caller, so a token's activations are quantized and multiplied in the same way wherever they are computed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jetrl_kernels.ops  # noqa: F401  (registers torch.ops.jetrl)
import torch
from jetrl_kernels.constants import pad_to_tile
from torch import nn

from jetrl.precision.formats import LinearFormat
from jetrl.weight_cache import CachePolicy, WeightCodes
from jetrl.wgrad import CARRIER_DTYPES, quantize_gradient, quantize_kept, weight_gradient


class QuantizedWeight(NamedTuple):
    """One or more logical weight matrices over the same input, stacked along rows.

    codes: (sum of N_i rounded up to 128, K rounded up to 128) E4M3; scale: the same shape / 128, float32. Every logical
    matrix starts at a multiple of 128 rows, so no block spans two of them. out_features: the true N_i.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    out_features: tuple[int, ...]


def quantize_weight(weight: torch.Tensor, scale_format: str) -> QuantizedWeight:
    """One logical matrix (N, K), any float dtype, quantized from bf16(weight) in 128x128 blocks."""
    codes, scale = torch.ops.jetrl.quantize_blocks(weight, scale_format)
    return QuantizedWeight(codes, scale, (weight.shape[0],))


def quantize_weight_into(weight: torch.Tensor, scale_format: str, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """`quantize_weight` of a bfloat16 or float32 matrix, written into codes and scale (contiguous, of its padded shapes)."""
    torch.ops.jetrl.quantize_blocks_into(weight, scale_format, codes, scale)


def quantize_input(x: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) bfloat16 or float32 -> codes (M, K rounded up to 128) E4M3, scale (M, that / 128) float32."""
    _check_input(x)
    return torch.ops.jetrl.quantize_tiles(x, scale_format)


def _check_input(x: torch.Tensor) -> None:
    if x.dtype not in CARRIER_DTYPES:
        raise ValueError(f"an FP8 linear takes bfloat16 or float32 activations, got {x.dtype}")


def fprop(
    x_codes: torch.Tensor,
    x_scale: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """x w^T (+ bias) from quantized operands: (M, sum of out_features) in out_dtype.

    The product is rounded to out_dtype before the bias is added, on both engines.
    """
    y = torch.ops.jetrl.gemm_nt(x_codes, x_scale, weight.codes, weight.scale, CARRIER_DTYPES[out_dtype])
    y = _drop_padded_columns(y, weight.out_features)
    return y if bias is None else y + bias.to(out_dtype)


def _drop_padded_columns(y: torch.Tensor, out_features: Sequence[int]) -> torch.Tensor:
    if all(n % 128 == 0 for n in out_features):
        return y
    pieces, start = [], 0
    for n in out_features:
        pieces.append(y[:, start : start + n])
        start += pad_to_tile(n)
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, dim=1)


def dgrad(
    dy_codes: torch.Tensor,
    dy_scale: torch.Tensor,
    codes_t: torch.Tensor,
    scale_t: torch.Tensor,
    in_features: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """dy w: dy (M, N) in tiles along N, codes_t (K, N) the transpose of fprop's blocks. (M, in_features) in out_dtype."""
    dx = torch.ops.jetrl.gemm_nt(dy_codes, dy_scale, codes_t, scale_t, CARRIER_DTYPES[out_dtype])
    return _drop_padded_columns(dx, (in_features,))


class _Float8LinearFunction(torch.autograd.Function):
    """fprop, dgrad and wgrad of one logical matrix. Saves x as its format says and the weight by reference.

    Codes of the weight come from `codes` in both passes: they are kept there or made again, and the quantizer is
    deterministic, so both passes see the same. Under FSDP the weight is a view of storage gathered for each pass.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, fmt: LinearFormat, codes: WeightCodes, keep: bool):
        _check_input(x)
        x_codes, x_scale, kept = quantize_kept(x, fmt, keep)
        ctx.save_for_backward(weight, *kept)
        ctx.fmt, ctx.codes, ctx.in_features = fmt, codes, x.shape[1]
        ctx.bias_dtype = None if bias is None else bias.dtype
        quantized = QuantizedWeight(*codes.for_fprop((weight,)), (weight.shape[0],))
        return fprop(x_codes, x_scale, quantized, bias, x.dtype)

    @staticmethod
    def backward(ctx, dy):
        weight, *kept = ctx.saved_tensors
        dx = dw = db = None
        dy = dy.contiguous()
        rows, columns = quantize_gradient(dy, ctx.fmt, *ctx.needs_input_grad[:2])
        if ctx.needs_input_grad[0]:
            dx = dgrad(*rows, *ctx.codes.for_dgrad((weight,)), ctx.in_features, dy.dtype)
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(columns, tuple(kept), ctx.in_features, ctx.fmt, weight.dtype)
        if ctx.needs_input_grad[2]:
            db = dy.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    fmt: LinearFormat,
    codes: WeightCodes | None = None,
) -> torch.Tensor:
    """F.linear with FP8 GEMMs and autograd. x (..., K) bfloat16 or float32, weight (N, K); returns (..., N) in x's dtype.

    codes: where the weight's codes are kept between passes; None makes them in each.
    """
    codes = codes or WeightCodes(fmt.weight.scale_format, CachePolicy("micro_batch"))
    y = _Float8LinearFunction.apply(x.reshape(-1, x.shape[-1]), weight, bias, fmt, codes, torch.is_grad_enabled())
    return y.view(*x.shape[:-1], weight.shape[0])


class Float8Linear(nn.Linear):
    """nn.Linear whose three GEMMs run in FP8. Parameters keep their names, dtypes and identity.

    The class is swapped in place (`from_linear`), so weight tying, FSDP flattening, checkpoints and weight export see the
    stock module; there is no persistent state beyond it.
    """

    format: LinearFormat
    codes: WeightCodes
    # Set by jetrl.fusion.stock.stock_forward.
    computes_stock = False

    @classmethod
    def from_linear(cls, module: nn.Linear, fmt: LinearFormat, policy: CachePolicy | None = None) -> "Float8Linear":
        """Turn `module` itself into a Float8Linear. `fmt` must be an FP8 format (see LinearFormat.fp8_blockwise).

        policy: when the weight's codes may be kept (default: made in each pass).
        """
        supported = LinearFormat.fp8_blockwise(fmt.x.scale_format, fmt.wgrad, fmt.wgrad_dy) if fmt.is_fp8 else None
        if fmt != supported:
            raise ValueError(f"Float8Linear computes 1x128 by 128x128 E4M3 with one scale format, not {fmt}")
        if type(module) is not nn.Linear:
            raise ValueError(f"only a plain nn.Linear can be swapped, got {type(module).__name__}")
        policy = policy or CachePolicy("micro_batch")
        policy.elements += module.weight.numel()
        module.__class__ = cls
        module.format, module.codes = fmt, WeightCodes(fmt.weight.scale_format, policy)
        return module

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.computes_stock:
            return super().forward(input)
        return fp8_linear(input, self.weight, self.bias, self.format, self.codes)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, x={self.format.x}, weight={self.format.weight}"
