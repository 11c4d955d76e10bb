"""Triton rotary embedding over q and k in one launch, with and without Qwen3's per-head RMSNorm in front of it.

A program owns a few heads of one token and takes them one after the other, so a head's bits depend on that head alone.
The norm repeats the two-pass structure of norm_triton (first pass in one dimension for the sum of squares, second pass
for the output), because Triton derives the order of a sum from the layout of the chain that feeds it.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from jetrl_kernels.constants import ceil_div
from jetrl_kernels.norm_triton import _row_layout
from jetrl_kernels.ops_exact import check_rotary
from jetrl_kernels.rounding_triton import INTERPRETED
from jetrl_kernels.weight_triton import round_to_carrier

# Heads that one program walks when there are enough tokens to fill the GPU; with few tokens one head each, for latency.
HEADS_PER_PROGRAM = 8
FEW_TOKENS = 512


@triton.jit
def _product(a, b, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr):
    """a b rounded to the carrier. A compiler may fuse a plain product into the sum after it and so skip that rounding."""
    if INTERPRETED:
        return round_to_carrier(a * b, IS_BF16, INTERPRETED)
    else:
        return round_to_carrier(libdevice.mul_rn(a, b), IS_BF16, INTERPRETED)


@triton.jit
def _rotate_head(
    x, y, weight, c, s, r, col, inside, half, size,
    NORM: tl.constexpr, REST: tl.constexpr, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One head: x, y, weight point at its first element; c, s (half) float32; r is 1 / rms where NORM."""
    x1 = tl.load(x + col, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + half + col, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        x1 = _weigh(x1, r, weight + col, inside, IS_BF16, INTERPRETED)
        x2 = _weigh(x2, r, weight + half + col, inside, IS_BF16, INTERPRETED)
    y1 = _product(x1, c, IS_BF16, INTERPRETED) - _product(x2, s, IS_BF16, INTERPRETED)
    y2 = _product(x2, c, IS_BF16, INTERPRETED) + _product(x1, s, IS_BF16, INTERPRETED)
    tl.store(y + col, round_to_carrier(y1, IS_BF16, INTERPRETED).to(y.dtype.element_ty), mask=inside)
    tl.store(y + half + col, round_to_carrier(y2, IS_BF16, INTERPRETED).to(y.dtype.element_ty), mask=inside)
    if REST:
        at = 2 * half + tl.arange(0, REST)
        rest = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
        if NORM:
            rest = _weigh(rest, r, weight + at, at < size, IS_BF16, INTERPRETED)
        tl.store(y + at, rest.to(y.dtype.element_ty), mask=at < size)


@triton.jit
def _weigh(x, r, weight, inside, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr):
    w = round_to_carrier(tl.load(weight, mask=inside, other=0.0).to(tl.float32), IS_BF16, INTERPRETED)
    return round_to_carrier(round_to_carrier(x * r, IS_BF16, INTERPRETED) * w, IS_BF16, INTERPRETED)


# Strides are specialized (nothing else varies with the batch): unless the first pass is loaded in vectors, as the norm
# kernel loads its rows, its sum has another order.
@triton.jit
def _rotary_kernel(
    q, k, q_out, k_out, q_weight, k_weight, q_rstd, k_rstd, cos, sin, positions, eps,
    q_heads, k_heads, size, half, q_token, q_head, k_token, k_head, stride_cos, stride_sin,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, REST: tl.constexpr, NORM: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, INVERSE: tl.constexpr, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    groups = tl.cdiv(q_heads, HEADS) + tl.cdiv(k_heads, HEADS)
    token = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    is_q = group < tl.cdiv(q_heads, HEADS)
    heads = tl.where(is_q, q_heads, k_heads)
    first = tl.where(is_q, group, group - tl.cdiv(q_heads, HEADS)) * HEADS
    row = token
    if HAS_POSITIONS:
        row = tl.load(positions + token).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < half
    c = tl.load(cos + row * stride_cos + col, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + row * stride_sin + col, mask=inside, other=0.0).to(tl.float32)
    if INVERSE:
        s = -s
    for i in range(HEADS):
        head = first + i
        if head < heads:
            if is_q:
                x, y, weight, rstd = q + token * q_token + head * q_head, q_out, q_weight, q_rstd
            else:
                x, y, weight, rstd = k + token * k_token + head * k_head, k_out, k_weight, k_rstd
            r = 1.0
            if NORM:
                at = tl.arange(0, CHUNK)
                h = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
                squares = tl.zeros((CHUNK,), dtype=tl.float32)
                squares += h * h
                r = tl.math.rsqrt(tl.sum(squares, axis=0) / size + eps)
                tl.store(rstd + token * heads + head, r)
            y += (token * heads + head) * size
            _rotate_head(x, y, weight, c, s, r, col, inside, half, size, NORM, REST, IS_BF16, INTERPRETED)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, copied where its heads do not all start at a multiple of 16 bytes though those of a contiguous x would."""
    if x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:2]):
        return x
    return x.contiguous() if not x.is_contiguous() else (x.clone() if x.data_ptr() % 16 else x)


def _launch(q, k, weights, eps, cos, sin, positions, inverse):
    check_rotary(q, k, cos, sin, positions)
    q, k = _aligned(q), _aligned(k)
    (tokens, q_heads, size), k_heads, half = q.shape, k.shape[1], cos.shape[1]
    norm = weights is not None
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    q_rstd = torch.empty((tokens, q_heads) if norm else 0, dtype=torch.float32, device=q.device)
    k_rstd = torch.empty((tokens, k_heads) if norm else 0, dtype=torch.float32, device=q.device)
    q_weight, k_weight = (t.contiguous() for t in weights) if norm else (q, k)
    heads = HEADS_PER_PROGRAM if tokens > FEW_TOKENS else 1
    chunk, warps = _row_layout(size)
    if tokens:
        groups = ceil_div(q_heads, heads) + ceil_div(k_heads, heads)
        rest = size - 2 * half
        _rotary_kernel[(tokens * groups,)](
            q, k, q_out, k_out, q_weight, k_weight, q_rstd, k_rstd, cos, sin, positions, eps,
            q_heads, k_heads, size, half, q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0), sin.stride(0),
            HEADS=heads, BLOCK=triton.next_power_of_2(half), CHUNK=chunk,
            REST=triton.next_power_of_2(rest) if rest else 0, NORM=norm, HAS_POSITIONS=positions is not None,
            INVERSE=inverse, IS_BF16=q.dtype == torch.bfloat16, INTERPRETED=INTERPRETED, num_warps=warps,
        )  # fmt: skip
    return q_out, k_out, q_rstd, k_rstd


def rotary(q, k, cos, sin, positions, inverse):
    """-> q', k', contiguous. See ops_exact.py."""
    return _launch(q, k, None, 0.0, cos, sin, positions, inverse)[:2]


def qk_norm_rotary(q, k, q_weight, k_weight, eps, cos, sin, positions):
    """-> q', k', 1 / rms per head of q and of k. See ops_exact.py."""
    return _launch(q, k, (q_weight, k_weight), eps, cos, sin, positions, False)
