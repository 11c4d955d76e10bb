"""Mismatch between the rollout and the actor: one token's log-prob under both, before any update."""

import torch


def mismatch_metrics(
    rollout_log_probs: torch.Tensor, actor_log_probs: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, float]:
    """Per-batch figures over the tokens where `response_mask` is true; all three (batch, response length).

    With d = actor - rollout per token, in float64:
    k3_kl = mean(exp(d) - d - 1), the k3 estimator of KL(rollout || actor), never negative (Schulman 2020);
    abs_logprob_diff_{p50,p99,max} = quantiles of |d|, linear interpolation;
    token_mult_prob_error = mean(exp(|d|)), 1 when the engines agree (NeMo RL's definition).
    A NaN in either input is kept, so that it is seen. Returns {} for an empty mask.
    """
    mask = response_mask.bool()
    d = (actor_log_probs.double() - rollout_log_probs.double())[mask]
    if d.numel() == 0:
        return {}
    magnitude = d.abs()
    return {
        "mismatch/k3_kl": (torch.expm1(d) - d).mean().item(),
        "mismatch/abs_logprob_diff_p50": _quantile(magnitude, 0.50),
        "mismatch/abs_logprob_diff_p99": _quantile(magnitude, 0.99),
        "mismatch/abs_logprob_diff_max": magnitude.max().item(),
        "mismatch/token_mult_prob_error": magnitude.exp().mean().item(),
    }


def _quantile(values: torch.Tensor, q: float) -> float:
    """torch.quantile refuses more than 2**24 elements, which a long-rollout batch exceeds."""
    ordered = values.sort().values
    position = q * (ordered.numel() - 1)
    low = int(position)
    high = min(low + 1, ordered.numel() - 1)
    return torch.lerp(ordered[low], ordered[high], position - low).item()
