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

CARRIER_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


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


def quantize_input(x: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) bfloat16 or float32 -> codes (M, K rounded up to 128) E4M3, scale (M, that / 128) float32."""
    if x.dtype not in CARRIER_DTYPES:
        raise ValueError(f"an FP8 linear takes bfloat16 or float32 activations, got {x.dtype}")
    return torch.ops.jetrl.quantize_tiles(x, scale_format)


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
    weight: torch.Tensor,
    weight_scale_format: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """dy w: dy (M, N) in tiles along N; weight (N, K), quantized here to the transpose of fprop's blocks. (M, K)."""
    w_codes, w_scale = torch.ops.jetrl.quantize_blocks_transposed(weight, weight_scale_format)
    dx = torch.ops.jetrl.gemm_nt(dy_codes, dy_scale, w_codes, w_scale, CARRIER_DTYPES[out_dtype])
    return _drop_padded_columns(dx, (weight.shape[1],))


def wgrad(
    dyt_codes: torch.Tensor,
    dyt_scale: torch.Tensor,
    x_codes: torch.Tensor,
    x_scale: torch.Tensor,
    in_features: int,
    scale_format: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """dy^T x, contracted over tokens with FP32 accumulation: (N, in_features) in out_dtype.

    dyt: dy^T (N, M) in tiles of 128 tokens. x is what fprop consumed: its saved 1x128 copy is re-quantized along tokens.
    """
    xt_codes, xt_scale = torch.ops.jetrl.requantize_tiles_transposed(x_codes, x_scale, in_features, scale_format)
    carrier = CARRIER_DTYPES.get(out_dtype, "float32")
    return torch.ops.jetrl.gemm_nt(dyt_codes, dyt_scale, xt_codes, xt_scale, carrier).to(out_dtype)


def _quantize_gradient(dy: torch.Tensor, scale_format: str, for_dgrad: bool, for_wgrad: bool):
    """(codes, scale) of dy in tiles along N, and of dy^T in tiles along tokens; None for the one that is not asked for."""
    if for_dgrad and for_wgrad:
        both = torch.ops.jetrl.quantize_tiles_both(dy, scale_format)
        return both[:2], both[2:]
    rows = torch.ops.jetrl.quantize_tiles(dy, scale_format) if for_dgrad else None
    return rows, torch.ops.jetrl.quantize_tiles_transposed(dy, scale_format) if for_wgrad else None


class _Float8LinearFunction(torch.autograd.Function):
    """fprop, dgrad and wgrad of one logical matrix. Saves x as FP8 tiles and the weight by reference.

    The weight is quantized again in backward rather than kept: under FSDP it is a view of storage that is gathered for
    each pass, and the quantizer is deterministic, so both passes see the same codes.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, fmt: LinearFormat):
        x_codes, x_scale = quantize_input(x, fmt.x.scale_format)
        quantized = quantize_weight(weight, fmt.weight.scale_format)
        ctx.save_for_backward(x_codes, x_scale, weight)
        ctx.fmt, ctx.in_features = fmt, x.shape[1]
        ctx.bias_dtype = None if bias is None else bias.dtype
        return fprop(x_codes, x_scale, quantized, bias, x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x_codes, x_scale, weight = ctx.saved_tensors
        fmt = ctx.fmt
        dx = dw = db = None
        dy = dy.contiguous()
        # from_linear accepts one scale format for all operands, so one read of dy can serve both GEMMs.
        rows, columns = _quantize_gradient(dy, fmt.dy.scale_format, *ctx.needs_input_grad[:2])
        if ctx.needs_input_grad[0]:
            dx = dgrad(*rows, weight, fmt.weight.scale_format, dy.dtype)
        if ctx.needs_input_grad[1]:
            dw = wgrad(*columns, x_codes, x_scale, ctx.in_features, fmt.wgrad_x.scale_format, weight.dtype)
        if ctx.needs_input_grad[2]:
            db = dy.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, fmt: LinearFormat) -> torch.Tensor:
    """F.linear with FP8 GEMMs and autograd. x (..., K) bfloat16 or float32, weight (N, K); returns (..., N) in x's dtype."""
    y = _Float8LinearFunction.apply(x.reshape(-1, x.shape[-1]), weight, bias, fmt)
    return y.view(*x.shape[:-1], weight.shape[0])


class Float8Linear(nn.Linear):
    """nn.Linear whose three GEMMs run in FP8. Parameters keep their names, dtypes and identity.

    The class is swapped in place (`from_linear`), so weight tying, FSDP flattening, checkpoints and weight export see the
    stock module; there is no persistent state beyond it.
    """

    format: LinearFormat

    @classmethod
    def from_linear(cls, module: nn.Linear, fmt: LinearFormat) -> "Float8Linear":
        """Turn `module` itself into a Float8Linear. `fmt` must be an FP8 format (see LinearFormat.fp8_blockwise)."""
        supported = LinearFormat.fp8_blockwise(fmt.x.scale_format) if fmt.is_fp8 else None
        if fmt != supported:
            raise ValueError(f"Float8Linear computes 1x128 by 128x128 E4M3 with one scale format, not {fmt}")
        if type(module) is not nn.Linear:
            raise ValueError(f"only a plain nn.Linear can be swapped, got {type(module).__name__}")
        module.__class__ = cls
        module.format = fmt
        return module

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return fp8_linear(input, self.weight, self.bias, self.format)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, x={self.format.x}, weight={self.format.weight}"
