"""Runs one product at every number of rows that it can meet, so that all its kernels get compiled (a process of jetrl.warm)."""

import json
import sys

import jetrl_kernels.ops  # noqa: F401  (defines the operators)
import torch

from jetrl.precision.gemm_shapes import ROW_STEP, Product

# Tokens that a weight gradient is taken over: its kernel does not depend on them.
TOKENS = 2 * ROW_STEP


def run(product: Product, device: str) -> int:
    """How many products ran. Zeros: which kernel runs depends on no value."""
    ops = torch.ops.jetrl

    def zeros(rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(rows, columns, dtype=torch.bfloat16, device=device)

    if product.weight_gradient:
        dy, x = (ops.quantize_tiles_transposed(zeros(TOKENS, n), "fp32") for n in (product.n, product.k))
        # As an FP32 sum over micro-batches, and as one BF16 result.
        ops.gemm_nt_accumulate(*dy, *x, torch.zeros(product.n, product.k, device=device))
        ops.gemm_nt(*dy, *x, "bfloat16")
        return 2
    weight = ops.quantize_blocks(zeros(product.n, product.k), "fp32")
    x = zeros(product.most_rows, product.k)
    for rows in product.rows():
        ops.gemm_nt(*ops.quantize_tiles(x[:rows], "fp32"), *weight, "bfloat16")
    if device == "cuda":
        torch.cuda.synchronize()
    return len(product.rows())


if __name__ == "__main__":
    run(Product(**json.loads(sys.argv[2])), sys.argv[1])
