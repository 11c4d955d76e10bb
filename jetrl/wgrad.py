"""What a linear layer keeps of its input and makes of its output gradient, for each way to compute a weight gradient.

The ways are `formats.WGRAD_KINDS`; LinearFormat.wgrad chooses. "Kept" tensors go through autograd's save_for_backward.
"""

import torch

from jetrl.precision.formats import LinearFormat

CARRIER_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
# Ways that keep what fprop reads, so that a fused kernel need not write its unquantized output.
KEEPS_FPROP_OPERAND = ("requantize", "blocks")

Kept = tuple[torch.Tensor, ...]
Operand = tuple[torch.Tensor, torch.Tensor]


def quantize_kept(x: torch.Tensor, fmt: LinearFormat, keep: bool) -> tuple[torch.Tensor, torch.Tensor, Kept]:
    """x (M, K) -> fprop's codes and scale, and what wgrad will need of x: nothing unless `keep`."""
    ops, scale_format = torch.ops.jetrl, fmt.x.scale_format
    if keep and fmt.wgrad == "copy":
        codes, scale, *copy = ops.quantize_tiles_both(x, scale_format)
        return codes, scale, tuple(copy)
    codes, scale = ops.quantize_tiles(x, scale_format)
    if not keep:
        return codes, scale, ()
    return codes, scale, (x,) if fmt.wgrad == "bf16" else (codes, scale)


def quantize_gradient(
    dy: torch.Tensor, fmt: LinearFormat, for_dgrad: bool, for_wgrad: bool
) -> tuple[Operand | None, Kept | None]:
    """dy (M, N) in tiles along N for dgrad, and as wgrad reads it; None for the one that is not asked for."""
    ops, scale_format = torch.ops.jetrl, fmt.dy.scale_format
    if fmt.wgrad == "bf16":
        rows = ops.quantize_tiles(dy, scale_format) if for_dgrad else None
        return rows, (dy,) if for_wgrad else None
    # One scale format for all operands (from_linear checks that), so one read of dy serves both GEMMs.
    if for_dgrad and for_wgrad:
        both = ops.quantize_tiles_both(dy, scale_format)
        return both[:2], both[2:]
    rows = ops.quantize_tiles(dy, scale_format) if for_dgrad else None
    return rows, ops.quantize_tiles_transposed(dy, scale_format) if for_wgrad else None


def weight_gradient(dy: Kept, kept: Kept, in_features: int, fmt: LinearFormat, out_dtype: torch.dtype) -> torch.Tensor:
    """dy^T x, contracted over tokens with FP32 accumulation: (N, in_features) in out_dtype.

    dy: the second result of `quantize_gradient`; kept: the third of `quantize_kept`.
    """
    if fmt.wgrad == "bf16":
        with torch.autocast(dy[0].device.type, enabled=False):
            return (dy[0].t() @ kept[0]).to(out_dtype)
    ops, scale_format = torch.ops.jetrl, fmt.wgrad_x.scale_format
    if fmt.wgrad == "requantize":
        kept = ops.requantize_tiles_transposed(*kept, in_features, scale_format)
    elif fmt.wgrad == "blocks":
        kept = ops.requantize_blocks_transposed(*kept, in_features, scale_format)
    carrier = CARRIER_DTYPES.get(out_dtype, "float32")
    return ops.gemm_nt(*dy, *kept, carrier, k_varies=True)[:, :in_features].to(out_dtype)
