"""Mismatch figures against hand-computed values."""

import math

import pytest
import torch

from jetrl.metrics import mismatch_metrics


def test_hand_computed_batch():
    rollout = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -9.0]])
    actor = torch.tensor([[-1.5, -2.0, -2.0], [-1.0, -0.9, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    d = [-0.5, 0.0, 1.0, 0.0, 0.1]
    got = mismatch_metrics(rollout, actor, mask)
    # The inputs are float32, so d = 0.1 is off by up to 2^-24; everything after it is float64.
    assert got["mismatch/k3_kl"] == pytest.approx(sum(math.exp(x) - x - 1 for x in d) / 5, rel=1e-6)
    assert got["mismatch/abs_logprob_diff_p50"] == pytest.approx(0.1, rel=1e-6)
    assert got["mismatch/abs_logprob_diff_max"] == 1.0
    # Five sorted values 0, 0, .1, .5, 1: position 0.99 * 4 = 3.96 lies 96 % of the way from .5 to 1.
    assert got["mismatch/abs_logprob_diff_p99"] == pytest.approx(0.98, rel=1e-6)
    assert got["mismatch/token_mult_prob_error"] == pytest.approx(sum(math.exp(abs(x)) for x in d) / 5, rel=1e-6)


def test_equal_log_probs_give_exactly_zero():
    x = torch.randn(4, 7)
    got = mismatch_metrics(x, x.clone(), torch.ones(4, 7))
    assert got["mismatch/k3_kl"] == 0.0 and got["mismatch/abs_logprob_diff_max"] == 0.0
    assert got["mismatch/token_mult_prob_error"] == 1.0


def test_small_differences_do_not_cancel():
    """exp(d) - 1 - d for d = 1e-6 is 5e-13; computed as exp(d) - d - 1 in float64 it would carry an error of 1e-16 / 5e-13."""
    actor = torch.full((1, 8), 1e-6, dtype=torch.float64)
    got = mismatch_metrics(torch.zeros(1, 8, dtype=torch.float64), actor, torch.ones(1, 8))
    assert got["mismatch/k3_kl"] == pytest.approx(5e-13, rel=1e-3)


def test_a_nan_is_seen_and_an_empty_mask_gives_nothing():
    x = torch.zeros(1, 4)
    assert math.isnan(
        mismatch_metrics(x, torch.tensor([[0.0, float("nan"), 0, 0]]), torch.ones(1, 4))["mismatch/k3_kl"]
    )
    assert mismatch_metrics(x, x, torch.zeros(1, 4)) == {}


def test_quantile_of_more_elements_than_torch_quantile_takes():
    n = 2**24 + 10
    actor = torch.linspace(0, 1, n, dtype=torch.float32).view(1, -1)
    got = mismatch_metrics(torch.zeros(1, n), actor, torch.ones(1, n, dtype=torch.bool))
    assert got["mismatch/abs_logprob_diff_p99"] == pytest.approx(0.99, abs=1e-6)
