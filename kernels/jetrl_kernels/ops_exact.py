"""The custom ops that the exact flow adds to ops.py: rotary embedding and a token's log-probability.

rotary(q, k, cos, sin, positions?, inverse)             -> q', k' contiguous
    q (T, Hq, D), k (T, Hk, D): contiguous along D, any other strides; cos, sin (rows, R/2) in the same dtype, any row
    stride, R <= D; positions (T) int64: the row of each token, None where row t belongs to token t
qk_norm_rotary(q, k, q_weight, k_weight, eps, cos, sin, positions?) -> q', k', 1/rms (T, Hq), 1/rms (T, Hk) float32
    the bits of rms_norm over every head by itself, then rotary
token_logprobs(logits, ids, temperature, vocab)         -> log-probability (M), log-sum-exp (M), float32
    logits (M, V) bfloat16 or float32, contiguous along V; ids (M) int64; temperature (M) float32; columns beyond vocab
    count as -inf; the log-probability of an id below 0 or not below vocab is NaN
token_logprobs_backward(grad, logits, ids, temperature, lse, vocab) -> d logits (M, V)
"""

import torch

from jetrl_kernels import logprob_reference, rotary_reference
from jetrl_kernels.ops import _define

CARRIERS = (torch.bfloat16, torch.float32)


def check_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None
) -> None:
    """Refuse shapes and dtypes that do not describe a rotary embedding. Raises ValueError."""
    if q.dim() != 3 or k.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(f"rotary takes q and k as (tokens, heads, size), got {tuple(q.shape)} and {tuple(k.shape)}")
    if q.dtype not in CARRIERS or any(t.dtype != q.dtype for t in (k, cos, sin)):
        raise ValueError(
            f"rotary takes q, k, cos and sin all in bfloat16 or all in float32, got {q.dtype}, {k.dtype}, {cos.dtype} "
            f"and {sin.dtype}"
        )
    if q.stride(2) != 1 or k.stride(2) != 1 or cos.stride(-1) != 1 or sin.stride(-1) != 1:
        raise ValueError("rotary takes tensors that are contiguous along their last dimension")
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[2]:
        raise ValueError(
            f"rotary takes cos and sin as (rows, half of the rotated size) with at most {q.shape[2] // 2} columns, got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if positions is None and cos.shape[0] != q.shape[0]:
        raise ValueError(f"rotary without positions takes one row of cos a token, got {cos.shape[0]} for {q.shape[0]}")


def check_logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, vocab: int) -> None:
    """Refuse operands of token_logprobs with wrong shapes or dtypes. Raises ValueError."""
    if logits.dim() != 2 or logits.dtype not in CARRIERS or logits.stride(1) != 1:
        raise ValueError(
            f"token_logprobs takes logits (tokens, vocabulary) in bfloat16 or float32 with contiguous rows, got "
            f"{tuple(logits.shape)} {logits.dtype}"
        )
    rows = (logits.shape[0],)
    if ids.shape != rows or temperature.shape != rows or temperature.dtype != torch.float32:
        raise ValueError(
            f"token_logprobs takes one id and one float32 temperature for each of {rows[0]} rows, got "
            f"{tuple(ids.shape)} and {tuple(temperature.shape)} {temperature.dtype}"
        )
    if not 0 < vocab <= logits.shape[1]:
        raise ValueError(f"vocab={vocab} must lie between 1 and the {logits.shape[1]} columns of the logits")


def _rotary(q, k, cos, sin, positions, inverse):
    check_rotary(q, k, cos, sin, positions)
    return rotary_reference.rotary(q, k, cos, sin, positions, inverse)


def _qk_norm_rotary(q, k, q_weight, k_weight, eps, cos, sin, positions):
    check_rotary(q, k, cos, sin, positions)
    return rotary_reference.qk_norm_rotary(q, k, q_weight, k_weight, eps, cos, sin, positions)


def _token_logprobs(logits, ids, temperature, vocab):
    check_logprobs(logits, ids, temperature, vocab)
    return logprob_reference.token_logprobs(logits, ids, temperature, vocab)


def _fake_rotary(q, k, cos, sin, positions, inverse):
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _fake_qk_norm_rotary(q, k, q_weight, k_weight, eps, cos, sin, positions):
    rstds = (torch.empty(x.shape[:2], dtype=torch.float32, device=x.device) for x in (q, k))
    return (*_fake_rotary(q, k, cos, sin, positions, False), *rstds)


def _fake_token_logprobs(logits, ids, temperature, vocab):
    return tuple(torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(2))


_define(
    "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? positions, bool inverse) -> (Tensor, Tensor)",
    _rotary,
    "rotary_triton",
    _fake_rotary,
)
_define(
    "qk_norm_rotary(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, Tensor cos, Tensor sin,"
    " Tensor? positions) -> (Tensor, Tensor, Tensor, Tensor)",
    _qk_norm_rotary,
    "rotary_triton",
    _fake_qk_norm_rotary,
)
_define(
    "token_logprobs(Tensor logits, Tensor ids, Tensor temperature, SymInt vocab) -> (Tensor, Tensor)",
    _token_logprobs,
    "logprob_triton",
    _fake_token_logprobs,
)
_define(
    "token_logprobs_backward(Tensor grad, Tensor logits, Tensor ids, Tensor temperature, Tensor lse, SymInt vocab)"
    " -> Tensor",
    logprob_reference.token_logprobs_backward,
    "logprob_triton",
    lambda grad, logits, ids, temperature, lse, vocab: logits.new_empty(logits.shape),
)
