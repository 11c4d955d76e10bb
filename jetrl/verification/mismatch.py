"""Figures of the rollout's log-probs against the trainer's: over all sampled tokens, by output position and length."""

import torch

from jetrl.metrics import mismatch_metrics

# Output positions; the last bucket has no end.
BUCKET_STARTS = (0, 16, 64, 256, 1024, 2048, 4096, 8192)
SHOWN_TOKENS = 8


def mismatch(rollout: list[torch.Tensor], trainer: list[torch.Tensor]) -> dict:
    """Each a list of (output length,) float32 log-probs, one tensor a sequence.

    Returns {"all": figures, "by_position": [{"from", "to", **figures}], "by_length": [{"length", **figures}],
    "first_differing": [{"sequence", "position", "rollout", "trainer"}], the first few}; a figures dict has tokens,
    differing_tokens (their float32 bits differ), and those of jetrl.metrics without their prefix.
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
    result["first_differing"] = _first_differing(rollout, trainer)
    return result


def _first_differing(rollout: list[torch.Tensor], trainer: list[torch.Tensor]) -> list[dict]:
    """By output position, then by sequence."""
    found = []
    for sequence, (theirs, mine) in enumerate(zip(rollout, trainer, strict=True)):
        for position in torch.nonzero(_bits(theirs) != _bits(mine)).flatten().tolist()[:SHOWN_TOKENS]:
            found.append(
                {
                    "sequence": sequence,
                    "position": position,
                    "rollout": theirs[position].item(),
                    "trainer": mine[position].item(),
                }
            )
    return sorted(found, key=lambda f: (f["position"], f["sequence"]))[:SHOWN_TOKENS]


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.float().view(torch.int32)


def _figures(rollout: torch.Tensor, trainer: torch.Tensor) -> dict:
    rollout, trainer = rollout.float(), trainer.float()
    differing = (_bits(rollout) != _bits(trainer)).sum().item()
    metrics = mismatch_metrics(rollout[None], trainer[None], torch.ones_like(rollout[None]))
    return {
        "tokens": rollout.numel(),
        "differing_tokens": differing,
        "mean_log_prob": rollout.double().mean().item(),
        **{name.removeprefix("mismatch/"): value for name, value in metrics.items()},
    }
