"""Triton RMSNorm (+ residual) with and without 1x128 quantization, and its backward.

One program owns one row, and its width and warps depend on K alone, so a row's sum has the same order for any M. With and
without quantization the same code runs, so quantizing the plain norm's output gives the fused kernel's bytes.
"""

import torch
import triton
import triton.language as tl

from jetrl_kernels.constants import TILE, pad_to_tile
from jetrl_kernels.ops import check_matrix, new_codes, new_column_major_scale
from jetrl_kernels.rounding_triton import INTERPRETED, encode, magnitude_bits, scale_of
from jetrl_kernels.scale import check_scale_format
from jetrl_kernels.weight_triton import round_to_bf16

# Rows whose weight gradients one program of the backward sums before a second, small sum over programs.
BACKWARD_ROWS = 16


def _row_layout(k: int) -> tuple[int, int]:
    """Tiles of the padded row (a power of two) and warps: 16 elements per thread where a row is long enough."""
    tiles = triton.next_power_of_2(pad_to_tile(k) // TILE)
    return tiles, min(max(tiles * TILE // (32 * 16), 1), 16)


@triton.jit
def _round_like(value, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr):
    if IS_BF16:
        return round_to_bf16(value, INTERPRETED)
    else:
        return value


@triton.jit
def _norm_kernel(
    x, residual, weight, y, hidden, rstd, codes, scale, k, kp, stride_x, stride_r, stride_scale, eps,
    TILES: tl.constexpr, HAS_RESIDUAL: tl.constexpr, QUANTIZE: tl.constexpr, POW2: tl.constexpr,
    IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    col = tile[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = col < k
    h = tl.load(x + row * stride_x + col, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h += tl.load(residual + row * stride_r + col, mask=inside, other=0.0).to(tl.float32)
        h = _round_like(h, IS_BF16, INTERPRETED)
        tl.store(hidden + row * k + col, h.to(hidden.dtype.element_ty), mask=inside)
    r = tl.math.rsqrt(tl.sum(tl.sum(h * h, axis=1), axis=0) / k + eps)
    tl.store(rstd + row, r)
    w = _round_like(tl.load(weight + col, mask=inside, other=0.0).to(tl.float32), IS_BF16, INTERPRETED)
    n = _round_like(_round_like(h * r, IS_BF16, INTERPRETED) * w, IS_BF16, INTERPRETED)
    if QUANTIZE:
        s = scale_of(tl.max(magnitude_bits(n), axis=1), POW2)
        padded = tile < kp // 128
        tl.store(codes + row * kp + col, encode(n, s[:, None], INTERPRETED), mask=padded[:, None])
        tl.store(scale + tile.to(tl.int64) * stride_scale + row, s, mask=padded)
    else:
        tl.store(y + row * k + col, n.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward_kernel(
    grad, grad_hidden, hidden, weight, rstd, dh, dweight, m, k, stride_g, stride_gh, stride_h,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_GRAD_HIDDEN: tl.constexpr, IS_BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK)
    inside = col < k
    w = tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for i in range(ROWS):
        row = first + i
        keep = inside & (row < m)
        d = tl.load(grad + row * stride_g + col, mask=keep, other=0.0).to(tl.float32)
        r = tl.load(rstd + row, mask=row < m, other=0.0)
        n = tl.load(hidden + row * stride_h + col, mask=keep, other=0.0).to(tl.float32) * r
        g = d * w
        out = r * (g - n * (tl.sum(g * n, axis=0) / k))
        if HAS_GRAD_HIDDEN:
            out += tl.load(grad_hidden + row * stride_gh + col, mask=keep, other=0.0).to(tl.float32)
        tl.store(dh + row * k + col, _round_like(out, IS_BF16, INTERPRETED).to(dh.dtype.element_ty), mask=keep)
        dw += d * _round_like(n, IS_BF16, INTERPRETED)
    tl.store(dweight + tl.program_id(0).to(tl.int64) * k + col, dw, mask=inside)


def _check(x: torch.Tensor, *others: torch.Tensor | None) -> None:
    check_matrix("x", x)
    for other in (x, *others):
        if other is not None and (other.shape != x.shape or other.dtype != x.dtype or other.stride(1) != 1):
            raise ValueError(
                f"rms_norm takes matrices of one shape and dtype with contiguous rows, got {tuple(other.shape)} "
                f"{other.dtype} with strides {other.stride()} beside {tuple(x.shape)} {x.dtype}"
            )


def _norm(x, residual, weight, eps, scale_format):
    _check(x, residual)
    (m, k), kp, quantize = x.shape, pad_to_tile(x.shape[1]), scale_format is not None
    tiles, warps = _row_layout(k)
    y = x.new_empty(0) if quantize else x.new_empty(m, k)
    codes = new_codes(m if quantize else 0, kp, x.device)
    scale = new_column_major_scale(m if quantize else 0, kp // TILE, x.device)
    hidden = x.new_empty(0) if residual is None else x.new_empty(m, k)
    rstd = torch.empty(m, dtype=torch.float32, device=x.device)
    if m:
        _norm_kernel[(m,)](
            x, residual, weight, y, hidden, rstd, codes.view(torch.uint8), scale, k, kp, x.stride(0),
            0 if residual is None else residual.stride(0), scale.stride(1), eps,
            TILES=tiles, HAS_RESIDUAL=residual is not None, QUANTIZE=quantize, POW2=scale_format == "pow2",
            IS_BF16=x.dtype == torch.bfloat16, INTERPRETED=INTERPRETED, num_warps=warps,
        )  # fmt: skip
    return y, codes, scale, hidden, rstd


def rms_norm(x, residual, weight, eps):
    """-> y (M, K), hidden (M, K) or empty without residual, rstd (M) float32. See ops.py."""
    y, _, _, hidden, rstd = _norm(x, residual, weight, eps, None)
    return y, hidden, rstd


def rms_norm_quantize(x, residual, weight, eps, scale_format):
    """-> codes (M, Kp), scale (M, Kp/128), hidden (M, K) or empty without residual, rstd (M) float32. See ops.py."""
    check_scale_format(scale_format)
    _, codes, scale, hidden, rstd = _norm(x, residual, weight, eps, scale_format)
    return codes, scale, hidden, rstd


def rms_norm_backward(grad, grad_hidden, hidden, weight, rstd):
    """-> dh (M, K) in grad's dtype, dweight (K) float32. See ops.py."""
    _check(grad, grad_hidden, hidden)
    m, k = grad.shape
    programs = -(-m // BACKWARD_ROWS)
    dh = grad.new_empty(m, k)
    dweight = torch.empty(programs, k, dtype=torch.float32, device=grad.device)
    if m:
        _norm_backward_kernel[(programs,)](
            grad, grad_hidden, hidden, weight, rstd, dh, dweight, m, k, grad.stride(0),
            0 if grad_hidden is None else grad_hidden.stride(0), hidden.stride(0),
            ROWS=BACKWARD_ROWS, BLOCK=triton.next_power_of_2(k), HAS_GRAD_HIDDEN=grad_hidden is not None,
            IS_BF16=grad.dtype == torch.bfloat16, INTERPRETED=INTERPRETED, num_warps=_row_layout(k)[1],
        )  # fmt: skip
    return dh, dweight.sum(0)
