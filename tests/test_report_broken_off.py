"""Runs that broke off: what a curve, a comparison and a verdict say when the seeds did not come equally far."""

import json
from statistics import fmean, stdev

import pytest
from report_for_tests import metrics, write_metrics, write_run

from jetrl.errors import UserError
from jetrl.reporting.compare import findings, limits, rows
from jetrl.reporting.graph_verdict import UNKNOWN, Verdict
from jetrl.reporting.groups import different_keys, group_runs
from jetrl.reporting.measures import K3, REWARD, course
from jetrl.reporting.page import html_page
from jetrl.reporting.pictures import draw, sections
from jetrl.reporting.runs import load_runs

K3_NAME, REWARD_NAME = "mismatch/k3_kl", "critic/rewards/mean"


def _table(*paths):
    runs, _ = load_runs([str(path) for path in paths])
    return rows(group_runs(runs), {run.name: Verdict(UNKNOWN, "") for run in runs})


def _row(table, flow):
    return next(row for row in table if row.group.flow == flow)


def test_behind_the_step_that_all_seeds_reached_the_curve_is_faint_and_the_band_of_those_left(tmp_path):
    for seed, done in enumerate((3, 7, 12)):
        write_run(tmp_path, "bf16", seed, done)
    (group,) = group_runs(load_runs([str(tmp_path)])[0])
    line = course(group, REWARD)
    logged = [[metrics("bf16", seed)[step][REWARD_NAME] for seed in range(3)] for step in range(1, 13)]
    assert line.whole == 3 and line.steps == list(range(1, 13))
    for step, mean, low, high in zip(line.steps, line.mean, line.low, line.high, strict=True):
        left = logged[step - 1][0 if step <= 3 else 1 if step <= 7 else 2 :]
        assert (mean, low, high) == pytest.approx((fmean(left), min(left), max(left)))
    picture = draw(REWARD, [group])
    assert picture.svg.count(" faint") == 1
    assert "fewer seeds, others had ended (bf16 after step 3)" in " ".join(picture.notes)


def test_seeds_that_end_together_are_drawn_without_a_faint_part(tmp_path):
    for seed in range(2):
        write_run(tmp_path, "bf16", seed, done=6)
    picture = draw(REWARD, group_runs(load_runs([str(tmp_path)])[0]))
    assert "faint" not in picture.svg and "fewer seeds" not in " ".join(picture.notes)


def test_a_seed_that_logged_nothing_is_not_counted_in_the_legend(tmp_path):
    for seed, done in enumerate((6, 6, 0)):
        write_run(tmp_path, "bf16", seed, done)
    picture = draw(REWARD, group_runs(load_runs([str(tmp_path)])[0]))
    assert "bf16 (2 of 3 seeds)" in picture.svg and "faint" not in picture.svg


def test_without_a_shared_validation_the_reward_is_compared_by_seed_over_the_steps_that_all_reached(tmp_path):
    for seed, done in enumerate((12, 7, 12)):
        write_run(tmp_path, "bf16", seed, done)
    for seed, done in enumerate((3, 12, 12)):  # validation comes every 4 steps
        write_run(tmp_path, "unified_fp8", seed, done)
    table = _table(tmp_path)
    row = _row(table, "unified_fp8")
    reward = {
        (f, s): [metrics(f, s)[t][REWARD_NAME] for t in (1, 2, 3)] for f in ("bf16", "unified_fp8") for s in range(3)
    }
    by_seed = [fmean(reward["unified_fp8", s]) - fmean(reward["bf16", s]) for s in range(3)]
    assert row.difference is None
    assert (row.paired.step, row.paired.seeds) == (3, 3)
    assert row.paired.value == pytest.approx(fmean(by_seed))
    assert row.paired.error == pytest.approx(stdev(by_seed) / 3**0.5)
    assert "against bf16 in training reward, mean over steps 1 to 3 and 3 seeds" in findings(table)[0]
    assert any("compared by training reward: unified_fp8" in line for line in limits(table))
    assert not any("Not compared with bf16" in line for line in limits(table))


def test_one_seed_is_paired_with_its_own_and_not_with_the_first(tmp_path):
    for seed in range(3):
        write_run(tmp_path, "bf16", 0, 3, f"bf16-{seed}", data__seed=seed)
    write_run(tmp_path, "unified_fp8", 0, 3, "unified-2", data__seed=2)
    for seed in range(3):  # the invented metrics know task.seed only
        write_metrics(
            tmp_path / f"bf16-{seed}" / "metrics.jsonl", {s: m for s, m in metrics("bf16", seed).items() if s <= 3}
        )
    paired = _row(_table(tmp_path), "unified_fp8").paired
    own = [metrics("unified_fp8", 0)[t][REWARD_NAME] - metrics("bf16", 2)[t][REWARD_NAME] for t in (1, 2, 3)]
    assert paired.seeds == 1 and paired.error is None and paired.value == pytest.approx(fmean(own))


def test_without_bf16_before_and_after_are_of_the_same_seeds(tmp_path):
    for seed, done in enumerate((12, 3)):
        folder = write_run(tmp_path, "unified_fp8", seed, done)
        steps = {step: row for step, row in metrics("unified_fp8", seed).items() if step <= done}
        steps[0] = {"val-core/arithmetic/acc/mean@1": 0.3 if seed == 0 else 0.9}
        write_metrics(folder / "metrics.jsonl", steps)
    table = _table(tmp_path)
    assert "validation accuracy 0.300 before" in findings(table)[0]
    assert "(1 of 2 seeds)" in html_page([r for row in table for r in row.group.runs], table, sections(table))


def test_a_marked_step_is_drawn_and_named_and_in_no_mismatch_average(tmp_path):
    for flow in ("fp8_rollout", "unified_fp8"):
        folder = write_run(tmp_path, flow)
    steps = metrics("unified_fp8", 0)
    clean = [steps[t][K3_NAME] for t in range(1, 13) if t != 5]
    steps[5][K3_NAME] = 0.5
    write_metrics(folder / "metrics.jsonl", steps)
    assert any("at 11 of 12 steps only" in line for line in findings(_table(tmp_path)))
    (folder / "marked.json").write_text(json.dumps({"5": "weights of another job"}))
    table = _table(tmp_path)
    row = _row(table, "unified_fp8")
    assert row.mismatch["k3"].mean == pytest.approx(fmean(clean))
    assert any("below fp8_rollout's at every step" in line for line in findings(table))
    assert any(f"{folder.name} step 5 (weights of another job)" in line for line in limits(table))
    picture = draw(K3, [row.group])
    assert "step 5: 0.5" in picture.svg and "Marked steps are drawn" in " ".join(picture.notes)
    # A mark is about the mismatch: what the step was rewarded with was learned from all the same.
    assert 5 in course(row.group, REWARD).steps and "Marked" not in " ".join(draw(REWARD, [row.group]).notes)


@pytest.mark.parametrize("text", ["", "[5]", '{"five": "why"}'])
def test_a_mark_that_cannot_be_read_is_an_error(tmp_path, text):
    folder = write_run(tmp_path, "bf16")
    (folder / "marked.json").write_text(text)
    with pytest.raises(UserError, match="does not map steps to reasons"):
        load_runs([str(folder)])


def test_the_gemm_backend_that_only_a_flow_with_fp8_in_the_rollout_passes_on_is_no_difference_beside_the_flow():
    passed_on = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.jetrl_gemm"
    assert different_keys([{"gemm": "auto"}, {"gemm": "auto", passed_on: "auto"}]) == []
    assert different_keys([{"gemm": "auto"}, {"gemm": "triton", passed_on: "triton"}]) == ["gemm"]


def test_runs_that_share_a_gpu_say_that_their_seconds_compare_nothing(tmp_path):
    write_run(tmp_path, "bf16", choices__hardware="side_by_side")
    assert any("their seconds do not compare flows" in line for line in limits(_table(tmp_path)))
