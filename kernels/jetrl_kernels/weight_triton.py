"""Triton weight quantizer: 128x128 blocks from bf16(master), in one orientation or both, and the transpose of codes."""

import torch
import triton
import triton.language as tl

from jetrl_kernels.constants import TILE, pad_to_tile
from jetrl_kernels.ops import check_matrix, new_codes
from jetrl_kernels.rounding_triton import INTERPRETED, encode, magnitude_bits, scale_of
from jetrl_kernels.scale import check_scale_format

WARPS = 8


@triton.jit
def _round_to_bf16(w, INTERPRETED: tl.constexpr):
    """float32 -> bfloat16 -> float32, round to nearest even. The interpreter's cast rounds ties away, so not there."""
    if INTERPRETED:
        bits = w.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        return tl.where(w == w, rounded, w)
    else:
        return w.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _blocks_kernel(
    w, codes, scale, codes_t, scale_t, n, k, np_, kp, stride_n, stride_k,
    BOTH: tl.constexpr, POW2: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    blocks_k = kp // 128
    block_k = (tl.program_id(0) % blocks_k).to(tl.int64)
    block_n = (tl.program_id(0) // blocks_k).to(tl.int64)
    row = block_n * 128 + tl.arange(0, 128)
    col = block_k * 128 + tl.arange(0, 128)
    inside = (row < n)[:, None] & (col < k)[None, :]
    value = tl.load(w + row[:, None] * stride_n + col[None, :] * stride_k, mask=inside, other=0.0).to(tl.float32)
    value = _round_to_bf16(value, INTERPRETED)
    s = scale_of(tl.max(tl.max(magnitude_bits(value), axis=1), axis=0), POW2)
    code = encode(value, s, INTERPRETED)
    tl.store(codes + row[:, None] * kp + col[None, :], code)
    tl.store(scale + block_n * blocks_k + block_k, s)
    if BOTH:
        tl.store(codes_t + col[:, None] * np_ + row[None, :], tl.trans(code))
        tl.store(scale_t + block_k * (np_ // 128) + block_n, s)


@triton.jit
def _transpose_kernel(codes, codes_t, scale, scale_t, np_, kp):
    blocks_k = kp // 128
    block_k = (tl.program_id(0) % blocks_k).to(tl.int64)
    block_n = (tl.program_id(0) // blocks_k).to(tl.int64)
    row = block_n * 128 + tl.arange(0, 128)
    col = block_k * 128 + tl.arange(0, 128)
    code = tl.load(codes + row[:, None] * kp + col[None, :])
    tl.store(codes_t + col[:, None] * np_ + row[None, :], tl.trans(code))
    tl.store(scale_t + block_k * (np_ // 128) + block_n, tl.load(scale + block_n * blocks_k + block_k))


def _quantize(weight: torch.Tensor, scale_format: str, both: bool) -> tuple[torch.Tensor, ...]:
    check_matrix("weight", weight)
    check_scale_format(scale_format)
    (n, k), np_, kp = weight.shape, pad_to_tile(weight.shape[0]), pad_to_tile(weight.shape[1])
    codes = new_codes(np_, kp, weight.device)
    scale = torch.empty(np_ // TILE, kp // TILE, dtype=torch.float32, device=weight.device)
    codes_t = new_codes(kp, np_, weight.device) if both else codes
    scale_t = torch.empty(kp // TILE, np_ // TILE, dtype=torch.float32, device=weight.device) if both else scale
    if codes.numel():
        _blocks_kernel[(scale.numel(),)](
            weight, codes.view(torch.uint8), scale, codes_t.view(torch.uint8), scale_t, n, k, np_, kp, *weight.stride(),
            BOTH=both, POW2=scale_format == "pow2", INTERPRETED=INTERPRETED, num_warps=WARPS,
        )  # fmt: skip
    return codes, scale, codes_t, scale_t


def quantize_blocks(weight: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, K) float32 or bfloat16 -> codes (Np, Kp), scale (Np/128, Kp/128), from bf16(weight)."""
    return _quantize(weight, scale_format, both=False)[:2]


def quantize_blocks_both(
    weight: torch.Tensor, scale_format: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantize_blocks` and its transpose (what dgrad contracts with), reading the master once."""
    return _quantize(weight, scale_format, both=True)


def transpose_blocks(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """codes (Np, Kp), scale (Np/128, Kp/128) -> their transposes, contiguous. Block scales survive a transpose."""
    (np_, kp), scale = codes.shape, scale.contiguous()
    codes_t = new_codes(kp, np_, codes.device)
    scale_t = torch.empty(kp // TILE, np_ // TILE, dtype=torch.float32, device=codes.device)
    if codes.numel():
        _transpose_kernel[(scale.numel(),)](
            codes.contiguous().view(torch.uint8), codes_t.view(torch.uint8), scale, scale_t, np_, kp, num_warps=WARPS
        )
    return codes_t, scale_t
