"""Triton log-probability of one token a row, and its backward.

The sum over a vocabulary has one order whatever the dtype of the logits, the number of rows or the layout Triton picks:
lane j of 2048 adds columns j, j + 2048, j + 4096, ..., and the lanes are then added in a binary tree of sums of two. So the
sampler may hand over float32 logits of a few rows and the trainer bfloat16 logits of thousands and both get the same bits.
"""

import torch
import triton
import triton.language as tl

from jetrl_kernels.constants import ceil_div
from jetrl_kernels.ops_exact import check_logprobs
from jetrl_kernels.rounding_triton import INTERPRETED
from jetrl_kernels.weight_triton import round_to_carrier

LOG2_LANES = 11
WARPS = 8
BACKWARD_COLUMNS = 4096


@triton.jit
def _tree_sum(x, LOG2: tl.constexpr):
    """Sum of 2**LOG2 lanes: every step adds the upper half to the lower half, and a sum of two has only one order."""
    for i in tl.static_range(LOG2):
        x = tl.sum(tl.reshape(x, (2, 1 << (LOG2 - 1 - i))), axis=0)
    return tl.sum(x, axis=0)


@triton.jit(do_not_specialize=["stride"])
def _forward_kernel(logits, ids, temperature, logprob, lse, vocab, stride, LOG2: tl.constexpr):
    LANES: tl.constexpr = 1 << LOG2
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    t = tl.load(temperature + row)
    lane = tl.arange(0, LANES)
    peak = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    for c in range(0, vocab, LANES):
        z = tl.load(start + c + lane, mask=c + lane < vocab, other=float("-inf")).to(tl.float32)
        peak = tl.maximum(peak, z, propagate_nan=tl.PropagateNan.ALL)
    # Dividing by a positive number keeps the order, so the largest logit gives the largest quotient.
    m = tl.math.div_rn(tl.max(peak, axis=0), t)
    acc = tl.zeros((LANES,), dtype=tl.float32)
    for c in range(0, vocab, LANES):
        z = tl.load(start + c + lane, mask=c + lane < vocab, other=float("-inf")).to(tl.float32)
        acc += tl.exp(tl.math.div_rn(z, t) - m)
    log_sum = tl.log(_tree_sum(acc, LOG2))
    id = tl.load(ids + row)
    # Another row's memory, or nobody's, would be read for an id outside; a check on the host would wait for the GPU.
    inside = (id >= 0) & (id < vocab)
    chosen = tl.math.div_rn(tl.load(start + id, mask=inside, other=float("nan")).to(tl.float32), t)
    tl.store(logprob + row, (chosen - m) - log_sum)
    tl.store(lse + row, m + log_sum)


@triton.jit(do_not_specialize=["stride"])
def _backward_kernel(
    grad, logits, ids, temperature, lse, out, vocab, columns, stride,
    COLUMNS: tl.constexpr, IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    t = tl.load(temperature + row)
    z = tl.load(logits + row * stride + col, mask=col < vocab, other=float("-inf")).to(tl.float32)
    p = tl.exp(tl.math.div_rn(z, t) - tl.load(lse + row))
    d = (tl.where((col == tl.load(ids + row)) & (col < vocab), 1.0, 0.0) - p) * (tl.load(grad + row) / t)
    d = round_to_carrier(d, IS_BF16, INTERPRETED)
    tl.store(out + row * columns + col, d.to(out.dtype.element_ty), mask=col < columns)


def token_logprobs(logits, ids, temperature, vocab):
    """-> log-probability (M), log-sum-exp (M), float32. See ops_exact.py."""
    check_logprobs(logits, ids, temperature, vocab)
    rows = logits.shape[0]
    logprob = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(logprob)
    if rows:
        _forward_kernel[(rows,)](
            logits, ids, temperature, logprob, lse, vocab, logits.stride(0), LOG2=LOG2_LANES, num_warps=WARPS
        )
    return logprob, lse


def token_logprobs_backward(grad, logits, ids, temperature, lse, vocab):
    """-> d logits (M, V), contiguous. See ops_exact.py."""
    rows, columns = logits.shape
    out = torch.empty(rows, columns, dtype=logits.dtype, device=logits.device)
    if rows:
        _backward_kernel[(rows, ceil_div(columns, BACKWARD_COLUMNS))](
            grad.contiguous(), logits, ids, temperature, lse, out, vocab, columns, logits.stride(0),
            COLUMNS=BACKWARD_COLUMNS, IS_BF16=logits.dtype == torch.bfloat16, INTERPRETED=INTERPRETED, num_warps=8,
        )  # fmt: skip
    return out
