"""The custom ops of the trainer's fused backward, which joins steps that would each read and write the activations once.

A merged gradient is (T, sum of the parts rounded up to 128): every part starts at a multiple of 128 columns, as its rows do
in a merged weight, and the columns in between are zero.

  qk_norm_rotary_backward(dq, dk, dv, q, k, q_weight?, k_weight?, q_rstd?, k_rstd?, cos, sin) -> merged, dq_weight, dk_weight
      dq, dk (T, heads, D): gradients behind the rotary embedding; dv (T, kv heads, D): of v. q, k: what the norms read; without
      norms (weights None) they are not read. merged (T, ...) holds the gradients of what the q, k and v GEMMs gave;
      dq_weight, dk_weight (D) float32, empty without norms.
  silu_mul_backward(grad, gate, up)                       -> merged (T, 2 x K rounded up to 128): dgate, dup
  silu_mul_backward_quantize(grad, gate, up, scale_format) -> quantize_tiles_both of the above, without storing it: codes (T,
      2 Kp), scale, codes^T (2 Kp, Tp), scale^T
  quantize_blocks_stacked(weights, scale_format, transposed) -> quantize_blocks of every weight (N_i, K), stacked along rows as
      in a merged weight: codes (sum of N_i padded, Kp), scale; transposed: both transposed
  requantize_blocks_transposed(codes, scale, k, scale_format) -> codes (Kp, Mp), scale (Kp/128, Mp/128): tiles (M, Kp),
      dequantized, transposed and quantized in 128x128 blocks (no rounding to bfloat16 in between)
Strided inputs are taken where the last dimension is contiguous.
"""

import torch

from jetrl_kernels import fused_reference, quantize_reference
from jetrl_kernels.constants import E4M3, TILE, pad_to_tile
from jetrl_kernels.ops import _define, _fake_quantize_tiles_both, check_matrix, new_codes
from jetrl_kernels.scale import check_scale_format


def merged_width(*sizes: int) -> int:
    return sum(pad_to_tile(n) for n in sizes)


def _fake_qk_norm_rotary_backward(dq, dk, dv, q, k, q_weight, k_weight, q_rstd, k_rstd, cos, sin):
    merged = dq.new_empty(dq.shape[0], merged_width(*(t.shape[1] * t.shape[2] for t in (dq, dk, dv))))
    weights = (dq.new_empty(0 if w is None else dq.shape[2], dtype=torch.float32) for w in (q_weight, k_weight))
    return (merged, *weights)


def _fake_silu_mul_backward(grad, gate, up):
    check_matrix("gate", gate)
    return gate.new_empty(gate.shape[0], merged_width(gate.shape[1], up.shape[1]))


def _fake_requantize_blocks(codes, scale, k, scale_format):
    check_scale_format(scale_format)
    kp, mp = pad_to_tile(k), pad_to_tile(codes.shape[0])
    blocks = torch.empty(kp // TILE, mp // TILE, dtype=torch.float32, device=codes.device)
    return new_codes(kp, mp, codes.device), blocks


def _quantize_blocks_stacked(weights, scale_format, transposed):
    op = torch.ops.jetrl.quantize_blocks_transposed if transposed else torch.ops.jetrl.quantize_blocks
    parts = [op(w, scale_format) for w in weights]
    # As bytes: torch has few copy kernels for float8.
    codes = torch.cat([codes.view(torch.uint8) for codes, _ in parts], dim=int(transposed)).view(E4M3)
    return codes, torch.cat([scale for _, scale in parts], dim=int(transposed))


def _fake_quantize_blocks_stacked(weights, scale_format, transposed):
    check_scale_format(scale_format)
    shape = (merged_width(*(w.shape[0] for w in weights)), pad_to_tile(weights[0].shape[1]))
    rows, columns = shape[::-1] if transposed else shape
    blocks = torch.empty(rows // TILE, columns // TILE, dtype=torch.float32, device=weights[0].device)
    return new_codes(rows, columns, weights[0].device), blocks


def _silu_mul_backward_quantize(grad, gate, up, scale_format):
    merged = fused_reference.silu_mul_backward(grad, gate, up)
    tiles = quantize_reference
    return *tiles.quantize_tiles(merged, scale_format), *tiles.quantize_tiles_transposed(merged, scale_format)


_define(
    "qk_norm_rotary_backward(Tensor dq, Tensor dk, Tensor dv, Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight,"
    " Tensor? q_rstd, Tensor? k_rstd, Tensor cos, Tensor sin) -> (Tensor, Tensor, Tensor)",
    fused_reference.qk_norm_rotary_backward,
    "fused_triton",
    _fake_qk_norm_rotary_backward,
)
_define(
    "silu_mul_backward(Tensor grad, Tensor gate, Tensor up) -> Tensor",
    fused_reference.silu_mul_backward,
    "fused_triton",
    _fake_silu_mul_backward,
)
_define(
    "silu_mul_backward_quantize(Tensor grad, Tensor gate, Tensor up, str scale_format)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _silu_mul_backward_quantize,
    "fused_triton",
    lambda grad, gate, up, scale_format: _fake_quantize_tiles_both(
        _fake_silu_mul_backward(grad, gate, up), scale_format
    ),
)
_define(
    "quantize_blocks_stacked(Tensor[] weights, str scale_format, bool transposed) -> (Tensor, Tensor)",
    _quantize_blocks_stacked,
    "fused_triton",
    _fake_quantize_blocks_stacked,
)
_define(
    "requantize_blocks_transposed(Tensor codes, Tensor scale, SymInt k, str scale_format) -> (Tensor, Tensor)",
    fused_reference.requantize_blocks_transposed,
    "fused_triton",
    _fake_requantize_blocks,
)
