"""Host side of few_rows_gemm.cu: compiles it with NVRTC (no nvcc, no headers), builds its bulk-copy maps, launches it.

NVRTC and cuda-bindings are dependencies of torch itself, so nothing more has to be installed.
"""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from jetrl_kernels.constants import TILE, ceil_div

MAX_ROWS = 64
_THREADS = 160


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


@dataclass(frozen=True)
class Shape:
    """How one launch is cut: weight rows of a CTA, blocks of 128 of k that one bulk copy moves, stages in flight."""

    weight_rows: int
    depth: int
    stages: int


def _stage_bytes(row_class: int, weight_rows: int, depth: int) -> int:
    scales = ceil_div(4 * depth * row_class, 128) * 128
    return depth * TILE * (row_class + weight_rows) + scales + 16


def plan(
    m: int, n: int, k: int, weight_rows: int | None = None, depth: int | None = None, shared: int | None = None
) -> Shape:
    """The fastest cut of a sweep on an H200 (benchmarks/bench_decode.py --sweep); arguments after k override it.

    Little shared memory per CTA (two or three fit on a multiprocessor), so the next kernel's weights arrive under the tail
    of this one; more where many activation rows share a stage.
    """
    one_each, two_each = n <= 32 * 132, n <= 32 * 264  # CTAs of 32 weight rows on 132 multiprocessors
    if not two_each:
        cut = (64, 2, 75)
    elif m <= 16:
        cut = (32, 4 if one_each else 8, 75)
    else:
        cut = (32, 4, 110 if m <= 32 else 210)
    weight_rows, depth = weight_rows or cut[0], depth or cut[1]
    fit = ((shared or cut[2] << 10) - 1024) // _stage_bytes(row_class(m), weight_rows, depth)
    return Shape(weight_rows, depth, max(2, min(fit, ceil_div(k // TILE, depth))))


def row_class(m: int) -> int:
    """Activation rows that a bulk copy brings for m rows."""
    return next(rows for rows in (8, 16, 32, 64) if m <= rows)


def shared_bytes(rows: int, shape: Shape) -> int:
    stages = shape.stages * _stage_bytes(rows, shape.weight_rows, shape.depth)
    # The last activation block is read as 64 rows: keep that inside the allocation.
    return 1024 + max(stages, (shape.stages * shape.depth - 1) * TILE * rows + TILE * MAX_ROWS)


def compile_cubin(rows: int, shape: Shape, out_float: bool) -> bytes:
    """Machine code for sm_90a. Raises RuntimeError with the compiler's log."""
    from cuda.bindings import nvrtc

    source = _wgmma_macro(shape.weight_rows) + Path(__file__).with_name("few_rows_gemm.cu").read_text()
    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), b"few_rows_gemm.cu", 0, None, None))
    options = [
        b"--gpu-architecture=sm_90a",
        b"--std=c++17",
        f"-DMR={rows}".encode(),
        f"-DNR={shape.weight_rows}".encode(),
        f"-DDEPTH={shape.depth}".encode(),
        f"-DSTAGES={shape.stages}".encode(),
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
def _kernel(device: int, rows: int, shape: Shape, out_float: bool):
    """The loaded function. The module is kept for the life of the process: graphs hold its kernels."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        module = _check(driver.cuModuleLoadData(compile_cubin(rows, shape, out_float)))
        function = _check(driver.cuModuleGetFunction(module, b"few_rows_gemm"))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(function, limit, shared_bytes(rows, shape)))
    return function


def _encode(pointer: int, float32: bool, sizes: list[int], strides: list[int], box: list[int]):
    """A bulk-copy map (fastest dimension first, strides in bytes); copies beyond an edge read zeros."""
    from cuda.bindings import driver as d

    types, swizzles = d.CUtensorMapDataType, d.CUtensorMapSwizzle
    return _check(
        d.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32 if float32 else types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            len(sizes),
            pointer,
            [d.cuuint64_t(size) for size in sizes],
            [d.cuuint64_t(stride) for stride in strides],
            [d.cuuint32_t(extent) for extent in box],
            [d.cuuint32_t(1)] * len(sizes),
            d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_NONE if float32 else swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
            d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def _code_map(codes: torch.Tensor, rows_of_box: int, depth: int):
    """(rows, K) seen as (K/128, rows, 128): one copy takes `depth` blocks of `rows_of_box` rows."""
    (rows, k), stride = codes.shape, codes.stride(0)
    return _encode(codes.data_ptr(), False, [TILE, rows, k // TILE], [stride, TILE], [TILE, rows_of_box, depth])


def _scale_map(scale: torch.Tensor, rows_of_box: int, depth: int):
    rows, blocks = scale.shape
    return _encode(scale.data_ptr(), True, [rows, blocks], [4 * scale.stride(1)], [rows_of_box, depth])


def gemm_nt(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
    shape: Shape | None = None,
    overlap: bool = True,
) -> None:
    """out (M, N) bfloat16 or float32, contiguous = a b^T; M in 1..64; b_scale in blocks; layouts as in ops.py.

    overlap: let the launch begin under the tail of the kernel in front (programmatic stream serialization).
    """
    from cuda.bindings import driver

    (m, k), n = a.shape, b.shape[0]
    shape, rows = shape or plan(m, n, k), row_class(m)
    function = _kernel(a.device.index, rows, shape, out.dtype == torch.float32)
    maps = (
        _code_map(b, shape.weight_rows, shape.depth),
        _code_map(a, rows, shape.depth),
        _scale_map(a_scale, rows, shape.depth),
    )
    values = (
        ctypes.c_void_p(b_scale.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int(m),
        ctypes.c_int(n),
        ctypes.c_int(k // TILE),
    )
    pointers = [int(m.getPtr()) for m in maps] + [ctypes.addressof(v) for v in values]
    parameters = (ctypes.c_void_p * len(pointers))(*pointers)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = ceil_div(n, shape.weight_rows), 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = _THREADS, 1, 1
    config.sharedMemBytes = shared_bytes(rows, shape)
    config.hStream = torch.cuda.current_stream(a.device).cuda_stream
    if overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    _check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(parameters), 0))
