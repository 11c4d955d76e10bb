"""Host side of few_rows_gemm.cu: compiles it with NVRTC (no nvcc, no headers), builds its bulk-copy maps, launches it.

NVRTC and cuda-bindings are dependencies of torch itself, so nothing more has to be installed.
"""

import ctypes
import functools
from pathlib import Path

import torch

from jetrl_kernels.constants import TILE, ceil_div

MAX_ROWS = 64
# Shared memory of one CTA: two fit on a multiprocessor, so the next kernel's copies start under the tail of this one.
_SHARED_BUDGET = 100 * 1024
_THREADS = 160
_SCALE_STAGE_BYTES = 256
# Weight tiles each CTA asks into L2 before it waits for the kernel in front.
PREFETCH_BLOCKS = 32


def _check(result: tuple):
    """Unpack a cuda-bindings result; a driver error becomes a RuntimeError with its name."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"few_rows_gemm: the CUDA call failed with {status!r}")
    return values[0] if len(values) == 1 else values


def _wgmma_macro(weight_rows: int) -> str:
    """`#define WGMMA(d, a, b, accumulate)` for m64 n{weight_rows} k32, E4M3 in, float32 accumulators in registers."""
    count = weight_rows // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        "#define WGMMA(d, a, b, accumulate) asm volatile("
        f'"{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{weight_rows}k32.f32.e4m3.e4m3 "
        f'{{{registers}}}, %{count}, %{count + 1}, p, 1, 1; }}" '
        f': {outputs} : "l"(a), "l"(b), "r"(accumulate))\n'
    )


def _stages(row_class: int, weight_rows: int, k_blocks: int) -> int:
    per_stage = TILE * (row_class + weight_rows) + _SCALE_STAGE_BYTES + 16
    return max(2, min((_SHARED_BUDGET - 1024) // per_stage, 24, k_blocks))


def _shared_bytes(row_class: int, weight_rows: int, stages: int) -> int:
    stage = TILE * (row_class + weight_rows) + _SCALE_STAGE_BYTES + 16
    # The last activation stage is read as 64 rows: keep that inside the allocation.
    return 1024 + max(stages * stage, (stages - 1) * TILE * row_class + TILE * MAX_ROWS)


def compile_cubin(row_class: int, weight_rows: int, stages: int, out_float: bool) -> bytes:
    """Machine code for sm_90a. Raises RuntimeError with the compiler's log."""
    from cuda.bindings import nvrtc

    source = _wgmma_macro(weight_rows) + Path(__file__).with_name("few_rows_gemm.cu").read_text()
    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), b"few_rows_gemm.cu", 0, None, None))
    options = [
        b"--gpu-architecture=sm_90a",
        b"--std=c++17",
        f"-DMR={row_class}".encode(),
        f"-DNR={weight_rows}".encode(),
        f"-DSTAGES={stages}".encode(),
        f"-DOUT_FLOAT={int(out_float)}".encode(),
    ]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status):
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"few_rows_gemm.cu did not compile: {log.decode()}")
    code = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
    _check(nvrtc.nvrtcGetCUBIN(program, code))
    return code


@functools.cache
def _kernel(device: int, row_class: int, weight_rows: int, stages: int, out_float: bool):
    """The loaded function. The module is kept for the life of the process: graphs hold its kernels."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        module = _check(driver.cuModuleLoadData(compile_cubin(row_class, weight_rows, stages, out_float)))
        function = _check(driver.cuModuleGetFunction(module, b"few_rows_gemm"))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(function, limit, _shared_bytes(row_class, weight_rows, stages)))
    return function


def _map(matrix: torch.Tensor, columns: int, rows: int, row_bytes: int, box: tuple[int, int], swizzle: bool):
    """Bulk-copy map of a row-major matrix (columns fastest); copies beyond its edge read zeros."""
    from cuda.bindings import driver as d

    kind = d.CUtensorMapDataType
    return _check(
        d.cuTensorMapEncodeTiled(
            kind.CU_TENSOR_MAP_DATA_TYPE_UINT8 if swizzle else kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            2,
            matrix.data_ptr(),
            [d.cuuint64_t(columns), d.cuuint64_t(rows)],
            [d.cuuint64_t(row_bytes)],
            [d.cuuint32_t(box[0]), d.cuuint32_t(box[1])],
            [d.cuuint32_t(1), d.cuuint32_t(1)],
            d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
            if swizzle
            else d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
            d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def weight_rows_of_a_cta(n: int) -> int:
    """Few enough that all 132 multiprocessors of a Hopper GPU take part, more where activations would be re-read often."""
    if n <= 32 * 264:
        return 32
    return 64 if n <= 64 * 264 else 128


def gemm_nt(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
    weight_rows: int | None = None,
    prefetch_blocks: int = PREFETCH_BLOCKS,
    overlap: bool = True,
) -> None:
    """out (M, N) bfloat16 or float32, contiguous = a b^T; M in 1..64; b_scale in blocks; layouts as in ops.py.

    overlap: let the launch begin under the tail of the kernel in front (programmatic stream serialization).
    """
    from cuda.bindings import driver

    (m, k), n = a.shape, b.shape[0]
    row_class = next(rows for rows in (8, 16, 32, 64) if m <= rows)
    weight_rows = weight_rows or weight_rows_of_a_cta(n)
    k_blocks = k // TILE
    stages = _stages(row_class, weight_rows, k_blocks)
    function = _kernel(a.device.index, row_class, weight_rows, stages, out.dtype == torch.float32)
    maps = (
        _map(b, k, n, b.stride(0), (TILE, weight_rows), True),
        _map(a, k, m, a.stride(0), (TILE, row_class), True),
        _map(a_scale, m, k_blocks, 4 * a_scale.stride(1), (row_class, 1), False),
    )
    values = (
        ctypes.c_void_p(b_scale.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int(m),
        ctypes.c_int(n),
        ctypes.c_int(k_blocks),
        ctypes.c_int(min(prefetch_blocks, k_blocks)),
    )
    pointers = [int(m.getPtr()) for m in maps] + [ctypes.addressof(v) for v in values]
    parameters = (ctypes.c_void_p * len(pointers))(*pointers)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = ceil_div(n, weight_rows), 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = _THREADS, 1, 1
    config.sharedMemBytes = _shared_bytes(row_class, weight_rows, stages)
    config.hStream = torch.cuda.current_stream(a.device).cuda_stream
    if overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    _check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(parameters), 0))
