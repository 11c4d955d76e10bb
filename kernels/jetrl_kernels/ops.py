"""The torch custom ops of jetrl (namespace `jetrl`): quantizers and block-scaled GEMMs, dispatched on device.

CPU tensors run the torch references, CUDA tensors the GPU kernels; both give the same codes and scales. The ops carry no
autograd formula: the linear layer owns that. Autocast never reaches inside: an op computes in the dtypes its docstring
names whatever the caller's context is.

Layouts
  codes   row-major E4M3, the contraction last, padded with zeros to a multiple of 128.
  scale   float32, logical shape (rows, contraction / 128) for tiles. On CUDA its memory is column-major with columns
          padded to 4 floats (stride (1, ceil4(rows))), which is what the GEMM's bulk copies read; on CPU row-major.
          Block scales (rows / 128, contraction / 128) are row-major on both.

Ops
  quantize_tiles(x, scale_format)                        -> codes (M, Kp), scale (M, Kp/128)
  quantize_tiles_transposed(x, scale_format)             -> codes (K, Mp), scale (K, Mp/128)
  quantize_tiles_both(x, scale_format)                   -> the four of the two above, from one read
  requantize_tiles_transposed(codes, scale, k, format)   -> codes (k, Mp), scale (k, Mp/128)
  quantize_blocks(weight, scale_format)                  -> codes (Np, Kp), scale (Np/128, Kp/128)
  quantize_blocks_into(weight, scale_format, codes, scale) -> None: the same, written into the two, contiguous
  quantize_blocks_transposed(weight, scale_format)       -> codes (Kp, Np), scale (Kp/128, Np/128): for dgrad
  quantize_blocks_both(weight, scale_format)             -> the four of quantize_blocks and transpose_blocks
  transpose_blocks(codes, scale)                         -> codes (Kp, Np), scale (Kp/128, Np/128)
  rms_norm(x, residual?, weight, eps)                    -> y (M, K), hidden, rstd (M) float32
  rms_norm_quantize(x, residual?, weight, eps, format)   -> codes (M, Kp), scale (M, Kp/128), hidden, rstd
      hidden = x + residual in x's dtype; an empty tensor without residual (hidden is then x itself)
  rms_norm_backward(grad, grad_hidden?, hidden, weight, rstd) -> dh (M, K) (of x and of residual), dweight (K) float32
  silu_mul(gate, up)                                     -> silu(gate) * up (M, K); rows contiguous, any row stride
  silu_mul_quantize(gate, up, scale_format)              -> codes, scale
  silu_mul_quantize_backward(grad, gate, up, format)     -> dgate, dup, dgate codes, scale, dup codes, scale
  gemm_nt(a, a_scale, b, b_scale, out_dtype)             -> (M, N): a (M, K) tiles; b (N, K) blocks or tiles
  gemm_nt_accumulate(a, a_scale, b, b_scale, out)        -> None: out (M, N) float32 += a b^T, both in tiles
Grouped GEMMs: ops_grouped.py.
`x` is (M, K) bfloat16 or float32; M, K and N need not be multiples of 128; M = 0 is allowed.
"""

import functools
import importlib
from collections.abc import Callable

import torch

from jetrl_kernels import gemm_reference, norm_reference, quantize_reference
from jetrl_kernels.constants import E4M3, TILE, ceil_div, pad_to_tile
from jetrl_kernels.scale import check_scale_format

# The contraction-scale columns are read by bulk copies whose strides must be multiples of 16 bytes.
SCALE_ALIGNMENT = 4
OUT_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_library = torch.library.Library("jetrl", "DEF")


def new_column_major_scale(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Uninitialised tile scales of logical shape (rows, columns), each column contiguous and 16-byte aligned."""
    stride = max(ceil_div(rows, SCALE_ALIGNMENT) * SCALE_ALIGNMENT, SCALE_ALIGNMENT)
    return torch.empty_strided((rows, columns), (1, stride), dtype=torch.float32, device=device)


def _new_tile_scale(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return new_column_major_scale(rows, columns, device)
    return torch.empty(rows, columns, dtype=torch.float32, device=device)


def new_codes(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=E4M3, device=device)


def check_matrix(name: str, x: torch.Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"{name} has {x.dim()} dimensions; a matrix is needed: flatten the leading dimensions first")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{name} is {x.dtype}; the quantizers take torch.bfloat16 or torch.float32")


def _check_out_dtype(out_dtype: str) -> torch.dtype:
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype={out_dtype!r} is unknown; allowed: {', '.join(OUT_DTYPES)}")
    return OUT_DTYPES[out_dtype]


def check_gemm_operands(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> None:
    """Refuse operands whose shapes or dtypes do not describe a block-scaled A B^T. Raises ValueError."""
    (m, k), (n, kb) = a.shape, b.shape
    if a.dtype != E4M3 or b.dtype != E4M3:
        raise ValueError(f"gemm_nt takes {E4M3} operands, got {a.dtype} and {b.dtype}")
    if k != kb or k % TILE:
        raise ValueError(f"gemm_nt contracts over equal lengths that are multiples of {TILE}, got {k} and {kb}")
    if a_scale.shape != (m, k // TILE):
        raise ValueError(f"a_scale is {tuple(a_scale.shape)}; 1x{TILE} tiles of a {(m, k)} need {(m, k // TILE)}")
    if b_scale.shape not in ((n, k // TILE), (ceil_div(n, TILE), k // TILE)):
        raise ValueError(
            f"b_scale is {tuple(b_scale.shape)}; b {(n, k)} needs {(n, k // TILE)} (tiles) or "
            f"{(ceil_div(n, TILE), k // TILE)} (blocks)"
        )


def _define(schema: str, cpu: Callable, cuda_module: str, fake: Callable) -> None:
    """Register one op. The CUDA module is imported at the op's first CUDA call: a CPU-only machine needs no Triton."""
    name = schema.split("(", 1)[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))

    def run_on_cpu(*args):
        with torch.autocast("cpu", enabled=False):
            return cpu(*args)

    @functools.cache
    def kernel() -> Callable:
        return getattr(importlib.import_module(f"jetrl_kernels.{cuda_module}"), name)

    def run_on_cuda(*args):
        # Triton launches on the current device, which need not be that of the tensors.
        first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
        with torch.cuda.device(first.device):
            return kernel()(*args)

    _library.impl(name, run_on_cpu, "CPU")
    _library.impl(name, run_on_cuda, "CUDA")
    torch.library.register_fake(f"jetrl::{name}", fake, lib=_library)


# Quantizers ---------------------------------------------------------------------------------------------------------


def _fake_quantize_tiles(x, scale_format):
    check_matrix("x", x)
    check_scale_format(scale_format)
    m, kp = x.shape[0], pad_to_tile(x.shape[1])
    return new_codes(m, kp, x.device), _new_tile_scale(m, kp // TILE, x.device)


def _fake_quantize_tiles_transposed(x, scale_format):
    return _fake_quantize_tiles(x.t(), scale_format)


def _fake_quantize_tiles_both(x, scale_format):
    return (*_fake_quantize_tiles(x, scale_format), *_fake_quantize_tiles(x.t(), scale_format))


def _fake_requantize(codes, scale, k, scale_format):
    check_scale_format(scale_format)
    mp = pad_to_tile(codes.shape[0])
    return new_codes(k, mp, codes.device), _new_tile_scale(k, mp // TILE, codes.device)


def _fake_quantize_blocks(weight, scale_format):
    check_matrix("weight", weight)
    check_scale_format(scale_format)
    np_, kp = pad_to_tile(weight.shape[0]), pad_to_tile(weight.shape[1])
    scale = torch.empty(np_ // TILE, kp // TILE, dtype=torch.float32, device=weight.device)
    return new_codes(np_, kp, weight.device), scale


def _fake_transpose_blocks(codes, scale):
    return (
        new_codes(codes.shape[1], codes.shape[0], codes.device),
        torch.empty(scale.shape[1], scale.shape[0], dtype=torch.float32, device=scale.device),
    )


def _with_transpose(blocks, transpose):
    return (*blocks, *transpose(*blocks))


def _quantize_tiles(x, scale_format):
    check_matrix("x", x)
    return quantize_reference.quantize_tiles(x, scale_format)


def _quantize_tiles_transposed(x, scale_format):
    check_matrix("x", x)
    return quantize_reference.quantize_tiles_transposed(x, scale_format)


def _quantize_tiles_both(x, scale_format):
    return (*_quantize_tiles(x, scale_format), *_quantize_tiles_transposed(x, scale_format))


def _quantize_blocks(weight, scale_format):
    check_matrix("weight", weight)
    return quantize_reference.quantize_blocks(weight, scale_format)


def check_block_outputs(weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """Refuse storage that the blocks of `weight` do not fill, byte after byte. Raises ValueError."""
    n, k = weight.shape
    want = (pad_to_tile(n), pad_to_tile(k)), (ceil_div(n, TILE), ceil_div(k, TILE))
    if (codes.shape, scale.shape) != want or codes.dtype != E4M3 or scale.dtype != torch.float32:
        raise ValueError(
            f"blocks of {(n, k)} fill codes {want[0]} {E4M3} and scale {want[1]} float32, not {tuple(codes.shape)} "
            f"{codes.dtype} and {tuple(scale.shape)} {scale.dtype}"
        )
    if not (codes.is_contiguous() and scale.is_contiguous()):
        raise ValueError(f"codes and scale must be contiguous, got strides {codes.stride()} and {scale.stride()}")


def _quantize_blocks_into(weight, scale_format, codes, scale):
    check_matrix("weight", weight)
    check_block_outputs(weight, codes, scale)
    made = quantize_reference.quantize_blocks(weight, scale_format)
    codes.view(torch.uint8).copy_(made[0].view(torch.uint8))
    scale.copy_(made[1])


def _fake_quantize_blocks_into(weight, scale_format, codes, scale):
    check_matrix("weight", weight)
    check_scale_format(scale_format)
    check_block_outputs(weight, codes, scale)


def _transpose_blocks(codes, scale):
    # Through uint8: torch has few copy kernels for float8.
    return codes.view(torch.uint8).t().contiguous().view(E4M3), scale.t().contiguous()


_define(
    "quantize_tiles(Tensor x, str scale_format) -> (Tensor, Tensor)",
    _quantize_tiles,
    "quantize_triton",
    _fake_quantize_tiles,
)
_define(
    "quantize_tiles_transposed(Tensor x, str scale_format) -> (Tensor, Tensor)",
    _quantize_tiles_transposed,
    "quantize_triton",
    _fake_quantize_tiles_transposed,
)
_define(
    "quantize_tiles_both(Tensor x, str scale_format) -> (Tensor, Tensor, Tensor, Tensor)",
    _quantize_tiles_both,
    "quantize_triton",
    _fake_quantize_tiles_both,
)
_define(
    "requantize_tiles_transposed(Tensor codes, Tensor scale, SymInt k, str scale_format) -> (Tensor, Tensor)",
    quantize_reference.requantize_tiles_transposed,
    "quantize_triton",
    _fake_requantize,
)
_define(
    "quantize_blocks(Tensor weight, str scale_format) -> (Tensor, Tensor)",
    _quantize_blocks,
    "weight_triton",
    _fake_quantize_blocks,
)
_define(
    "quantize_blocks_into(Tensor weight, str scale_format, Tensor(a!) codes, Tensor(b!) scale) -> ()",
    _quantize_blocks_into,
    "weight_triton",
    _fake_quantize_blocks_into,
)
_define(
    "quantize_blocks_both(Tensor weight, str scale_format) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda weight, scale_format: _with_transpose(_quantize_blocks(weight, scale_format), _transpose_blocks),
    "weight_triton",
    lambda weight, scale_format: _with_transpose(_fake_quantize_blocks(weight, scale_format), _fake_transpose_blocks),
)
_define(
    "quantize_blocks_transposed(Tensor weight, str scale_format) -> (Tensor, Tensor)",
    lambda weight, scale_format: _transpose_blocks(*_quantize_blocks(weight, scale_format)),
    "weight_triton",
    lambda weight, scale_format: _fake_transpose_blocks(*_fake_quantize_blocks(weight, scale_format)),
)
_define(
    "transpose_blocks(Tensor codes, Tensor scale) -> (Tensor, Tensor)",
    _transpose_blocks,
    "weight_triton",
    _fake_transpose_blocks,
)


# Norm and activation ------------------------------------------------------------------------------------------------


def _rms_norm(x, residual, weight, eps):
    y, hidden, rstd = norm_reference.rms_norm(x, residual, weight, eps)
    return y, x.new_empty(0) if residual is None else hidden, rstd


def _rms_norm_quantize(x, residual, weight, eps, scale_format):
    y, hidden, rstd = _rms_norm(x, residual, weight, eps)
    return (*quantize_reference.quantize_tiles(y, scale_format), hidden, rstd)


def _fake_rms_norm(x, residual, weight, eps):
    check_matrix("x", x)
    hidden = x.new_empty(0) if residual is None else x.new_empty(x.shape)
    return x.new_empty(x.shape), hidden, x.new_empty(x.shape[0], dtype=torch.float32)


def _fake_rms_norm_quantize(x, residual, weight, eps, scale_format):
    return (*_fake_quantize_tiles(x, scale_format), *_fake_rms_norm(x, residual, weight, eps)[1:])


def _fake_rms_norm_backward(grad, grad_hidden, hidden, weight, rstd):
    return grad.new_empty(grad.shape), grad.new_empty(grad.shape[1], dtype=torch.float32)


def _silu_mul_quantize(gate, up, scale_format):
    return quantize_reference.quantize_tiles(norm_reference.silu_mul(gate, up), scale_format)


def _silu_mul_quantize_backward(grad, gate, up, scale_format):
    dgate, dup = norm_reference.silu_mul_backward(grad, gate, up)
    quantize = quantize_reference.quantize_tiles
    return dgate, dup, *quantize(dgate, scale_format), *quantize(dup, scale_format)


def _fake_silu_mul_quantize_backward(grad, gate, up, scale_format):
    tiles = (*_fake_quantize_tiles(gate, scale_format), *_fake_quantize_tiles(gate, scale_format))
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape), *tiles


_define(
    "rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    _rms_norm,
    "norm_triton",
    _fake_rms_norm,
)
_define(
    "rms_norm_quantize(Tensor x, Tensor? residual, Tensor weight, float eps, str scale_format)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _rms_norm_quantize,
    "norm_triton",
    _fake_rms_norm_quantize,
)
_define(
    "rms_norm_backward(Tensor grad, Tensor? grad_hidden, Tensor hidden, Tensor weight, Tensor rstd) -> (Tensor, Tensor)",
    norm_reference.rms_norm_backward,
    "norm_triton",
    _fake_rms_norm_backward,
)
_define(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    norm_reference.silu_mul,
    "silu_triton",
    lambda gate, up: gate.new_empty(gate.shape),
)
_define(
    "silu_mul_quantize(Tensor gate, Tensor up, str scale_format) -> (Tensor, Tensor)",
    _silu_mul_quantize,
    "silu_triton",
    lambda gate, up, scale_format: _fake_quantize_tiles(gate, scale_format),
)
_define(
    "silu_mul_quantize_backward(Tensor grad, Tensor gate, Tensor up, str scale_format)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _silu_mul_quantize_backward,
    "silu_triton",
    _fake_silu_mul_quantize_backward,
)


# GEMMs --------------------------------------------------------------------------------------------------------------


def _fake_gemm_nt(a, a_scale, b, b_scale, out_dtype, k_varies=False):
    check_gemm_operands(a, a_scale, b, b_scale)
    return torch.empty(a.shape[0], b.shape[0], dtype=_check_out_dtype(out_dtype), device=a.device)


def _fake_gemm_nt_accumulate(a, a_scale, b, b_scale, out):
    check_gemm_operands(a, a_scale, b, b_scale)


def _gemm_nt(a, a_scale, b, b_scale, out_dtype, k_varies=False):
    check_gemm_operands(a, a_scale, b, b_scale)
    return gemm_reference.gemm_nt(a, a_scale, b, b_scale, _check_out_dtype(out_dtype))


def _gemm_nt_accumulate(a, a_scale, b, b_scale, out):
    check_gemm_operands(a, a_scale, b, b_scale)
    out += gemm_reference.gemm_nt(a, a_scale, b, b_scale, torch.float32)


_define(
    "gemm_nt(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, str out_dtype, bool k_varies=False) -> Tensor",
    _gemm_nt,
    "gemm",
    _fake_gemm_nt,
)
_define(
    "gemm_nt_accumulate(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor(a!) out) -> ()",
    _gemm_nt_accumulate,
    "gemm",
    _fake_gemm_nt_accumulate,
)


from jetrl_kernels import ops_exact, ops_fused, ops_grouped  # noqa: E402, F401  (declared with _define: they come last)
