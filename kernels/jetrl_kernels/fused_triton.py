"""Triton kernels of the fused backward ops (see ops_fused.py). Quantizers are those of quantize_triton, byte for byte."""

import torch
import triton
import triton.language as tl

from jetrl_kernels.constants import E4M3, TILE, ceil_div, pad_to_tile
from jetrl_kernels.ops import check_matrix, new_codes, new_column_major_scale
from jetrl_kernels.ops_fused import merged_width
from jetrl_kernels.quantize_triton import load_dequantized, load_float32, store_rows
from jetrl_kernels.rotary_triton import _product
from jetrl_kernels.rounding_triton import INTERPRETED, abs_max4, amax, encode4, scale_of
from jetrl_kernels.scale import check_scale_format
from jetrl_kernels.silu_triton import _check, _silu, silu_gradients
from jetrl_kernels.weight_triton import _blocks_kernel, round_to_carrier

# The fastest of a sweep on an H200 (benchmarks/bench_fused.py --sweep).
ROWS = 8
ROW_WARPS = 2
QUANTIZE_WARPS = 8
REQUANTIZE_WARPS = 8
WEIGHT_WARPS = 4
# Tokens and heads of one program of the rotary backward.
TOKENS = 32
HEADS = 8
HEAD_WARPS = 2


@triton.jit
def _silu_backward_kernel(
    grad, gate, up, merged, m, k, kp, stride_d, stride_g, stride_u,
    ROWS: tl.constexpr, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    tiles = kp // 128
    col = (tl.program_id(0) % tiles).to(tl.int64) * 128 + tl.arange(0, 128)
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dg, du = silu_gradients(grad, gate, up, row, col, m, k, stride_d, stride_g, stride_u, IS_BF16, INTERPRETED)
    at = merged + row[:, None] * (2 * kp) + col[None, :]
    # Zeros beyond k: what was not loaded gives zero.
    tl.store(at, dg.to(merged.dtype.element_ty), mask=(row < m)[:, None])
    tl.store(at + kp, du.to(merged.dtype.element_ty), mask=(row < m)[:, None])


@triton.jit
def _silu_gradient(
    grad,
    gate,
    up,
    row,
    col,
    m,
    k,
    stride_d,
    stride_g,
    stride_u,
    is_gate,
    IS_BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One of the two gradients: the other's registers would halve the number of programs in flight."""
    d = load_float32(grad, row, col, m, k, stride_d, 1)
    g = load_float32(gate, row, col, m, k, stride_g, 1)
    s, silu = _silu(g, IS_BF16, INTERPRETED)
    if is_gate:
        u = load_float32(up, row, col, m, k, stride_u, 1)
        x = d * u * (s * (1.0 + g * (1.0 - s)))
    else:
        x = d * silu
    return round_to_carrier(x, IS_BF16, INTERPRETED)


@triton.jit
def _silu_backward_quantize_kernel(
    grad, gate, up, codes, scale, words_t, scale_t, m, k, kp, mp, stride_d, stride_g, stride_u, stride_scale, stride_scale_t,
    POW2: tl.constexpr, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A program quantizes one 128 x 128 piece of dgate or of dup in both ways; x_i (32, 128) holds the rows 4r + i."""
    # The two programs over one piece of the inputs are neighbours: the second finds it in L2.
    is_gate = tl.program_id(0) % 2 == 0
    piece = tl.program_id(0) // 2
    tiles = kp // 128
    first = (piece % tiles).to(tl.int64) * 128
    tile_m = (piece // tiles).to(tl.int64)
    row = tile_m * 128 + 4 * tl.arange(0, 32)
    col = first + tl.arange(0, 128)
    x0 = _silu_gradient(grad, gate, up, row, col, m, k, stride_d, stride_g, stride_u, is_gate, IS_BF16, INTERPRETED)
    x1 = _silu_gradient(grad, gate, up, row + 1, col, m, k, stride_d, stride_g, stride_u, is_gate, IS_BF16, INTERPRETED)
    x2 = _silu_gradient(grad, gate, up, row + 2, col, m, k, stride_d, stride_g, stride_u, is_gate, IS_BF16, INTERPRETED)
    x3 = _silu_gradient(grad, gate, up, row + 3, col, m, k, stride_d, stride_g, stride_u, is_gate, IS_BF16, INTERPRETED)
    first = tl.where(is_gate, first, kp + first)
    tile = first // 128
    col = first + tl.arange(0, 128)
    store_rows(x0, codes, scale, row, col, tile, m, 2 * kp, stride_scale, POW2, IS_BF16, INTERPRETED)
    store_rows(x1, codes, scale, row + 1, col, tile, m, 2 * kp, stride_scale, POW2, IS_BF16, INTERPRETED)
    store_rows(x2, codes, scale, row + 2, col, tile, m, 2 * kp, stride_scale, POW2, IS_BF16, INTERPRETED)
    store_rows(x3, codes, scale, row + 3, col, tile, m, 2 * kp, stride_scale, POW2, IS_BF16, INTERPRETED)
    s = scale_of(amax(abs_max4(x0, x1, x2, x3), 0, INTERPRETED), POW2, INTERPRETED)
    word = tl.trans(encode4(x0, x1, x2, x3, s[None, :], POW2, IS_BF16, INTERPRETED))
    at = tile_m * 32 + tl.arange(0, 32)
    tl.store(words_t + col[:, None] * (mp // 4) + at[None, :], word)
    tl.store(scale_t + tile_m * stride_scale_t + col, s)


@triton.jit
def _requantize_blocks_kernel(
    codes, scale, words_t, scale_t, m, k, kp, mp, stride_sm, stride_sk, POW2: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    tiles = kp // 128
    tile_k = (tl.program_id(0) % tiles).to(tl.int64)
    tile_m = (tl.program_id(0) // tiles).to(tl.int64)
    row = tile_m * 128 + 4 * tl.arange(0, 32)
    col = tile_k * 128 + tl.arange(0, 128)
    scale += tile_k * stride_sk
    x0 = load_dequantized(codes, scale, row, col, m, k, kp, stride_sm)
    x1 = load_dequantized(codes, scale, row + 1, col, m, k, kp, stride_sm)
    x2 = load_dequantized(codes, scale, row + 2, col, m, k, kp, stride_sm)
    x3 = load_dequantized(codes, scale, row + 3, col, m, k, kp, stride_sm)
    s = scale_of(amax(amax(abs_max4(x0, x1, x2, x3), 1, INTERPRETED), 0, INTERPRETED), POW2, INTERPRETED)
    word = tl.trans(encode4(x0, x1, x2, x3, s, POW2, False, INTERPRETED))
    at = tile_m * 32 + tl.arange(0, 32)
    tl.store(words_t + col[:, None] * (mp // 4) + at[None, :], word)
    tl.store(scale_t + tile_k * (mp // 128) + tile_m, s)


@triton.jit
def _half_backward(t, x, w, r, mean, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr):
    return round_to_carrier(r[:, None] * (t * w[None, :] - x * r[:, None] * mean[:, None]), IS_BF16, INTERPRETED)


@triton.jit
def _head_kernel(
    dq, dk, dv, q, k, q_weight, k_weight, q_rstd, k_rstd, cos, sin, merged, q_partial, k_partial,
    tokens, q_heads, k_heads, size, half, width, k_start, v_start,
    dq_token, dq_head, dk_token, dk_head, dv_token, dv_head, q_token, q_head, k_token, k_head, stride_cos, stride_sin,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, IS_BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    token_block = tl.program_id(0)
    group = tl.program_id(1)
    q_groups, k_groups = tl.cdiv(q_heads, HEADS), tl.cdiv(k_heads, HEADS)
    token = token_block.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    col = tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (col < half)[None, :]
    element = merged.dtype.element_ty
    if group >= q_groups + k_groups:
        first = (group - q_groups - k_groups) * HEADS
        for i in range(HEADS):
            head = first + i
            if head < k_heads:
                at = dv + token[:, None] * dv_token + head * dv_head + col[None, :]
                to = merged + token[:, None] * width + v_start + head * size + col[None, :]
                tl.store(to, tl.load(at, mask=inside, other=0.0), mask=inside)
                tl.store(to + half, tl.load(at + half, mask=inside, other=0.0), mask=inside)
    else:
        c = tl.load(cos + token[:, None] * stride_cos + col[None, :], mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + token[:, None] * stride_sin + col[None, :], mask=inside, other=0.0).to(tl.float32)
        is_q = group < q_groups
        # Only pointers differ between the branches: integers of different specializations could not be joined.
        if is_q:
            d, x, weight, rstd, partial = dq, q, q_weight, q_rstd, q_partial
        else:
            d, x, weight, rstd, partial = dk, k, k_weight, k_rstd, k_partial
        groups = tl.where(is_q, q_groups, k_groups)
        heads = tl.where(is_q, q_heads, k_heads)
        start = tl.where(is_q, 0, k_start)
        d_token, d_head = tl.where(is_q, dq_token, dk_token), tl.where(is_q, dq_head, dk_head)
        x_token, x_head = tl.where(is_q, q_token, k_token), tl.where(is_q, q_head, k_head)
        group = tl.where(is_q, group, group - q_groups)
        first = group * HEADS
        partial += (token_block * groups + group).to(tl.int64) * size
        w1 = tl.zeros((BLOCK,), dtype=tl.float32)
        w2 = tl.zeros((BLOCK,), dtype=tl.float32)
        if NORM:
            w1 = tl.load(weight + col, mask=col < half, other=0.0).to(tl.float32)
            w2 = tl.load(weight + half + col, mask=col < half, other=0.0).to(tl.float32)
        dw1 = tl.zeros((BLOCK,), dtype=tl.float32)
        dw2 = tl.zeros((BLOCK,), dtype=tl.float32)
        for i in range(HEADS):
            head = first + i
            if head < heads:
                at = d + token[:, None] * d_token + head * d_head + col[None, :]
                y1 = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                y2 = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
                t1 = round_to_carrier(
                    _product(y1, c, IS_BF16, INTERPRETED) + _product(y2, s, IS_BF16, INTERPRETED), IS_BF16, INTERPRETED
                )
                t2 = round_to_carrier(
                    _product(y2, c, IS_BF16, INTERPRETED) - _product(y1, s, IS_BF16, INTERPRETED), IS_BF16, INTERPRETED
                )
                if NORM:
                    at = x + token[:, None] * x_token + head * x_head + col[None, :]
                    x1 = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                    x2 = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
                    r = tl.load(rstd + token * heads + head, mask=token < tokens, other=0.0)
                    n1, n2 = x1 * r[:, None], x2 * r[:, None]
                    dw1 += tl.sum(t1 * round_to_carrier(n1, IS_BF16, INTERPRETED), axis=0)
                    dw2 += tl.sum(t2 * round_to_carrier(n2, IS_BF16, INTERPRETED), axis=0)
                    mean = tl.sum(t1 * w1[None, :] * n1 + t2 * w2[None, :] * n2, axis=1) / size
                    t1 = _half_backward(t1, x1, w1, r, mean, IS_BF16, INTERPRETED)
                    t2 = _half_backward(t2, x2, w2, r, mean, IS_BF16, INTERPRETED)
                to = merged + token[:, None] * width + start + head * size + col[None, :]
                tl.store(to, t1.to(element), mask=inside)
                tl.store(to + half, t2.to(element), mask=inside)
        if NORM:
            tl.store(partial + col, dw1, mask=col < half)
            tl.store(partial + half + col, dw2, mask=col < half)


def silu_mul_backward(grad, gate, up):
    """-> merged (T, 2 Kp). See ops_fused.py."""
    _check(grad, gate, up)
    (m, k), kp = gate.shape, pad_to_tile(gate.shape[1])
    merged = gate.new_empty(m, 2 * kp)
    if m and k:
        _silu_backward_kernel[(ceil_div(m, ROWS) * (kp // TILE),)](
            grad, gate, up, merged, m, k, kp, grad.stride(0), gate.stride(0), up.stride(0),
            ROWS=ROWS, IS_BF16=gate.dtype == torch.bfloat16, INTERPRETED=INTERPRETED, num_warps=ROW_WARPS,
        )  # fmt: skip
    return merged


def silu_mul_backward_quantize(grad, gate, up, scale_format):
    """-> codes (T, 2 Kp), scale, codes^T (2 Kp, Tp), scale^T. See ops_fused.py."""
    check_scale_format(scale_format)
    _check(grad, gate, up)
    (m, k), kp, mp = gate.shape, pad_to_tile(gate.shape[1]), pad_to_tile(gate.shape[0])
    codes, scale = new_codes(m, 2 * kp, gate.device), new_column_major_scale(m, 2 * kp // TILE, gate.device)
    codes_t, scale_t = new_codes(2 * kp, mp, gate.device), new_column_major_scale(2 * kp, mp // TILE, gate.device)
    if m and k:
        _silu_backward_quantize_kernel[(2 * (mp // TILE) * (kp // TILE),)](
            grad, gate, up, codes.view(torch.uint8), scale, codes_t.view(torch.int32), scale_t, m, k, kp, mp,
            grad.stride(0), gate.stride(0), up.stride(0), scale.stride(1), scale_t.stride(1),
            POW2=scale_format == "pow2", IS_BF16=gate.dtype == torch.bfloat16, INTERPRETED=INTERPRETED,
            num_warps=QUANTIZE_WARPS,
        )  # fmt: skip
    return codes, scale, codes_t, scale_t


def quantize_blocks_stacked(weights, scale_format, transposed):
    """-> codes, scale of all weights in one buffer. See ops_fused.py."""
    check_scale_format(scale_format)
    k, device = weights[0].shape[1], weights[0].device
    kp, total = pad_to_tile(k), merged_width(*(w.shape[0] for w in weights))
    rows, columns = (kp, total) if transposed else (total, kp)
    codes = new_codes(rows, columns, device)
    scale = torch.empty(rows // TILE, columns // TILE, dtype=torch.float32, device=device)
    start = 0
    for w in weights:
        check_matrix("weight", w)
        if w.shape[1] != k:
            raise ValueError(f"weights over one input have one width, got {k} and {w.shape[1]}")
        padded = pad_to_tile(w.shape[0])
        if w.numel():
            # The kernel takes np as the row length of transposed outputs only: a part's columns lie in all parts' rows.
            plain = (codes[start:], scale[start // TILE :]) if not transposed else (codes, scale)
            turned = (codes[:, start:], scale[:, start // TILE :]) if transposed else (codes, scale)
            _blocks_kernel[((padded // TILE) * (kp // TILE),)](
                w, plain[0].view(torch.uint8), plain[1], turned[0].view(torch.int32), turned[1], w.shape[0], k, total, kp,
                *w.stride(), PLAIN=not transposed, TRANSPOSED=transposed, POW2=scale_format == "pow2",
                INTERPRETED=INTERPRETED, num_warps=WEIGHT_WARPS,
            )  # fmt: skip
        start += padded
    return codes, scale


def requantize_blocks_transposed(codes, scale, k, scale_format):
    """-> codes (Kp, Mp), scale (Kp/128, Mp/128). See ops_fused.py."""
    check_scale_format(scale_format)
    if codes.dtype != E4M3 or not codes.is_contiguous():
        raise ValueError(f"codes must be contiguous {E4M3}, got {codes.dtype} with strides {codes.stride()}")
    (m, kp), mp = codes.shape, pad_to_tile(codes.shape[0])
    codes_t = new_codes(kp, mp, codes.device)
    scale_t = torch.empty(kp // TILE, mp // TILE, dtype=torch.float32, device=codes.device)
    if codes_t.numel():
        _requantize_blocks_kernel[((kp // TILE) * (mp // TILE),)](
            codes.view(torch.uint8), scale, codes_t.view(torch.int32), scale_t, m, k, kp, mp, *scale.stride(),
            POW2=scale_format == "pow2", INTERPRETED=INTERPRETED, num_warps=REQUANTIZE_WARPS,
        )  # fmt: skip
    return codes_t, scale_t


def qk_norm_rotary_backward(dq, dk, dv, q, k, q_weight, k_weight, q_rstd, k_rstd, cos, sin):
    """-> merged (T, ...), dq_weight, dk_weight (D) float32. See ops_fused.py."""
    (tokens, q_heads, size), k_heads, norm = dq.shape, dk.shape[1], q_weight is not None
    sizes = (q_heads * size, k_heads * size, k_heads * size)
    if dv.shape != dk.shape or any(t.stride(-1) != 1 for t in (dq, dk, dv, q, k)) or 2 * cos.shape[1] != size:
        raise ValueError(
            f"qk_norm_rotary_backward takes heads that are rotated whole and contiguous, got dq {tuple(dq.shape)}, dk "
            f"{tuple(dk.shape)}, dv {tuple(dv.shape)} and cos {tuple(cos.shape)}"
        )
    check_matrix("dq", dq.flatten(1) if not tokens else dq[:, 0])
    width = merged_width(*sizes)
    merged = (dq.new_empty if width == sum(sizes) else dq.new_zeros)(tokens, width)
    blocks, groups = ceil_div(tokens, TOKENS), (ceil_div(q_heads, HEADS), ceil_div(k_heads, HEADS))
    partials = [
        torch.empty((blocks * g, size) if norm else (0, 0), dtype=torch.float32, device=dq.device) for g in groups
    ]
    if tokens:
        weights = (q_weight.contiguous(), k_weight.contiguous(), q_rstd, k_rstd) if norm else (dq, dk, dq, dk)
        k_start = pad_to_tile(sizes[0])
        _head_kernel[(blocks, groups[0] + 2 * groups[1])](
            dq, dk, dv, q, k, *weights, cos, sin, merged, *partials,
            tokens, q_heads, k_heads, size, size // 2, width, k_start, k_start + pad_to_tile(sizes[1]),
            *(s for t in (dq, dk, dv, q, k) for s in t.stride()[:2]), cos.stride(0), sin.stride(0),
            TOKENS=TOKENS, HEADS=HEADS, BLOCK=triton.next_power_of_2(size // 2), NORM=norm,
            IS_BF16=dq.dtype == torch.bfloat16, INTERPRETED=INTERPRETED, num_warps=HEAD_WARPS,
        )  # fmt: skip
    return merged, *((p.sum(0) for p in partials) if norm else (p.view(0) for p in partials))
