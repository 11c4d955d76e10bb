"""A job's folder and child process. The child here is a small script; tests/jobs runs VeRL itself."""

import fcntl
import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from launch_for_tests import composed
from omegaconf import OmegaConf

from jetrl.errors import JobError, UserError
from jetrl.launch import checkpoints, processes, worker_entry
from jetrl.launch.job import failure_sentence, run_job

STEPS = 3
# Writes metrics as VeRL does, one line a step, opening the file anew.
GOOD = """
import json, sys
from omegaconf import OmegaConf
cfg = OmegaConf.load(sys.argv[1])
path = cfg.ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH
with open(path, "wb", buffering=0) as file:
    for step in range(4):
        data = {"critic/rewards/mean": 0.5, "timing_s/step": 1.0} if step else {"val-core/arithmetic/acc/mean@1": 0.25}
        file.write(json.dumps({"step": step, "data": data}).encode() + b"\\n")
print("raw output of the job")
"""


def child(script):
    return lambda config: [sys.executable, "-c", script, str(config)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Composed once (a second each); its paths are under a folder of its own."""
    folder = tmp_path_factory.mktemp("base")
    small = ["task.train_size=64", "task.val_size=8"]
    return folder, OmegaConf.to_yaml(composed(folder, f"trainer.total_training_steps={STEPS}", *small))


@pytest.fixture
def cfg(base, tmp_path):
    folder, text = base
    return OmegaConf.create(text.replace(str(folder), str(tmp_path)))


@pytest.fixture
def run_dir(cfg):
    return Path(cfg.run.dir)


def test_a_job_that_ends_well(cfg, run_dir):
    out = io.StringIO()
    assert run_job(cfg, run_dir, out, child(GOOD)) == 0
    assert {path.name for path in run_dir.iterdir()} >= {"config.yaml", "metrics.jsonl", "log.txt", "data"}
    assert "raw output of the job" in (run_dir / "log.txt").read_text()
    text = out.getvalue()
    assert "raw output of the job" not in text and "3/3" in text and str(run_dir) in text
    written = OmegaConf.load(run_dir / "config.yaml")
    assert Path(written.data.train_files).is_file() and written.trainer.total_training_steps == STEPS


def test_enough_epochs_for_the_steps_that_were_asked_for(cfg, run_dir):
    # 64 rows are 4 batches of 16: 30 steps need 8 epochs, and VeRL would stop after the configured 3.
    cfg.trainer.total_training_steps = 30
    run_job(cfg, run_dir, io.StringIO(), child(GOOD))
    assert OmegaConf.load(run_dir / "config.yaml").trainer.total_epochs == 8


def test_a_second_start_keeps_the_first_ones_metrics(cfg, run_dir):
    run_job(cfg, run_dir, io.StringIO(), child(GOOD))
    step = run_dir / "checkpoints" / "global_step_2"
    step.mkdir(parents=True)
    (step / "data.pt").write_bytes(b"x")
    checkpoints.mark_whole(step)
    out = io.StringIO()
    run_job(cfg, run_dir, out, child(GOOD))
    assert "resuming from step 2" in out.getvalue()
    assert len(list(run_dir.glob("metrics*.jsonl"))) == 2
    assert (run_dir / "checkpoints" / checkpoints.TRACKER).read_text() == "2"


def test_every_start_leaves_its_command_seeds_and_versions(cfg, run_dir):
    for _ in range(2):
        run_job(cfg, run_dir, io.StringIO(), child(GOOD))
    starts = [json.loads(line) for line in (run_dir / "starts.jsonl").read_text().splitlines()]
    assert len(starts) == 2
    assert starts[0]["seeds"]["task.seed"] == 0
    assert starts[0]["versions"]["torch"].startswith("2.11.0") and "verl" in starts[0]["versions"]
    assert "pytest" in starts[0]["command"]


def test_a_run_that_is_done_is_not_done_again(cfg, run_dir):
    step = run_dir / "checkpoints" / f"global_step_{STEPS}"
    step.mkdir(parents=True)
    (step / "data.pt").write_bytes(b"x")
    checkpoints.mark_whole(step)
    out = io.StringIO()
    assert run_job(cfg, run_dir, out, child("raise SystemExit(9)")) == 0
    assert "all 3 steps are done" in out.getvalue()


def test_starting_over_sets_the_earlier_run_aside(cfg, run_dir):
    run_job(cfg, run_dir, io.StringIO(), child(GOOD))
    cfg.trainer.resume_mode = "disable"
    run_job(cfg, run_dir, io.StringIO(), child(GOOD))
    assert {path.name for path in (run_dir / "earlier-1").iterdir()} == {"metrics.jsonl", "log.txt"}


def test_a_failed_job_ends_with_its_own_error(cfg, run_dir):
    script = """
import sys; from pathlib import Path
from jetrl.launch import worker_entry
from jetrl.errors import JobError
sys.excepthook = worker_entry._Report(Path(sys.argv[1]).parent / worker_entry.FAILURE)
error = RuntimeError("a wrapper")
error.cause = JobError("the handshake failed")
raise error
"""
    with pytest.raises(JobError, match=r"^the handshake failed; the job's output is in .*log\.txt$"):
        run_job(cfg, run_dir, io.StringIO(), child(script))
    assert "Traceback" in (run_dir / "log.txt").read_text()


def test_an_interrupted_job_is_not_recorded_as_failed(tmp_path):
    """Unlike one whose worker was interrupted from outside, which no one asked for here."""
    report, file = worker_entry._Report(tmp_path / worker_entry.FAILURE), tmp_path / worker_entry.FAILURE
    report(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not file.exists()
    wrapper = RuntimeError("a wrapper")
    wrapper.cause = KeyboardInterrupt()
    report(RuntimeError, wrapper, None)
    assert json.loads(file.read_text())["type"] == "KeyboardInterrupt"


def test_an_old_failure_is_not_shown_for_a_new_one(cfg, run_dir):
    run_dir.mkdir()
    (run_dir / worker_entry.FAILURE).write_text(json.dumps({"type": "E", "message": "old"}))
    (run_dir / "log.txt").write_text("ValueError: old\n")
    with pytest.raises(JobError, match="exit code 3"):
        run_job(cfg, run_dir, io.StringIO(), child("raise SystemExit(3)"))


def test_the_last_exception_of_a_log_without_a_report(tmp_path):
    (tmp_path / "log.txt").write_text(
        "ValueError: first\nmore\n\x1b[36m(TaskRunnerV1 pid=1)\x1b[0m noise\n(Actor pid=12, ip=1.2.3.4) a.b.CustomError: last\n"
    )
    assert failure_sentence(tmp_path, 1) == "a.b.CustomError: last"
    assert failure_sentence(tmp_path, -signal.SIGKILL) == "the job was killed by SIGKILL (out of memory?)"


def test_the_cause_inside_rays_wrappers():
    inner, middle, outer = ValueError("inner"), RuntimeError("middle"), RuntimeError("outer")
    middle.cause, outer.cause = inner, middle
    assert worker_entry.root_cause(outer) is inner


def test_no_process_outlives_its_job(cfg, run_dir, monkeypatch):
    """A grandchild in a session of its own, whose parent is gone when the job ends: what Ray's helpers are."""
    script = """
import subprocess, sys; from pathlib import Path
code = "import subprocess, sys; p = subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=subprocess.DEVNULL); print(p.pid)"
done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE)
(Path(sys.argv[1]).parent / "pid").write_bytes(done.stdout)
"""
    monkeypatch.setattr(processes, "GRACE_SECONDS", 1.0)
    assert run_job(cfg, run_dir, io.StringIO(), child(script)) == 0
    pid = int((run_dir / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_ctrl_c_reaches_the_child_and_ends_with_130(cfg, run_dir):
    script = """
import sys, time; from pathlib import Path
folder = Path(sys.argv[1]).parent
try:
    (folder / "up").touch()
    time.sleep(600)
except KeyboardInterrupt:
    (folder / "stopped").touch()
"""

    def interrupt_when_up():
        while not (run_dir / "up").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_when_up, daemon=True).start()
    out = io.StringIO()
    assert run_job(cfg, run_dir, out, child(script)) == 130
    assert (run_dir / "stopped").exists() and "interrupted" in out.getvalue()


def test_two_jobs_cannot_use_one_folder(cfg, run_dir):
    run_dir.mkdir()
    with (run_dir / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another job is using run.dir="):
            run_job(cfg, run_dir, io.StringIO(), child(GOOD))


def test_a_batch_larger_than_the_data_is_refused(cfg, run_dir):
    cfg.data.train_batch_size = 65
    with pytest.raises(UserError, match=r"data\.train_batch_size=65 is more than the 64 training rows"):
        run_job(cfg, run_dir, io.StringIO(), child(GOOD))
