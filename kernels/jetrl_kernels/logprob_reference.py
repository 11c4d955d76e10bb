"""Torch reference of a token's log-probability from logits, and its backward. float32 throughout."""

import torch


def _scaled(logits: torch.Tensor, temperature: torch.Tensor, vocab: int) -> torch.Tensor:
    return logits[:, :vocab].to(torch.float32) / temperature.unsqueeze(1)


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / temperature)[ids] over the first `vocab` columns, and the log-sum-exp; both (M) float32.

    logits (M, V) bfloat16 or float32, ids (M) integers, temperature (M) float32 > 0. An id below 0 or not below vocab has
    no probability: NaN.
    """
    z = _scaled(logits, temperature, vocab)
    inside, column = _columns(ids, vocab)
    logprob = torch.log_softmax(z, dim=-1).gather(1, column.unsqueeze(1)).squeeze(1)
    return logprob.masked_fill(~inside, float("nan")), torch.logsumexp(z, dim=-1)


def _columns(ids: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which ids lie in the vocabulary, and ids that can be looked up (0 in the place of those that do not)."""
    inside = (ids >= 0) & (ids < vocab)
    return inside, ids.long().masked_fill(~inside, 0)


def token_logprobs_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    lse: torch.Tensor,
    vocab: int,
) -> torch.Tensor:
    """d loss / d logits = grad (onehot(ids) - softmax) / temperature, in the dtype of logits; 0 beyond vocab.

    An id outside the vocabulary has no column in onehot.
    """
    d = -torch.exp(_scaled(logits, temperature, vocab) - lse.unsqueeze(1))
    inside, column = _columns(ids, vocab)
    d.scatter_add_(1, column.unsqueeze(1), inside.to(d.dtype).unsqueeze(1))
    result = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    result[:, :vocab] = (d * (grad / temperature).unsqueeze(1)).to(logits.dtype)
    return result
