"""A token's log-probability with autograd, on the operator that the rollout's sampler calls."""

import jetrl_kernels.ops  # noqa: F401  (registers torch.ops.jetrl)
import torch


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ids, temperature, vocab):
        logprob, lse = torch.ops.jetrl.token_logprobs(logits, ids, temperature, vocab)
        ctx.save_for_backward(logits, ids, temperature, lse)
        ctx.vocab = vocab
        return logprob

    @staticmethod
    def backward(ctx, grad):
        logits, ids, temperature, lse = ctx.saved_tensors
        d = torch.ops.jetrl.token_logprobs_backward(grad.contiguous(), logits, ids, temperature, lse, ctx.vocab)
        return d, None, None, None


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, vocab: int) -> torch.Tensor:
    """log softmax(logits / temperature)[ids] over the first `vocab` columns, (M) float32; differentiable in logits.

    logits (M, V) bfloat16 or float32, ids (M) int64, temperature (M) float32. Saves logits, no second (M, V) tensor.
    """
    return _TokenLogprobs.apply(logits, ids, temperature, vocab)
