"""What a report says in numbers: differences from BF16, mismatch, speed, averages, phases, and what is not established."""

import math
import re

import pytest
from report_for_tests import (
    STEPS,
    groups_of,
    metrics,
    pictures,
    report,
    table_of,
    write_metrics,
    write_run,
    write_sweep,
)

from jetrl.reporting import compare, measures, tables
from jetrl.reporting.tables import spread_text


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return write_sweep(tmp_path_factory.mktemp("sweep"), seeds=2)


def test_the_difference_from_bf16_is_taken_at_the_last_validation_that_all_share(tmp_path):
    """bf16 0.6 and 0.5, the other 0.52 and 0.5 at step 8: -0.04; sd 0.0707 and 0.0141, together 0.0721."""
    for flow, accuracies in {"bf16": (0.6, 0.5), "unified_fp8": (0.52, 0.5)}.items():
        for seed, accuracy in enumerate(accuracies):
            done = 8 if (flow, seed) == ("unified_fp8", 1) else STEPS
            folder = write_run(tmp_path, flow, seed, done=done)
            steps = {s: r for s, r in metrics(flow, seed).items() if s <= done}
            steps[8]["val-core/arithmetic/acc/mean@1"] = accuracy
            write_metrics(folder / "metrics.jsonl", steps)
    difference = table_of(tmp_path)[1].difference
    assert difference.step == 8
    assert difference.value == pytest.approx(-0.04)
    assert difference.spread == pytest.approx(math.sqrt(2 * 0.05**2 + 2 * 0.01**2))


@pytest.mark.parametrize(("ratio", "text"), [(6.23, "6.2x"), (2549.0, "2500x"), (3.5e11, "1e11 times")])
def test_a_ratio_of_mismatches_has_two_digits_or_its_order_of_magnitude(ratio, text):
    assert compare._times(ratio) == text


def test_runs_that_shared_a_gpu_are_given_no_speed(tmp_path):
    last = []
    for hardware in ("1gpu", "side_by_side"):
        for flow in ("bf16", "unified_fp8"):
            write_run(tmp_path / hardware, flow, choices__hardware=hardware)
        page = tables.flow_table(table_of(tmp_path / hardware))
        last.append([re.sub("<[^>]*>", "", row).split()[-1] for row in page.split("</tr>")[1:-1]])
    (_, alone), (_, shared) = last
    assert re.fullmatch(r".*[0-9]x", alone) and shared.endswith("-")


def test_the_verdict_names_the_flow_that_degrades_and_the_one_that_does_not(sweep):
    text = compare.findings(table_of(sweep))
    assert re.search(r"^unified_fp8: .*(within the seeds' spread|within 0.01 absolute)", text[0])
    assert re.search(r"^fp8_rollout: -0.0\d+ against bf16 .* below it by more than", text[1])
    assert re.search(r"^unified_fp8: mismatch \(k3\) below fp8_rollout's at every step; medians .* lower\)", text[2])


def test_an_fp8_rollout_that_does_not_degrade_is_said_plainly(tmp_path):
    for flow in ("bf16", "fp8_rollout"):
        folder = write_run(tmp_path, flow)
        write_metrics(folder / "metrics.jsonl", metrics("bf16", 0))
    assert "does not degrade here" in compare.findings(table_of(tmp_path))[0]


def test_what_is_not_established_is_said(tmp_path):
    write_run(tmp_path, "unified_fp8", done=5)
    write_run(tmp_path, "fp8_rollout")
    text = " ".join(compare.limits(table_of(tmp_path)))
    for part in ("1 of 2 runs did not finish", "One seed only", "No bf16 run", "precision graph was not checked"):
        assert part in text


def test_a_nan_is_counted_and_neither_averaged_nor_drawn(tmp_path):
    folder = write_run(tmp_path, "bf16")
    steps = metrics("bf16", 0)
    steps[3]["mismatch/k3_kl"] = math.nan
    write_metrics(folder / "metrics.jsonl", steps)
    (group,) = groups_of(folder)
    line = measures.course(group, measures.K3)
    assert line.not_numbers == 1 and 3 not in line.steps
    html = report(folder, out=tmp_path / "r.html")
    assert "NaN or Inf, not drawn: bf16 (1 steps)" in html
    assert not any("nan" in value for p in pictures(html) for e in p.iter() for value in e.attrib.values())


def test_phases_and_the_rest_add_up_to_the_step_and_validation_comes_on_top(sweep):
    (group,) = groups_of(sweep / "bf16-seed=0")
    phases = measures.phase_seconds(group)
    rows = [m for s, m in group.runs[0].steps.items() if s]
    step, testing = (sum(m.get(f"timing_s/{name}", 0) for m in rows) / STEPS for name in ("step", "testing"))
    assert phases["rest of the step"] == pytest.approx(0.3)
    assert phases["validation (testing)"] == pytest.approx(testing) == pytest.approx(2.5 * 3 / STEPS)
    assert sum(phases.values()) == pytest.approx(step + testing)


def test_a_long_run_is_drawn_in_windows_whose_band_keeps_a_spike(tmp_path):
    steps = metrics("bf16", 0, steps=1000, every=500)
    steps[501]["actor/entropy"] = 77.0
    (group,) = groups_of(write_metrics(tmp_path / "long.jsonl", steps))
    line = measures.course(group, measures.COURSE[1])
    assert len(line.steps) <= measures.MOST_POINTS and line.steps[-1] == 1000
    assert max(line.high) == 77.0 and max(line.mean) < 77.0


@pytest.mark.parametrize(
    ("mean", "sd", "text"),
    [
        (12.5519, 0.0691, "12.552 ± 0.069"),
        (6.44e-4, 3.53e-5, "6.44e-4 ± 0.35e-4"),
        (385.2, 10.63, "385 ± 11"),
        (0.5, 0.0, "0.5 ± 0"),
        (0.25, None, "0.25"),
        (math.nan, None, "NaN"),
        (None, None, "not logged"),
    ],
)
def test_mean_and_sd_share_exponent_and_decimals(mean, sd, text):
    assert spread_text(measures.Spread(mean, sd, 3)) == text
