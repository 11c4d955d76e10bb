"""Which part of a training step a GPU kernel belongs to, by its name."""

# First match wins; names of this software stack's kernels.
FAMILIES = (
    ("attention", ("flash", "fmha", "varlen")),
    ("optimizer", ("triton_poi_", "triton_per_", "triton_red_", "single_param_adam", "distribution")),
    ("FP8 GEMM", ("fp8_gemm", "sm90_fp8", "e4m3", "qqtst", "deep_gemm")),
    ("BF16 GEMM", ("gemm", "nvjet", "cutlass", "cublas")),
    ("rotary, q/k norm", ("_rotary_kernel", "_head_kernel", "rope")),
    ("norm", ("_norm_kernel", "_norm_backward", "rms_norm")),
    # jetrl's SiLU-mul and log-prob kernels have the same names.
    ("activation, log-probs", ("silu", "swiglu", "_forward_kernel", "_backward_kernel")),
    ("quantization", ("_tiles_kernel", "_both_kernel", "_transposed_kernel", "_requantize", "_blocks_kernel")),
    ("reduction", ("reduce_kernel",)),
    ("copy", ("copy", "memcpy", "memset", "cat", "fill")),
)


def family(kernel: str) -> str:
    """kernel: its name as torch.profiler gives it."""
    name = kernel.lower()
    return next((f for f, parts in FAMILIES if any(p in name for p in parts)), "elementwise and other")
