"""amax -> scale and value -> code: the one definition of jetrl's FP8 rounding, as torch code.

Every Triton quantizer repeats these steps in this order and is tested byte for byte against them.
"""

import torch

from jetrl_kernels.constants import AMAX_FLOOR, E4M3, E4M3_MAX, E4M3_NAN_CODE, SCALE_FORMATS


def check_scale_format(scale_format: str) -> None:
    if scale_format not in SCALE_FORMATS:
        raise ValueError(f"scale_format={scale_format!r} is unknown; allowed: {', '.join(SCALE_FORMATS)}")


def round_up_to_pow2(scale: torch.Tensor) -> torch.Tensor:
    """The smallest power of two >= scale, for positive finite float32 (a NaN stays NaN).

    Integer arithmetic on the bit pattern: log2 and ceil in floating point misround close to a power of two.
    """
    bits = scale.view(torch.int32)
    has_mantissa = (bits & 0x7FFFFF) != 0
    exponent = (bits >> 23) & 0xFF
    rounded = ((exponent + has_mantissa.to(torch.int32)) << 23).view(torch.float32)
    return torch.where(torch.isnan(scale), scale, rounded)


def scale_from_amax(amax: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Dequantization scale amax / 448, float32, same shape as `amax` (float32).

    The divisor is a tensor: torch on CUDA turns division by a Python scalar into a multiplication by its reciprocal,
    which is not the IEEE quotient. A tile whose amax is not finite gets scale NaN, so it can never dequantize to a number.
    """
    check_scale_format(scale_format)
    finite = torch.isfinite(amax)
    floor = torch.tensor(AMAX_FLOOR, dtype=torch.float32, device=amax.device)
    scale = torch.maximum(amax, floor) / torch.tensor(E4M3_MAX, dtype=torch.float32, device=amax.device)
    if scale_format == "pow2":
        scale = round_up_to_pow2(scale)
    return torch.where(finite, scale, torch.full_like(scale, float("nan")))


def encode(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes of `x` (float32) under `scale` (float32, broadcastable): RNE(clamp(x / scale, -448, 448)) as E4M3.

    Where the scale is NaN every code is 0x7F, whatever its sign was: a bad tile has one byte pattern.
    """
    q = (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    bad = torch.isnan(scale).expand(x.shape)
    return torch.where(bad, torch.full_like(q.view(torch.uint8), E4M3_NAN_CODE), q.view(torch.uint8)).view(E4M3)
