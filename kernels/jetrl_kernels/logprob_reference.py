"""Torch reference of a token's log-probability from logits, and its backward. float32 throughout."""

import torch


def _scaled(logits: torch.Tensor, temperature: torch.Tensor, vocab: int) -> torch.Tensor:
    return logits[:, :vocab].to(torch.float32) / temperature.unsqueeze(1)


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / temperature)[ids] over the first `vocab` columns, and the log-sum-exp; both (M) float32.

    logits (M, V) bfloat16 or float32, ids (M) integers below vocab, temperature (M) float32 > 0.
    """
    z = _scaled(logits, temperature, vocab)
    logprob = torch.log_softmax(z, dim=-1).gather(1, ids.unsqueeze(1).long()).squeeze(1)
    return logprob, torch.logsumexp(z, dim=-1)


def token_logprobs_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    lse: torch.Tensor,
    vocab: int,
) -> torch.Tensor:
    """d loss / d logits = grad (onehot(ids) - softmax) / temperature, in the dtype of logits; 0 beyond vocab."""
    d = -torch.exp(_scaled(logits, temperature, vocab) - lse.unsqueeze(1))
    d.scatter_add_(1, ids.unsqueeze(1).long(), torch.ones_like(lse).unsqueeze(1))
    result = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    result[:, :vocab] = (d * (grad / temperature).unsqueeze(1)).to(logits.dtype)
    return result
