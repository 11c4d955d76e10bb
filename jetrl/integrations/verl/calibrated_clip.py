"""Calibrated clipping: PPO's clipped loss with bounds that clip in FP8 the share of tokens that BF16 would clip.

Source: "Towards Full Pipeline FP8 RL", arXiv 2609.22870: noise in log pi_theta and log pi_old adds up in the ratio
r = exp(log pi_theta - log pi_old), so more tokens leave [1 - eps, 1 + eps] than in BF16. There as here the lower bound is
searched in [0.5, 0.9] and the upper one in [1.2, 2.0] in steps of 0.02, for the share nearest to BF16's.
"""

from dataclasses import dataclass

import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, register_policy_loss

from jetrl.calibration import LOSS_MODE

LOW_GRID = tuple(round(0.5 + 0.02 * i, 2) for i in range(21))
HIGH_GRID = tuple(round(1.2 + 0.02 * i, 2) for i in range(41))


@dataclass(frozen=True)
class ClipBounds:
    """The ratio is clipped to [low, high]."""

    low: float
    high: float

    @classmethod
    def of(cls, config) -> "ClipBounds":
        """The job's own bounds: VeRL's clip_ratio_low and clip_ratio_high where set, else clip_ratio on both sides."""
        low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
        high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
        return cls(1 - low, 1 + high)


def tail_counts(log_ratio: torch.Tensor, lows: tuple[float, ...], highs: tuple[float, ...]) -> torch.Tensor:
    """How many of the tokens (1-D) have a ratio below each of `lows` and above each of `highs`, then how many there are.

    float64, so that ranks can be summed exactly. A NaN counts as a token in neither tail.
    """
    ratio = log_ratio.double().exp()
    below = [(ratio < low).sum() for low in lows]
    above = [(ratio > high).sum() for high in highs]
    return torch.stack([*below, *above, torch.tensor(ratio.numel(), device=ratio.device)]).double()


def fit(flow: torch.Tensor, shadow: torch.Tensor, base: ClipBounds) -> ClipBounds:
    """The grid's bounds at which the flow's clipped shares are nearest to the shadow's at `base`.

    flow: tail_counts over the whole grids. shadow: tail_counts over (base.low,) and (base.high,). Of bounds that are
    equally near, the one nearest to `base`: where nothing is clipped on either side, the bounds stay as they are.
    """
    flow_share, shadow_share = flow[:-1] / flow[-1], shadow[:-1] / shadow[-1]
    low = _nearest(LOW_GRID, flow_share[: len(LOW_GRID)], shadow_share[0], base.low)
    high = _nearest(HIGH_GRID, flow_share[len(LOW_GRID) :], shadow_share[1], base.high)
    return ClipBounds(low, high)


def _nearest(grid: tuple[float, ...], shares: torch.Tensor, wanted: torch.Tensor, base: float) -> float:
    distances = (shares - wanted).abs().tolist()
    return min(zip(distances, (abs(bound - base) for bound in grid), grid, strict=True))[2]


class Calibration:
    """base: the job's own bounds, known from the first loss on. fitted: what replaces them, from the first fit on."""

    base: ClipBounds | None = None
    fitted: ClipBounds | None = None


# One actor lives in a worker process, and VeRL's registry hands a loss nothing but its configuration.
CALIBRATION = Calibration()


class _Rebound:
    """VeRL's actor configuration with other clip bounds. Its fields are frozen, and other losses read the original."""

    def __init__(self, config, bounds: ClipBounds) -> None:
        self._config = config
        self.clip_ratio_low, self.clip_ratio_high = 1 - bounds.low, bounds.high - 1

    def __getattr__(self, name: str):
        return getattr(self._config, name)


def calibrated_clip(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config=None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """VeRL's `vanilla` loss within the calibrated bounds, which it reports. All tensors (sequences, tokens)."""
    CALIBRATION.base = ClipBounds.of(config)
    bounds = CALIBRATION.fitted or CALIBRATION.base
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, _Rebound(config, bounds), rollout_is_weights
    )
    return loss, {**metrics, "actor/clip_low": bounds.low, "actor/clip_high": bounds.high}


def register() -> None:
    """Into VeRL's policy-loss registry. Idempotent."""
    register_policy_loss(LOSS_MODE)(calibrated_clip)
