"""Calibrated clipping: the fit against cases worked by hand, the loss against VeRL's own, the node, the shadow forward."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from launch_for_tests import composed
from transformers import AutoModelForCausalLM

pytest.importorskip("verl")
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, compute_policy_loss_vanilla

from jetrl.calibration import WIRE_KEY, CalibratedClip, calibration_of
from jetrl.convert import convert, stock_forward
from jetrl.data.models import TINY, resolve_model_path
from jetrl.errors import UserError
from jetrl.integrations.verl import calibrated_clip as module
from jetrl.integrations.verl.calibrated_clip import HIGH_GRID, LOW_GRID, ClipBounds, fit, tail_counts
from jetrl.precision.build_hf import build_training_graph
from jetrl.precision.flow import PrecisionAssignment, load_flow
from jetrl.precision.job import read_job

BASE = ClipBounds(0.8, 1.2)


def fitted(flow_ratios: list[float], shadow_ratios: list[float], base: ClipBounds = BASE) -> ClipBounds:
    flow, shadow = (torch.tensor(r, dtype=torch.float64).log() for r in (flow_ratios, shadow_ratios))
    return fit(tail_counts(flow, LOW_GRID, HIGH_GRID), tail_counts(shadow, (base.low,), (base.high,)), base)


def test_the_grids_are_the_papers():
    assert (LOW_GRID[0], LOW_GRID[-1], HIGH_GRID[0], HIGH_GRID[-1]) == (0.5, 0.9, 1.2, 2.0)
    steps = [b - a for grid in (LOW_GRID, HIGH_GRID) for a, b in zip(grid, grid[1:], strict=False)]
    assert steps == pytest.approx([0.02] * 60)


def test_bounds_move_out_to_where_fp8_clips_what_bf16_clips():
    """BF16: one of ten below 0.8, one of ten above 1.2. FP8, twice as wide: three below 0.8 and two above 1.2.

    FP8 has exactly one ratio below L for L in (0.55, 0.71] and one above H for H in [1.31, 1.57): the grid's nearest to
    the base are 0.70 and 1.32.
    """
    bf16 = [0.77, 0.85, 0.90, 0.95, 1.0, 1.0, 1.05, 1.10, 1.15, 1.25]
    fp8 = [0.55, 0.71, 0.79, 0.90, 1.0, 1.0, 1.10, 1.19, 1.31, 1.57]
    assert fitted(fp8, bf16) == ClipBounds(0.70, 1.32)


def test_without_noise_the_bounds_stay():
    ratios = [0.7, 0.9, 1.0, 1.1, 1.3]
    assert fitted(ratios, ratios) == BASE
    assert fitted([1.0] * 5, [1.0] * 5) == BASE  # nothing clipped anywhere: every bound is equally near
    assert fitted(ratios, ratios, ClipBounds(0.8, 1.28)) == ClipBounds(0.8, 1.28)


def test_bounds_end_at_the_grids_edge():
    """BF16 clips nothing; half of FP8's ratios are beyond every bound of the grid, so all bounds are equally far and the
    base stays; with some at 0.6 and 1.9 in between, the far end is nearer."""
    assert fitted([0.1, 0.1, 3.0, 3.0], [1.0] * 4) == BASE
    assert fitted([0.1, 0.6, 1.9, 3.0], [1.0] * 4) == ClipBounds(0.60, 1.90)


def test_a_nan_is_in_neither_tail_but_counts_as_a_token():
    counts = tail_counts(torch.tensor([math.nan, math.log(0.5)]), (0.8,), (1.2,))
    assert counts.tolist() == [1.0, 0.0, 2.0]


def test_counts_of_ranks_add_up():
    """The fit over two ranks' summed counts is the fit over all tokens."""
    torch.manual_seed(0)
    flow, shadow = torch.randn(400) * 0.2, torch.randn(400) * 0.1
    grids = ((flow, LOW_GRID, HIGH_GRID), (shadow, (0.8,), (1.2,)))
    parts = [sum(tail_counts(half, low, high) for half in values.chunk(2)) for values, low, high in grids]
    assert fit(*parts, BASE) == fit(*(tail_counts(*grid) for grid in grids), BASE) != BASE


# --- the loss


@pytest.fixture
def config():
    return SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=None,
        clip_ratio_high=0.28,
        global_batch_info={},
        get=lambda key, default: default,
    )


@pytest.fixture
def batch():
    torch.manual_seed(1)
    old = -torch.rand(4, 16)
    new = (old + torch.randn(4, 16) * 0.3).requires_grad_()
    return {"old_log_prob": old, "log_prob": new, "advantages": torch.randn(4, 16), "response_mask": torch.ones(4, 16)}


@pytest.fixture(autouse=True)
def fresh_bounds(monkeypatch):
    monkeypatch.setattr(module, "CALIBRATION", module.Calibration())


def test_before_the_first_fit_it_is_verls_loss(config, batch):
    loss, metrics = module.calibrated_clip(**batch, config=config)
    stock, stock_metrics = compute_policy_loss_vanilla(**batch, config=config)
    assert loss == stock and metrics == {**stock_metrics, "actor/clip_low": 0.8, "actor/clip_high": 1.28}


def test_after_a_fit_its_bounds_hold_in_value_and_gradient(config, batch):
    module.CALIBRATION.fitted = ClipBounds(0.7, 1.5)
    loss, metrics = module.calibrated_clip(**batch, config=config)
    (gradient,) = torch.autograd.grad(loss, batch["log_prob"])
    ratio = (batch["log_prob"] - batch["old_log_prob"]).exp()
    wide = torch.maximum(-batch["advantages"] * ratio, -batch["advantages"] * ratio.clamp(0.7, 1.5))
    expected = wide.mean()  # no ratio here passes the dual clip's 3.0
    assert ratio.max() < 3.0
    (expected_gradient,) = torch.autograd.grad(expected, batch["log_prob"])
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert (metrics["actor/clip_low"], metrics["actor/clip_high"]) == (0.7, 1.5)
    assert (config.clip_ratio, config.clip_ratio_high) == (0.2, 0.28)


def test_it_is_in_verls_registry():
    module.register()
    assert POLICY_LOSS_REGISTRY["calibrated_clip"] is module.calibrated_clip


# --- the node


def test_it_is_off_by_default_and_reaches_the_worker_when_chosen(tmp_path):
    assert calibration_of(composed(tmp_path)) is None
    cfg = composed(tmp_path, "algorithm=grpo_calibrated", "calibrated_clip.every=5")
    wire = cfg.actor_rollout_ref.model.override_config[WIRE_KEY]
    assert CalibratedClip.from_wire(wire) == CalibratedClip(every=5, sequences=32)
    assert load_flow(cfg.actor_rollout_ref.model.override_config.jetrl_flow).shadow == PrecisionAssignment("bf16")
    assert any(
        "shadow pass, forward only, linears bf16" in note for note in read_job(cfg).notes
    )  # jetrl.check prints it


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("calibrated_clip.every=0", "calibrated_clip.every=0 must be a whole number of at least 1"),
        ("+calibrated_clip.steps=3", "calibrated_clip.steps is unknown or missing; its keys are every, sequences"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=vanilla", "loss_mode=vanilla would ignore calibrated_clip"),
        ("flow.shadow.linear=fp8", "flow.shadow.linear=fp8 is not supported"),
        ("algorithm.rollout_correction.bypass_mode=true", "skips the pass that calibrated_clip samples from"),
    ],
)
def test_a_part_without_the_others_is_refused(tmp_path, word, says):
    with pytest.raises(UserError) as caught:
        composed(tmp_path, "algorithm=grpo_calibrated", word)
    assert says in str(caught.value)


def test_the_loss_alone_is_refused(tmp_path):
    with pytest.raises(UserError, match="needs algorithm=grpo_calibrated"):
        composed(tmp_path, "actor_rollout_ref.actor.policy_loss.loss_mode=calibrated_clip")


# --- the shadow forward


def test_the_shadow_forward_has_the_bits_of_the_unconverted_model_and_leaves_no_trace():
    stock = AutoModelForCausalLM.from_pretrained(resolve_model_path(TINY), dtype=torch.bfloat16)
    model = copy.deepcopy(stock)
    convert(model, build_training_graph(model, load_flow("unified_fp8").train))
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        before = model(ids).logits
        expected = stock(ids).logits
        with stock_forward(model):
            inside = model(ids).logits
        after = model(ids).logits
    assert torch.equal(inside, expected)
    assert torch.equal(before, after) and not torch.equal(before, expected)
