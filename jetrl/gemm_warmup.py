"""Runs one product at every number of rows that it can meet, so that all its kernels get compiled (a process of jetrl.warm)."""

import json
import sys

import jetrl_kernels.ops  # noqa: F401  (defines the operators)
import torch

from jetrl.precision.gemm_shapes import Product


def run(product: Product, device: str) -> int:
    """How many products ran. Zeros: which kernel runs depends on no value."""
    ops = torch.ops.jetrl
    zeros = {"dtype": torch.bfloat16, "device": device}
    weight = ops.quantize_blocks(torch.zeros(product.n, product.k, **zeros), "fp32")
    x = torch.zeros(product.most_rows, product.k, **zeros)
    for rows in product.rows():
        ops.gemm_nt(*ops.quantize_tiles(x[:rows], "fp32"), *weight, "bfloat16")
    if device == "cuda":
        torch.cuda.synchronize()
    return len(product.rows())


if __name__ == "__main__":
    run(Product(**json.loads(sys.argv[2])), sys.argv[1])
