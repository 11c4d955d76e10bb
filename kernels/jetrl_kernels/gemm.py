"""CUDA side of the GEMM ops: hands each call to the chosen backend. Layouts and meaning: ops.py; choice: backends.py."""

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from jetrl_kernels import backends, few_rows_gemm, gemm_triton
from jetrl_kernels.constants import TILE, ceil_div
from jetrl_kernels.ops import OUT_DTYPES, SCALE_ALIGNMENT, check_gemm_operands, new_column_major_scale

# Up to here few_rows_gemm is ahead of DeepGEMM, and up to its own limit ahead of the other backends.
_FEW_ROWS_BESIDE_DEEPGEMM = 32
# Below this cuBLASLt was seen to split K (4096 x 12288 at 8 and 16 rows), which changes bits.
_CUBLASLT_MIN_ROWS = 128
# Weight gradients into float32: below this many elements cuBLASLt is ahead of DeepGEMM's 1D1D kernel and the zeros that it
# adds to, above it behind (8192 tokens on an H200: 4096 x 4096 996 against 969 TFLOP/s, 24576 x 4096 869 against 1013).
_CUBLASLT_MAX_OUTPUTS = 32 << 20
# DeepGEMM picks a tile of 16 rows here, which its 1D1D kernel does not compile with.
_DEEPGEMM_1D1D_MAX_REFUSED_ROWS = 64
# Bulk stores of bfloat16 rows, and of float32 rows, need multiples of 16 bytes.
_BF16_ROW, _FLOAT_ROW = 8, 4


def column_major(scale: torch.Tensor) -> torch.Tensor:
    """Tile scales as the kernels read them; a copy only if the caller built them another way."""
    rows, columns = scale.shape
    stride = ceil_div(rows, SCALE_ALIGNMENT) * SCALE_ALIGNMENT
    if scale.stride() == (1, stride) or (columns == 1 and scale.stride(0) == 1):
        return scale.as_strided((rows, columns), (1, stride)) if columns == 1 else scale
    return new_column_major_scale(rows, columns, scale.device).copy_(scale)


def _is_tiled(b: torch.Tensor, b_scale: torch.Tensor) -> bool:
    return b_scale.shape[0] == b.shape[0] and b.shape[0] > 1


def _prepare(a, a_scale, b, b_scale):
    check_gemm_operands(a, a_scale, b, b_scale)
    tiled = _is_tiled(b, b_scale)
    b_scale = column_major(b_scale) if tiled else b_scale.contiguous()
    return a.contiguous(), column_major(a_scale), b.contiguous(), b_scale, tiled


def _scaled_mm(a, a_scale, b, b_scale, tiled: bool, dtype: torch.dtype) -> torch.Tensor:
    """cuBLASLt wants scale columns without padding: where M is no multiple of 4, rows are added and dropped again."""
    m, padding = a.shape[0], -a.shape[0] % SCALE_ALIGNMENT
    if padding:
        a = F.pad(a.view(torch.uint8), (0, 0, 0, padding)).view(a.dtype)
        scale = new_column_major_scale(m + padding, a_scale.shape[1], a.device)
        scale[:m], scale[m:] = a_scale, 0.0
        a_scale = scale
    if tiled:
        recipe = ScalingType.BlockWise1x128
        b_scale = b_scale if b_scale.shape[0] % SCALE_ALIGNMENT == 0 else b_scale.t().contiguous().t()
    else:
        # Block scales go in column by column of k, padded to a multiple of 4 blocks.
        recipe = ScalingType.BlockWise128x128
        b_scale = F.pad(b_scale, (0, -b_scale.shape[1] % SCALE_ALIGNMENT)).t()
    out = F.scaled_mm(a, b.t(), a_scale, ScalingType.BlockWise1x128, b_scale, recipe, output_dtype=dtype)
    return out[:m] if padding else out


def _takes_scaled_mm(a: torch.Tensor, b: torch.Tensor) -> bool:
    return b.shape[0] % 16 == 0 and a.shape[0] >= _CUBLASLT_MIN_ROWS


def _blocks(a, a_scale, b, b_scale, dtype: torch.dtype, k_varies: bool = False) -> torch.Tensor:
    """fprop and dgrad: the weight in 128x128 blocks; wgrad with x in such blocks. Every branch gives the same bits."""
    m, n = a.shape[0], b.shape[0]
    backend = backends.current().gemm
    few = {"deepgemm": _FEW_ROWS_BESIDE_DEEPGEMM, "cublaslt": few_rows_gemm.MAX_ROWS, "triton": 0}[backend]
    takes_deepgemm = dtype == torch.bfloat16 and n % _BF16_ROW == 0
    if m <= few or (backend == "deepgemm" and m <= few_rows_gemm.MAX_ROWS and not takes_deepgemm):
        out = torch.empty(m, n, dtype=dtype, device=a.device)
        few_rows_gemm.gemm_nt(a, a_scale, b, b_scale, out)
        return out
    if backend == "deepgemm" and takes_deepgemm:
        out = torch.empty(m, n, dtype=dtype, device=a.device)
        # Constants of the compiled kernel. Where K counts tokens, DeepGEMM's default would compile one for every length of a batch.
        constant = "mn" if k_varies else "nk"
        backends.deep_gemm().fp8_gemm_nt(
            (a, a_scale), (b, b_scale), out, compiled_dims=constant, disable_ue8m0_cast=True
        )
        return out
    if backend != "triton" and _takes_scaled_mm(a, b):
        return _scaled_mm(a, a_scale, b, b_scale, False, dtype)
    return gemm_triton.gemm_nt(a, a_scale, b, b_scale, False, dtype)


def _tiles(a, a_scale, b, b_scale, dtype: torch.dtype) -> torch.Tensor:
    """wgrad without accumulation: both operands in tiles along tokens."""
    backend, outputs = backends.current().gemm, a.shape[0] * b.shape[0]
    if backend != "triton" and _takes_scaled_mm(a, b) and (dtype == torch.bfloat16 or outputs <= _CUBLASLT_MAX_OUTPUTS):
        return _scaled_mm(a, a_scale, b, b_scale, True, dtype)
    out = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    accumulate_tiles(a, a_scale, b, b_scale, out)
    return out.to(dtype)


def accumulate_tiles(a, a_scale, b, b_scale, out: torch.Tensor) -> None:
    backend = backends.current().gemm
    if backend == "deepgemm" and b.shape[0] % _FLOAT_ROW == 0 and a.shape[0] > _DEEPGEMM_1D1D_MAX_REFUSED_ROWS:
        # K counts tokens here, see above.
        backends.deep_gemm().fp8_gemm_nt(
            (a, a_scale), (b, b_scale), out, c=out, recipe=(1, 1, TILE), compiled_dims="mn", disable_ue8m0_cast=True
        )
    elif backend == "cublaslt" and _takes_scaled_mm(a, b):
        out += _scaled_mm(a, a_scale, b, b_scale, True, torch.float32)
    else:
        gemm_triton.gemm_nt_accumulate(a, a_scale, b, b_scale, out)


def gemm_nt(a, a_scale, b, b_scale, out_dtype: str, k_varies: bool = False) -> torch.Tensor:
    """a (M, K) tiles, b (N, K) blocks or tiles -> (M, N). k_varies: K counts tokens, and M and N are a weight's."""
    a, a_scale, b, b_scale, tiled = _prepare(a, a_scale, b, b_scale)
    dtype = OUT_DTYPES[out_dtype]
    if not (a.shape[0] and b.shape[0] and a.shape[1]):
        return torch.zeros(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    if tiled:
        return _tiles(a, a_scale, b, b_scale, dtype)
    return _blocks(a, a_scale, b, b_scale, dtype, k_varies)


def gemm_nt_accumulate(a, a_scale, b, b_scale, out: torch.Tensor) -> None:
    """out (M, N) float32 contiguous += a b^T, both in tiles along K."""
    a, a_scale, b, b_scale, tiled = _prepare(a, a_scale, b, b_scale)
    if out.dtype != torch.float32 or not out.is_contiguous() or out.shape != (a.shape[0], b.shape[0]):
        raise ValueError(
            f"out must be a contiguous float32 {(a.shape[0], b.shape[0])}, got {out.dtype} {tuple(out.shape)} "
            f"with strides {out.stride()}"
        )
    if not (a.shape[0] and b.shape[0] and a.shape[1]):
        return
    if tiled:
        accumulate_tiles(a, a_scale, b, b_scale, out)
    else:
        out += _blocks(a, a_scale, b, b_scale, torch.float32)
