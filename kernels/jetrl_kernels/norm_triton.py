"""Triton RMSNorm (+ residual) with and without 1x128 quantization, and its backward.

One program owns one row. It reads the row twice, the second time from L1: first in one dimension for the sum of squares,
then in tiles. Triton derives the order of a sum from the layout it picks for the whole chain of loads and stores, so a sum
fed by the loads that also feed the codes has other bits than one that feeds plain outputs (seen on an H200). Reading twice
leaves the first chain the same whatever is written, which makes a row's bits depend on the row and K alone.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from jetrl_kernels.constants import TILE, ceil_div, pad_to_tile
from jetrl_kernels.ops import check_matrix, new_codes, new_column_major_scale
from jetrl_kernels.rounding_triton import INTERPRETED, amax, encode, scale_of
from jetrl_kernels.scale import check_scale_format
from jetrl_kernels.weight_triton import round_to_carrier

# Programs that the backward needs to fill a GPU; one sums the weight gradients of its rows before a sum over programs.
BACKWARD_PROGRAMS = 128
# Bytes of shared memory that the reductions of the backward use beside the prefetched rows, rounded up.
REDUCTION_BYTES = 20 << 10
# Rows longer than this are walked in chunks; fastest of a sweep on an H200, as the elements per thread.
LARGEST_CHUNK = 4096
ELEMENTS_PER_THREAD = 16
# Rows that a program of the forward walks.
FORWARD_ROWS = 1


def _row_layout(k: int) -> tuple[int, int]:
    """(elements of one chunk of a row, a power of two; warps), from K alone."""
    chunk = min(triton.next_power_of_2(pad_to_tile(k)), LARGEST_CHUNK)
    return chunk, max(chunk // (32 * ELEMENTS_PER_THREAD), 1)


class BackwardCut(NamedTuple):
    """How the backward is cut: rows of a program, elements of a chunk of a row, warps, rows that are on their way."""

    rows: int
    chunk: int
    warps: int
    stages: int


def _backward_cut(grad: torch.Tensor, with_grad_hidden: bool) -> BackwardCut:
    """The fastest of a sweep on an H200 at 8192 rows of 4096 and 12288; no prefetching where shared memory cannot hold it."""
    m, k = grad.shape
    block = triton.next_power_of_2(pad_to_tile(k))
    chunk = min(block, max(LARGEST_CHUNK, block // 4))
    rows = min(32, max(8, triton.next_power_of_2(m) // BACKWARD_PROGRAMS))
    # Three rows each of grad and hidden, two of grad_hidden.
    prefetched = ceil_div(k, chunk) * chunk * grad.element_size() * (6 + 2 * with_grad_hidden)
    available = torch.cuda.get_device_properties(grad.device).shared_memory_per_block_optin if grad.is_cuda else 0
    stages = 3 if prefetched + REDUCTION_BYTES <= available else 1
    return BackwardCut(rows, chunk, warps=min(max(chunk // 256, 1), 16), stages=stages)


@triton.jit
def _load_sum(x, residual, at, inside, HAS_RESIDUAL: tl.constexpr, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr):
    h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h = round_to_carrier(h + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32), IS_BF16, INTERPRETED)
    return h


# Not specialized on what varies with M: one binary serves every M.
@triton.jit(do_not_specialize=["m", "stride_scale"])
def _norm_kernel(
    x, residual, weight, y, hidden, rstd, codes, scale, m, k, kp, stride_scale, eps,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, QUANTIZE: tl.constexpr,
    POW2: tl.constexpr, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    if ROWS > 1 and CHUNKS == 1:
        # What all rows share, and the next row on its way while this one is worked on.
        at0 = tl.arange(0, CHUNK // 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
        kept_weight = tl.load(weight + at0, mask=at0 < k, other=0.0)
        col0 = tl.arange(0, CHUNK)
        ahead = tl.load(x + tl.program_id(0).to(tl.int64) * ROWS * k + col0, mask=col0 < k, other=0.0)
    for i in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + i
        real = row < m if ROWS > 1 else True
        start = row * k
        squares = tl.zeros((CHUNK,), dtype=tl.float32)
        for c in tl.static_range(CHUNKS):
            col = c * CHUNK + tl.arange(0, CHUNK)
            inside = col < k if ROWS == 1 else (col < k) & real
            if ROWS > 1 and CHUNKS == 1:
                h = ahead.to(tl.float32)
                if HAS_RESIDUAL:
                    other = tl.load(residual + start + col, mask=inside, other=0.0).to(tl.float32)
                    h = round_to_carrier(h + other, IS_BF16, INTERPRETED)
                ahead = tl.load(x + start + k + col, mask=(col < k) & (row + 1 < m) & (i + 1 < ROWS), other=0.0)
            else:
                h = _load_sum(x, residual, start + col, inside, HAS_RESIDUAL, IS_BF16, INTERPRETED)
            squares += h * h
        r = tl.math.rsqrt(tl.sum(squares, axis=0) / k + eps)
        tl.store(rstd + row, r, mask=real)
        for c in tl.static_range(CHUNKS):
            tile = c * (CHUNK // 128) + tl.arange(0, CHUNK // 128)
            at = tile[:, None] * 128 + tl.arange(0, 128)[None, :]
            within = at < k
            inside = within if ROWS == 1 else within & real
            h = _load_sum(x, residual, start + at, inside, HAS_RESIDUAL, IS_BF16, INTERPRETED)
            if HAS_RESIDUAL:
                tl.store(hidden + start + at, h.to(hidden.dtype.element_ty), mask=inside)
            if ROWS > 1 and CHUNKS == 1:
                w = round_to_carrier(kept_weight.to(tl.float32), IS_BF16, INTERPRETED)
            else:
                w = round_to_carrier(tl.load(weight + at, mask=within, other=0.0).to(tl.float32), IS_BF16, INTERPRETED)
            n = round_to_carrier(round_to_carrier(h * r, IS_BF16, INTERPRETED) * w, IS_BF16, INTERPRETED)
            if QUANTIZE:
                s = scale_of(amax(n, 1, INTERPRETED), POW2, INTERPRETED)
                padded = tile < kp // 128 if ROWS == 1 else (tile < kp // 128) & real
                code = encode(n, s[:, None], POW2, IS_BF16, INTERPRETED)
                tl.store(codes + row * kp + at, code, mask=padded[:, None])
                tl.store(scale + tile.to(tl.int64) * stride_scale + row, s, mask=padded)
            else:
                tl.store(y + start + at, n.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _pack(value, like, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 -> the type `like` points to. Two at a time where that is bfloat16: Triton's own cast takes the slow path here."""
    if IS_BF16 and not INTERPRETED:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [value], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return round_to_carrier(value, IS_BF16, INTERPRETED).to(like.dtype.element_ty)


@triton.jit
def _weighted_dot(d, h, w):
    return (d.to(tl.float32) * w.to(tl.float32)) * h.to(tl.float32)


@triton.jit
def _finish_chunk(
    d, h, w, r, rc, grad_hidden, dh, at, keep, HAS_GRAD_HIDDEN: tl.constexpr, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr
):  # fmt: skip
    """Write dh of one chunk of a row; return what it adds to dweight."""
    d, n = d.to(tl.float32), h.to(tl.float32) * r
    out = r * (d * w.to(tl.float32)) - n * rc
    if HAS_GRAD_HIDDEN:
        out += tl.load(grad_hidden + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(dh + at, _pack(out, dh, IS_BF16, INTERPRETED), mask=keep)
    return d * _pack(n, dh, IS_BF16, INTERPRETED).to(tl.float32)


@triton.jit
def _norm_backward_kernel(
    grad, grad_hidden, hidden, weight, rstd, dh, dweight, m, k,
    ROWS: tl.constexpr, STAGES: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, KEEP_WEIGHT: tl.constexpr,
    HAS_GRAD_HIDDEN: tl.constexpr, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One program walks ROWS rows, the next ones already on their way; a row lies in at most four chunks.

    The chunks are written out: a single block of the next power of two would leave up to half of the threads idle.
    """
    c0 = tl.arange(0, CHUNK)
    c1, c2, c3 = CHUNK + c0, 2 * CHUNK + c0, 3 * CHUNK + c0
    k0, k1, k2, k3 = c0 < k, c1 < k, c2 < k, c3 < k
    dw0 = tl.zeros((CHUNK,), dtype=tl.float32)
    dw1, dw2, dw3 = dw0, dw0, dw0
    if KEEP_WEIGHT:
        w0 = tl.load(weight + c0, mask=k0, other=0.0)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for i in tl.range(ROWS, num_stages=STAGES):
        row = first + i
        real, at = row < m, row * k
        r = tl.load(rstd + row, mask=real, other=0.0)
        d0 = tl.load(grad + at + c0, mask=real & k0, other=0.0)
        h0 = tl.load(hidden + at + c0, mask=real & k0, other=0.0)
        if CHUNKS > 1:
            d1 = tl.load(grad + at + c1, mask=real & k1, other=0.0)
            h1 = tl.load(hidden + at + c1, mask=real & k1, other=0.0)
        if CHUNKS > 2:
            d2 = tl.load(grad + at + c2, mask=real & k2, other=0.0)
            h2 = tl.load(hidden + at + c2, mask=real & k2, other=0.0)
        if CHUNKS > 3:
            d3 = tl.load(grad + at + c3, mask=real & k3, other=0.0)
            h3 = tl.load(hidden + at + c3, mask=real & k3, other=0.0)
        if not KEEP_WEIGHT:
            w0 = tl.load(weight + c0, mask=k0, other=0.0)
        if CHUNKS > 1:
            w1 = tl.load(weight + c1, mask=k1, other=0.0)
        if CHUNKS > 2:
            w2 = tl.load(weight + c2, mask=k2, other=0.0)
        if CHUNKS > 3:
            w3 = tl.load(weight + c3, mask=k3, other=0.0)
        dot = _weighted_dot(d0, h0, w0)
        if CHUNKS > 1:
            dot += _weighted_dot(d1, h1, w1)
        if CHUNKS > 2:
            dot += _weighted_dot(d2, h2, w2)
        if CHUNKS > 3:
            dot += _weighted_dot(d3, h3, w3)
        rc = r * r * (tl.sum(dot, axis=0) / k)
        dw0 += _finish_chunk(
            d0, h0, w0, r, rc, grad_hidden, dh, at + c0, real & k0, HAS_GRAD_HIDDEN, IS_BF16, INTERPRETED
        )
        if CHUNKS > 1:
            dw1 += _finish_chunk(
                d1, h1, w1, r, rc, grad_hidden, dh, at + c1, real & k1, HAS_GRAD_HIDDEN, IS_BF16, INTERPRETED
            )
        if CHUNKS > 2:
            dw2 += _finish_chunk(
                d2, h2, w2, r, rc, grad_hidden, dh, at + c2, real & k2, HAS_GRAD_HIDDEN, IS_BF16, INTERPRETED
            )
        if CHUNKS > 3:
            dw3 += _finish_chunk(
                d3, h3, w3, r, rc, grad_hidden, dh, at + c3, real & k3, HAS_GRAD_HIDDEN, IS_BF16, INTERPRETED
            )
    out = dweight + tl.program_id(0).to(tl.int64) * k
    tl.store(out + c0, dw0, mask=k0)
    if CHUNKS > 1:
        tl.store(out + c1, dw1, mask=k1)
    if CHUNKS > 2:
        tl.store(out + c2, dw2, mask=k2)
    if CHUNKS > 3:
        tl.store(out + c3, dw3, mask=k3)


@triton.jit
def _sum_rows_kernel(parts, out, rows, k, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for i in range(0, rows, ROWS):
        row = (i + tl.arange(0, ROWS))[:, None]
        total += tl.load(parts + row * k + col[None, :], mask=(row < rows) & (col < k)[None, :], other=0.0)
    tl.store(out + col, tl.sum(total, axis=0), mask=col < k)


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
        _norm_kernel[(ceil_div(m, FORWARD_ROWS),)](
            x, residual, weight, y, hidden, rstd, codes.view(torch.uint8), scale, m, k, kp, scale.stride(1), eps,
            ROWS=FORWARD_ROWS, CHUNKS=ceil_div(k, chunk), CHUNK=chunk, HAS_RESIDUAL=residual is not None, QUANTIZE=quantize,
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
    cut = _backward_cut(grad, grad_hidden is not None)
    programs = ceil_div(m, cut.rows)
    dh = grad.new_empty(m, k)
    if not m:
        return dh, torch.zeros(k, dtype=torch.float32, device=grad.device)
    dweight = torch.empty(k, dtype=torch.float32, device=grad.device)
    parts = torch.empty(programs, k, dtype=torch.float32, device=grad.device)
    _norm_backward_kernel[(programs,)](
        grad, grad_hidden, hidden, weight, rstd, dh, parts, m, k,
        ROWS=cut.rows, STAGES=cut.stages, CHUNKS=ceil_div(k, cut.chunk), CHUNK=cut.chunk, KEEP_WEIGHT=k <= cut.chunk,
        HAS_GRAD_HIDDEN=grad_hidden is not None, IS_BF16=grad.dtype == torch.bfloat16, INTERPRETED=INTERPRETED,
        num_warps=cut.warps,
    )  # fmt: skip
    _sum_rows_kernel[(ceil_div(k, 32),)](parts, dweight, programs, k, ROWS=64, BLOCK=32, num_warps=4)
    return dh, dweight
