"""Triton weight quantizer: 128x128 blocks from bf16(master), in one orientation or both, and the transpose of codes."""

import torch
import triton
import triton.language as tl

from jetrl_kernels.constants import TILE, pad_to_tile
from jetrl_kernels.ops import check_block_outputs, check_matrix, new_codes
from jetrl_kernels.quantize_triton import load_float32
from jetrl_kernels.rounding_triton import INTERPRETED, abs_max4, amax, encode, encode4, scale_of
from jetrl_kernels.scale import check_scale_format

# The fastest of a sweep on an H200.
WARPS = 4


@triton.jit
def round_to_bf16(w, INTERPRETED: tl.constexpr):
    """float32 -> bfloat16 -> float32, round to nearest even. The interpreter's cast rounds ties away, so not there."""
    if INTERPRETED:
        bits = w.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        return tl.where(w == w, rounded, w)
    else:
        return w.to(tl.bfloat16).to(tl.float32)


@triton.jit
def round_to_carrier(value, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 value, rounded to bfloat16 where that is the carrier."""
    if IS_BF16:
        return round_to_bf16(value, INTERPRETED)
    else:
        return value


@triton.jit
def _load_rounded(w, row, col, n, k, stride_n, stride_k, INTERPRETED: tl.constexpr):
    return round_to_bf16(load_float32(w, row, col, n, k, stride_n, stride_k), INTERPRETED)


@triton.jit
def _store_plain(w0, w1, w2, w3, s, at, kp, POW2: tl.constexpr, INTERPRETED: tl.constexpr):
    tl.store(at, encode(w0, s, POW2, True, INTERPRETED))
    tl.store(at + kp, encode(w1, s, POW2, True, INTERPRETED))
    tl.store(at + 2 * kp, encode(w2, s, POW2, True, INTERPRETED))
    tl.store(at + 3 * kp, encode(w3, s, POW2, True, INTERPRETED))


@triton.jit
def _blocks_kernel(
    w, codes, scale, words_t, scale_t, n, k, np_, kp, stride_n, stride_k,
    PLAIN: tl.constexpr, TRANSPOSED: tl.constexpr, POW2: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    blocks_k = kp // 128
    block_k = (tl.program_id(0) % blocks_k).to(tl.int64)
    block_n = (tl.program_id(0) // blocks_k).to(tl.int64)
    row = block_n * 128 + 4 * tl.arange(0, 32)
    col = block_k * 128 + tl.arange(0, 128)
    w0 = _load_rounded(w, row, col, n, k, stride_n, stride_k, INTERPRETED)
    w1 = _load_rounded(w, row + 1, col, n, k, stride_n, stride_k, INTERPRETED)
    w2 = _load_rounded(w, row + 2, col, n, k, stride_n, stride_k, INTERPRETED)
    w3 = _load_rounded(w, row + 3, col, n, k, stride_n, stride_k, INTERPRETED)
    s = scale_of(amax(amax(abs_max4(w0, w1, w2, w3), 1, INTERPRETED), 0, INTERPRETED), POW2, INTERPRETED)
    if PLAIN:
        _store_plain(w0, w1, w2, w3, s, codes + row[:, None] * kp + col[None, :], kp, POW2, INTERPRETED)
        tl.store(scale + block_n * blocks_k + block_k, s)
    if TRANSPOSED:
        word = tl.trans(encode4(w0, w1, w2, w3, s, POW2, True, INTERPRETED))
        group = block_n * 32 + tl.arange(0, 32)
        tl.store(words_t + col[:, None] * (np_ // 4) + group[None, :], word)
        tl.store(scale_t + block_k * (np_ // 128) + block_n, s)


@triton.jit
def _gather_bytes(p0, p1, p2, p3, SHIFT: tl.constexpr):
    """Byte SHIFT / 8 of four words, as one word."""
    b0, b1 = (p0 >> SHIFT) & 0xFF, (p1 >> SHIFT) & 0xFF
    b2, b3 = (p2 >> SHIFT) & 0xFF, (p3 >> SHIFT) & 0xFF
    return b0 | (b1 << 8) | (b2 << 16) | (b3 << 24)


@triton.jit
def _transpose_kernel(words, words_t, scale, scale_t, np_, kp):
    """Four columns are one word on the way in, four rows one word on the way out."""
    blocks_k = kp // 128
    block_k = (tl.program_id(0) % blocks_k).to(tl.int64)
    block_n = (tl.program_id(0) // blocks_k).to(tl.int64)
    row = block_n * 128 + 4 * tl.arange(0, 32)
    col = block_k * 32 + tl.arange(0, 32)
    at = words + row[:, None] * (kp // 4) + col[None, :]
    p0, p1 = tl.load(at), tl.load(at + kp // 4)
    p2, p3 = tl.load(at + 2 * (kp // 4)), tl.load(at + 3 * (kp // 4))
    group = block_n * 32 + tl.arange(0, 32)
    out = words_t + (4 * col)[:, None] * (np_ // 4) + group[None, :]
    tl.store(out, tl.trans(_gather_bytes(p0, p1, p2, p3, 0)))
    tl.store(out + np_ // 4, tl.trans(_gather_bytes(p0, p1, p2, p3, 8)))
    tl.store(out + 2 * (np_ // 4), tl.trans(_gather_bytes(p0, p1, p2, p3, 16)))
    tl.store(out + 3 * (np_ // 4), tl.trans(_gather_bytes(p0, p1, p2, p3, 24)))
    tl.store(scale_t + block_k * (np_ // 128) + block_n, tl.load(scale + block_n * blocks_k + block_k))


def _new(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.empty(rows // TILE, columns // TILE, dtype=torch.float32, device=device)
    return new_codes(rows, columns, device), scale


def _launch(weight, scale_format, codes, scale, codes_t, scale_t, plain: bool, transposed: bool) -> None:
    """What is not asked for is not written: its tensors only stand in for pointers."""
    (n, k), np_, kp = weight.shape, pad_to_tile(weight.shape[0]), pad_to_tile(weight.shape[1])
    if n and k:
        # A weight sync calls this hundreds of times and waits for the host, so no view that is not read.
        codes = codes.view(torch.uint8)
        _blocks_kernel[((np_ // TILE) * (kp // TILE),)](
            weight, codes, scale, codes_t.view(torch.int32) if transposed else codes, scale_t, n, k, np_, kp,
            *weight.stride(), PLAIN=plain, TRANSPOSED=transposed, POW2=scale_format == "pow2",
            INTERPRETED=INTERPRETED, num_warps=WARPS,
        )  # fmt: skip


def _check(weight: torch.Tensor, scale_format: str) -> tuple[int, int]:
    """The padded shape."""
    check_matrix("weight", weight)
    check_scale_format(scale_format)
    return pad_to_tile(weight.shape[0]), pad_to_tile(weight.shape[1])


def quantize_blocks(weight: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, K) float32 or bfloat16 -> codes (Np, Kp), scale (Np/128, Kp/128), from bf16(weight)."""
    codes, scale = _new(*_check(weight, scale_format), weight.device)
    _launch(weight, scale_format, codes, scale, codes, scale, plain=True, transposed=False)
    return codes, scale


def quantize_blocks_into(weight: torch.Tensor, scale_format: str, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """`quantize_blocks`, written into storage that is there."""
    _check(weight, scale_format)
    check_block_outputs(weight, codes, scale)
    _launch(weight, scale_format, codes, scale, codes, scale, plain=True, transposed=False)


def quantize_blocks_transposed(weight: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The transpose of `quantize_blocks` (what dgrad contracts with): codes (Kp, Np), scale (Kp/128, Np/128)."""
    codes_t, scale_t = _new(*reversed(_check(weight, scale_format)), weight.device)
    _launch(weight, scale_format, codes_t, scale_t, codes_t, scale_t, plain=False, transposed=True)
    return codes_t, scale_t


def quantize_blocks_both(
    weight: torch.Tensor, scale_format: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantize_blocks` and `quantize_blocks_transposed`, reading the master once."""
    padded = _check(weight, scale_format)
    both = (*_new(*padded, weight.device), *_new(*reversed(padded), weight.device))
    _launch(weight, scale_format, *both, plain=True, transposed=True)
    return both


def transpose_blocks(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """codes (Np, Kp), scale (Np/128, Kp/128) -> their transposes, contiguous. Block scales survive a transpose."""
    (np_, kp), scale = codes.shape, scale.contiguous()
    codes_t = new_codes(kp, np_, codes.device)
    scale_t = torch.empty(kp // TILE, np_ // TILE, dtype=torch.float32, device=codes.device)
    if codes.numel():
        _transpose_kernel[(scale.numel(),)](
            codes.contiguous().view(torch.int32), codes_t.view(torch.int32), scale, scale_t, np_, kp, num_warps=WARPS
        )
    return codes_t, scale_t
