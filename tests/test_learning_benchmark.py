"""The pieces of benchmarks/learning on a tiny model: same data for every variant, curves, gradient measures, report."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks is no installed package

from benchmarks.learning import gradients, model, report, stream, train

SIZE, ROWS, LENGTH = model.SIZES["tiny"], 2, 128


def test_batches_are_shuffled_windows_of_the_text_each_used_once():
    text = torch.arange(161, dtype=torch.uint8)
    seen = torch.cat([stream.batch(text, number, 4, 8, seed=3) for number in range(5)])
    assert seen.shape == (20, 9) and torch.equal(seen[:, 0].sort().values, torch.arange(0, 160, 8))
    assert torch.equal(seen, seen[:, :1] + torch.arange(9))
    assert torch.equal(stream.batch(text, 5, 4, 8, seed=3), seen[:4])
    assert not torch.equal(stream.batch(text, 0, 4, 8, seed=4), seen[:4])


def test_the_control_starts_one_bf16_step_away_and_computes_as_bf16_does():
    weights = model.initial_weights(SIZE, LENGTH, 0)
    other = model.nudged(weights)
    changed = [name for name in weights if not torch.equal(weights[name].bfloat16(), other[name].bfloat16())]
    assert changed == ["model.norm.weight"]
    assert torch.nextafter(torch.tensor(1.0).bfloat16(), torch.tensor(2.0).bfloat16()) == other[changed[0]][0]
    assert int((weights[changed[0]] != other[changed[0]]).sum()) == 1
    kinds = [[type(m) for m in model.build(SIZE, LENGTH, v, weights, "cpu").modules()] for v in ("bf16", model.NUDGED)]
    assert kinds[0] == kinds[1]


@pytest.mark.slow
def test_runs_learn_and_are_compared_with_bf16_of_the_same_seed(tmp_path):
    runs = [train.run(variant, 0, 60, ROWS, LENGTH, "tiny", "cpu", False) for variant in ("bf16", "unified_fp8")]
    for run in runs:
        (tmp_path / f"{run['variant']}.json").write_text(json.dumps(run))
        assert run["loss"][-1] < run["loss"][0] - 1
    # The first loss comes from the same weights and batch: BF16 and FP8 arithmetic differ by far less than 1 %.
    assert runs[0]["loss"][0] == pytest.approx(runs[1]["loss"][0], rel=0.01)
    assert runs[0]["loss"] != runs[1]["loss"]
    data = json.loads(report.write(tmp_path, tmp_path / "").read_text())
    row = next(row for row in data["rows"] if row["variant"] == "unified_fp8")
    expected = report.final_loss(runs[1]) / report.final_loss(runs[0]) - 1
    assert row["train_gap"] == pytest.approx(expected, abs=1e-6)
    assert next(tmp_path.glob("learning-*.svg")).read_text().startswith("<svg")


def test_gradients_point_where_float32_does(monkeypatch):
    monkeypatch.setattr(gradients, "VARIANTS", {name: model.VARIANTS[name] for name in ("bf16", "unified_fp8")})
    weights = model.initial_weights(SIZE, LENGTH, 0)
    tokens = torch.randint(0, 256, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    found = gradients.compare(SIZE, LENGTH, weights, tokens)
    # E4M3 operands carry 2**-4 of relative rounding error each (root mean square 2**-4 / sqrt(3)); a gradient passes
    # through at most 14 FP8 linear layers with three quantized operands each: 1 - cos stays below half its square sum.
    assert 0 < 1 - found["unified_fp8"]["all"]["cosine"] < 0.5 * 14 * 3 * (2**-4 / 3**0.5) ** 2
    assert 1 - found["bf16"]["all"]["cosine"] < 1 - found["unified_fp8"]["all"]["cosine"]
    assert found["unified_fp8"]["all"]["norm_ratio"] == pytest.approx(1, abs=0.1)
