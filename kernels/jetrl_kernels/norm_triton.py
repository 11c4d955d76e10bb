"""Triton RMSNorm (+ residual) with and without 1x128 quantization, and its backward.

One program owns one row. It reads the row twice, the second time from L1: first in one dimension for the sum of squares,
then in tiles. Triton derives the order of a sum from the layout it picks for the whole chain of loads and stores, so a sum
fed by the loads that also feed the codes has other bits than one that feeds plain outputs (seen on an H200). Reading twice
leaves the first chain the same whatever is written, which makes a row's bits depend on the row and K alone.
"""

import torch
import triton
import triton.language as tl

from jetrl_kernels.constants import TILE, ceil_div, pad_to_tile
from jetrl_kernels.ops import check_matrix, new_codes, new_column_major_scale
from jetrl_kernels.rounding_triton import INTERPRETED, amax, encode, scale_of
from jetrl_kernels.scale import check_scale_format
from jetrl_kernels.weight_triton import round_to_bf16

# Rows whose weight gradients one program of the backward sums before a second, small sum over programs.
BACKWARD_ROWS = 32
# Rows longer than this are walked in chunks; fastest of a sweep on an H200, as the elements per thread.
LARGEST_CHUNK = 4096
ELEMENTS_PER_THREAD = 16


def _row_layout(k: int) -> tuple[int, int]:
    """(elements of one chunk of a row, a power of two; warps), from K alone."""
    chunk = min(triton.next_power_of_2(pad_to_tile(k)), LARGEST_CHUNK)
    return chunk, max(chunk // (32 * ELEMENTS_PER_THREAD), 1)


@triton.jit
def _round_like(value, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr):
    if IS_BF16:
        return round_to_bf16(value, INTERPRETED)
    else:
        return value


@triton.jit
def _load_sum(x, residual, at, inside, HAS_RESIDUAL: tl.constexpr, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr):
    h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h = _round_like(h + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32), IS_BF16, INTERPRETED)
    return h


# Not specialized on what varies with M: one binary serves every M.
@triton.jit(do_not_specialize=["stride_scale"])
def _norm_kernel(
    x, residual, weight, y, hidden, rstd, codes, scale, k, kp, stride_scale, eps,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, QUANTIZE: tl.constexpr, POW2: tl.constexpr,
    IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = row * k
    squares = tl.zeros((CHUNK,), dtype=tl.float32)
    for c in tl.static_range(CHUNKS):
        col = c * CHUNK + tl.arange(0, CHUNK)
        h = _load_sum(x, residual, start + col, col < k, HAS_RESIDUAL, IS_BF16, INTERPRETED)
        squares += h * h
    r = tl.math.rsqrt(tl.sum(squares, axis=0) / k + eps)
    tl.store(rstd + row, r)
    for c in tl.static_range(CHUNKS):
        tile = c * (CHUNK // 128) + tl.arange(0, CHUNK // 128)
        at = tile[:, None] * 128 + tl.arange(0, 128)[None, :]
        inside = at < k
        h = _load_sum(x, residual, start + at, inside, HAS_RESIDUAL, IS_BF16, INTERPRETED)
        if HAS_RESIDUAL:
            tl.store(hidden + start + at, h.to(hidden.dtype.element_ty), mask=inside)
        w = _round_like(tl.load(weight + at, mask=inside, other=0.0).to(tl.float32), IS_BF16, INTERPRETED)
        n = _round_like(_round_like(h * r, IS_BF16, INTERPRETED) * w, IS_BF16, INTERPRETED)
        if QUANTIZE:
            s = scale_of(amax(n, 1, INTERPRETED), POW2, INTERPRETED)
            padded = tile < kp // 128
            code = encode(n, s[:, None], POW2, IS_BF16, INTERPRETED)
            tl.store(codes + row * kp + at, code, mask=padded[:, None])
            tl.store(scale + tile.to(tl.int64) * stride_scale + row, s, mask=padded)
        else:
            tl.store(y + start + at, n.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward_kernel(
    grad, grad_hidden, hidden, weight, rstd, dh, dweight, m, k,
    ROWS: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr, HAS_GRAD_HIDDEN: tl.constexpr, IS_BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK)
    inside = col < k
    w = tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for i in tl.range(ROWS, num_stages=STAGES):
        row = first + i
        keep = inside & (row < m)
        d = tl.load(grad + row * k + col, mask=keep, other=0.0).to(tl.float32)
        r = tl.load(rstd + row, mask=row < m, other=0.0)
        n = tl.load(hidden + row * k + col, mask=keep, other=0.0).to(tl.float32) * r
        g = d * w
        out = r * (g - n * (tl.sum(g * n, axis=0) / k))
        if HAS_GRAD_HIDDEN:
            out += tl.load(grad_hidden + row * k + col, mask=keep, other=0.0).to(tl.float32)
        tl.store(dh + row * k + col, _round_like(out, IS_BF16, INTERPRETED).to(dh.dtype.element_ty), mask=keep)
        dw += d * _round_like(n, IS_BF16, INTERPRETED)
    tl.store(dweight + tl.program_id(0).to(tl.int64) * k + col, dw, mask=inside)


def _checked(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The same matrices with contiguous rows: strides would enter the layouts, and with them the order of the sums."""
    check_matrix("x", x)
    for other in others:
        if other is not None and (other.shape != x.shape or other.dtype != x.dtype):
            raise ValueError(
                f"rms_norm takes matrices of one shape and dtype, got {tuple(other.shape)} {other.dtype} "
                f"beside {tuple(x.shape)} {x.dtype}"
            )
    return tuple(None if t is None else _aligned(t) for t in (x, *others))


def _aligned(t: torch.Tensor) -> torch.Tensor:
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t


def _norm(x, residual, weight, eps, scale_format):
    x, residual = _checked(x, residual)
    (m, k), kp, quantize = x.shape, pad_to_tile(x.shape[1]), scale_format is not None
    chunk, warps = _row_layout(k)
    y = x.new_empty(0) if quantize else x.new_empty(m, k)
    codes = new_codes(m if quantize else 0, kp, x.device)
    scale = new_column_major_scale(m if quantize else 0, kp // TILE, x.device)
    hidden = x.new_empty(0) if residual is None else x.new_empty(m, k)
    rstd = torch.empty(m, dtype=torch.float32, device=x.device)
    if m:
        _norm_kernel[(m,)](
            x, residual, weight, y, hidden, rstd, codes.view(torch.uint8), scale, k, kp, scale.stride(1), eps,
            CHUNKS=ceil_div(k, chunk), CHUNK=chunk, HAS_RESIDUAL=residual is not None, QUANTIZE=quantize,
            POW2=scale_format == "pow2", IS_BF16=x.dtype == torch.bfloat16, INTERPRETED=INTERPRETED, num_warps=warps,
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
    grad, grad_hidden, hidden = _checked(grad, grad_hidden, hidden)
    m, k = grad.shape
    programs = ceil_div(m, BACKWARD_ROWS)
    dh = grad.new_empty(m, k)
    dweight = torch.empty(programs, k, dtype=torch.float32, device=grad.device)
    if m:
        block = triton.next_power_of_2(k)
        _norm_backward_kernel[(programs,)](
            grad, grad_hidden, hidden, weight, rstd, dh, dweight, m, k,
            ROWS=BACKWARD_ROWS, STAGES=3 if block <= LARGEST_CHUNK else 1, BLOCK=block, HAS_GRAD_HIDDEN=grad_hidden is not None,
            IS_BF16=grad.dtype == torch.bfloat16, INTERPRETED=INTERPRETED, num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    return dh, dweight.sum(0)
