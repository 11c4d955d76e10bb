"""Triton SiLU-mul with 1x128 quantization of its output, and its backward with quantization of its two gradients."""

import torch
import triton
import triton.language as tl

from jetrl_kernels.constants import TILE, ceil_div, pad_to_tile
from jetrl_kernels.ops import check_matrix, new_codes, new_column_major_scale
from jetrl_kernels.quantize_triton import load_float32, store_rows
from jetrl_kernels.rounding_triton import INTERPRETED
from jetrl_kernels.scale import check_scale_format
from jetrl_kernels.weight_triton import round_to_carrier

# The fastest of a sweep on an H200.
ROWS = 8
WARPS = 2


@triton.jit
def _silu(g, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr):
    """(sigmoid, silu rounded to the input's dtype). One formula, so forward and backward see the same silu."""
    s = 1.0 / (1.0 + tl.exp(-g))
    return s, round_to_carrier(g * s, IS_BF16, INTERPRETED)


@triton.jit
def _forward_kernel(
    gate, up, codes, scale, y, m, k, kp, stride_g, stride_u, stride_scale,
    ROWS: tl.constexpr, QUANTIZE: tl.constexpr, POW2: tl.constexpr, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    tiles = kp // 128
    tile = (tl.program_id(0) % tiles).to(tl.int64)
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tile * 128 + tl.arange(0, 128)
    u = load_float32(up, row, col, m, k, stride_u, 1)
    _, silu = _silu(load_float32(gate, row, col, m, k, stride_g, 1), IS_BF16, INTERPRETED)
    value = round_to_carrier(silu * u, IS_BF16, INTERPRETED)
    if QUANTIZE:
        store_rows(value, codes, scale, row, col, tile, m, kp, stride_scale, POW2, IS_BF16, INTERPRETED)
    else:
        inside = (row < m)[:, None] & (col < k)[None, :]
        tl.store(y + row[:, None] * k + col[None, :], value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def silu_gradients(
    grad, gate, up, row, col, m, k, stride_d, stride_g, stride_u, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr
):
    d = load_float32(grad, row, col, m, k, stride_d, 1)
    g = load_float32(gate, row, col, m, k, stride_g, 1)
    u = load_float32(up, row, col, m, k, stride_u, 1)
    s, silu = _silu(g, IS_BF16, INTERPRETED)
    dg = d * u * (s * (1.0 + g * (1.0 - s)))
    return round_to_carrier(dg, IS_BF16, INTERPRETED), round_to_carrier(d * silu, IS_BF16, INTERPRETED)


@triton.jit
def _backward_kernel(
    grad, gate, up, dgate, dup, gate_codes, gate_scale, up_codes, up_scale, m, k, kp,
    stride_d, stride_g, stride_u, stride_scale,
    ROWS: tl.constexpr, POW2: tl.constexpr, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    tiles = kp // 128
    tile = (tl.program_id(0) % tiles).to(tl.int64)
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tile * 128 + tl.arange(0, 128)
    inside = (row < m)[:, None] & (col < k)[None, :]
    dg, du = silu_gradients(grad, gate, up, row, col, m, k, stride_d, stride_g, stride_u, IS_BF16, INTERPRETED)
    at = row[:, None] * k + col[None, :]
    tl.store(dgate + at, dg.to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + at, du.to(dup.dtype.element_ty), mask=inside)
    store_rows(dg, gate_codes, gate_scale, row, col, tile, m, kp, stride_scale, POW2, IS_BF16, INTERPRETED)
    store_rows(du, up_codes, up_scale, row, col, tile, m, kp, stride_scale, POW2, IS_BF16, INTERPRETED)


def _check(gate: torch.Tensor, *others: torch.Tensor) -> None:
    check_matrix("gate", gate)
    for other in (gate, *others):
        if other.shape != gate.shape or other.dtype != gate.dtype or other.stride(1) != 1:
            raise ValueError(
                f"silu_mul takes matrices of one shape and dtype with contiguous rows, got {tuple(other.shape)} "
                f"{other.dtype} with strides {other.stride()} beside {tuple(gate.shape)} {gate.dtype}"
            )


def _forward(gate, up, scale_format):
    _check(gate, up)
    (m, k), kp, quantize = gate.shape, pad_to_tile(gate.shape[1]), scale_format is not None
    codes = new_codes(m if quantize else 0, kp, gate.device)
    scale = new_column_major_scale(m if quantize else 0, kp // TILE, gate.device)
    y = gate.new_empty(0) if quantize else gate.new_empty(m, k)
    if m and k:
        _forward_kernel[(ceil_div(m, ROWS) * (kp // TILE),)](
            gate, up, codes.view(torch.uint8), scale, y, m, k, kp, gate.stride(0), up.stride(0), scale.stride(1),
            ROWS=ROWS, QUANTIZE=quantize, POW2=scale_format == "pow2", IS_BF16=gate.dtype == torch.bfloat16,
            INTERPRETED=INTERPRETED, num_warps=WARPS,
        )  # fmt: skip
    return codes, scale, y


def silu_mul(gate, up):
    """-> silu(gate) * up (M, K). See ops.py."""
    return _forward(gate, up, None)[2]


def silu_mul_quantize(gate, up, scale_format):
    """-> codes (M, Kp), scale (M, Kp/128) of silu(gate) * up. See ops.py."""
    check_scale_format(scale_format)
    return _forward(gate, up, scale_format)[:2]


def silu_mul_quantize_backward(grad, gate, up, scale_format):
    """-> dgate, dup (M, K) and their codes and scales: dgate codes, dgate scale, dup codes, dup scale. See ops.py."""
    check_scale_format(scale_format)
    _check(grad, gate, up)
    (m, k), kp = gate.shape, pad_to_tile(gate.shape[1])
    dgate, dup = gate.new_empty(m, k), gate.new_empty(m, k)
    gate_codes, gate_scale = new_codes(m, kp, gate.device), new_column_major_scale(m, kp // TILE, gate.device)
    up_codes, up_scale = new_codes(m, kp, gate.device), new_column_major_scale(m, kp // TILE, gate.device)
    if m and k:
        _backward_kernel[(ceil_div(m, ROWS) * (kp // TILE),)](
            grad, gate, up, dgate, dup, gate_codes.view(torch.uint8), gate_scale, up_codes.view(torch.uint8), up_scale,
            m, k, kp, grad.stride(0), gate.stride(0), up.stride(0), gate_scale.stride(1),
            ROWS=ROWS, POW2=scale_format == "pow2", IS_BF16=gate.dtype == torch.bfloat16, INTERPRETED=INTERPRETED,
            num_warps=WARPS,
        )  # fmt: skip
    return dgate, dup, gate_codes, gate_scale, up_codes, up_scale
