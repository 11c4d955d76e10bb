"""`python -m jetrl.train` on the embedded default: it learns, survives a kill -9, and sweeps. Real Ray, VeRL and vLLM."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from real_jobs import run_to_end

from jetrl.launch.metrics_log import read_run, summarize

pytestmark = pytest.mark.slow

TRAIN = [sys.executable, "-m", "jetrl.train"]
SHORT = ["trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"]


def kill_after_step(command: list[str], folder: Path, run: Path, step: int, timeout: float) -> None:
    """Start `command`; SIGKILL its whole process group once `step` is in the run's metrics."""
    with (folder / "killed.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        deadline = time.monotonic() + timeout
        while not (run / "metrics.jsonl").exists() or max(read_run(run / "metrics.jsonl"), default=0) < step:
            assert process.poll() is None, (folder / "killed.txt").read_text()[-3000:]
            assert time.monotonic() < deadline, f"step {step} was not reached in time"
            time.sleep(0.5)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_default_job_learns_and_goes_on_after_a_kill(tmp_path):
    """One job for both claims, because each takes minutes: killed a step after its first checkpoint (step 10), so that
    one step is lost and done again, then the same command."""
    run = tmp_path / "run"
    command = [*TRAIN, f"run.dir={run}"]
    kill_after_step(command, tmp_path, run, step=11, timeout=900)

    returncode, output = run_to_end(command, tmp_path, timeout=1300)
    assert returncode == 0, output[-3000:]
    assert "from step 10" in output and "from the start" not in output
    rows = [line for line in output.splitlines() if re.match(r"\s+(step\s+reward|\d+/\d+)\s", line)]
    assert len(rows) >= 10 and all(len(row) <= 120 for row in rows)
    steps = [step for step, metrics in read_run(run / "metrics.jsonl").items() if "critic/score/mean" in metrics]
    assert steps == list(range(1, steps[-1] + 1)), "every step once, across the kill"
    figures = summarize(read_run(run / "metrics.jsonl"))
    assert 0.2 <= figures.accuracy_before <= 0.6, figures
    assert figures.accuracy_after - figures.accuracy_before >= 0.15, figures
    assert sorted(p.name for p in (run / "checkpoints").glob("global_step_*"))[-1] == f"global_step_{steps[-1]}"
    assert len(list((run / "checkpoints").glob("global_step_*"))) == 2
    assert any((run / "tensorboard").iterdir())


def test_a_sweep_gives_one_folder_a_flow(tmp_path):
    command = [*TRAIN, "-m", "+precision=bf16,fp8_rollout", f"run.dir={tmp_path / 'sweep'}", *SHORT,
               "trainer.total_training_steps=1"]  # fmt: skip
    returncode, output = run_to_end(command, tmp_path, timeout=1200)
    assert returncode == 0, output[-3000:]
    folders = sorted(p.name for p in (tmp_path / "sweep").iterdir() if p.is_dir())
    assert len(folders) == 2 and "bf16" in folders[0] and "fp8_rollout" in folders[1]
    for folder in (tmp_path / "sweep").iterdir():
        if folder.is_dir():
            (line,) = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
            assert line["step"] == 1 and "mismatch/k3_kl" in line["data"]
