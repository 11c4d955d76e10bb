"""Figures of the rollout's log-probs against the trainer's: over all sampled tokens, by output position and length."""

import torch

from jetrl.metrics import mismatch_metrics

# Output positions; the last bucket has no end.
BUCKET_STARTS = (0, 16, 64, 256, 1024, 2048, 4096, 8192)


def mismatch(rollout: list[torch.Tensor], trainer: list[torch.Tensor]) -> dict:
    """Each a list of (output length,) float32 log-probs, one tensor a sequence.

    Returns {"all": figures, "by_position": [{"from", "to", **figures}], "by_length": [{"length", **figures}]}; a figures
    dict has tokens, differing_tokens (their float32 bits differ), and those of jetrl.metrics without their prefix.
    """
    result = {"all": _figures(torch.cat(rollout), torch.cat(trainer)), "by_position": [], "by_length": []}
    for length in sorted({len(t) for t in rollout}):
        chosen = [(a, b) for a, b in zip(rollout, trainer, strict=True) if len(a) == length]
        theirs, mine = (torch.cat(side) for side in zip(*chosen, strict=True))
        result["by_length"].append({"length": length, **_figures(theirs, mine)})
    longest = max(len(t) for t in rollout)
    ends = [*BUCKET_STARTS[1:], longest]
    for start, end in zip(BUCKET_STARTS, ends, strict=True):
        if start >= longest:
            break
        mine = torch.cat([t[start:end] for t in trainer])
        theirs = torch.cat([t[start:end] for t in rollout])
        result["by_position"].append({"from": start, "to": min(end, longest), **_figures(theirs, mine)})
    return result


def _figures(rollout: torch.Tensor, trainer: torch.Tensor) -> dict:
    rollout, trainer = rollout.float(), trainer.float()
    differing = (rollout.view(torch.int32) != trainer.view(torch.int32)).sum().item()
    metrics = mismatch_metrics(rollout[None], trainer[None], torch.ones_like(rollout[None]))
    return {
        "tokens": rollout.numel(),
        "differing_tokens": differing,
        "mean_log_prob": rollout.double().mean().item(),
        **{name.removeprefix("mismatch/"): value for name, value in metrics.items()},
    }
