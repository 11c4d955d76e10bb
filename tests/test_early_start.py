"""The child process that starts before its job is checked, and the Ray whose idle workers import beforehand."""

import fcntl
import json
import os

import pytest
from launch_for_tests import composed

from jetrl.launch import local_ray
from jetrl.launch.early_worker import EarlyWorker
from jetrl.launch.worker_entry import FAILURE


def test_without_a_job_the_process_ends_with_the_block():
    with EarlyWorker() as early:
        assert early.process.poll() is None
    assert early.process.returncode is not None


def test_a_process_that_has_ended_takes_no_job(tmp_path):
    with EarlyWorker() as early, (tmp_path / "log").open("ab") as log:
        early.process.kill()
        early.process.wait()
        assert early.hand_over(tmp_path / "config.yaml", log.fileno(), log.fileno()) is None


def test_an_import_that_fails_is_told_in_the_jobs_log(tmp_path, monkeypatch):
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("raise ImportError('a broken installation')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with EarlyWorker() as early, (tmp_path / "log").open("ab") as log:
        assert early.hand_over(tmp_path / "config.yaml", log.fileno(), log.fileno()) is early.process
        assert early.process.wait(600) == 1
    assert "ImportError: a broken installation" in (tmp_path / "log").read_text()


def test_it_takes_its_job_its_log_and_the_lock(tmp_path):
    """The configuration is missing: that is what the job reports, in its own folder, after the parent let the lock go."""
    lock = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with EarlyWorker() as early, (tmp_path / "log.txt").open("ab") as log:
        assert early.hand_over(tmp_path / "config.yaml", log.fileno(), lock) is early.process
    os.close(lock)
    with open(tmp_path / ".lock") as other:
        if early.process.poll() is None:  # it imports for seconds before it looks
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert early.process.wait(600) == 1
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert json.loads((tmp_path / FAILURE).read_text())["type"] == "FileNotFoundError"
    assert "FileNotFoundError" in (tmp_path / "log.txt").read_text()


WORKERS = "ray_kwargs.ray_init.num_cpus=10"


@pytest.mark.parametrize(
    ("words", "cores", "fits"),
    [
        ((), 16, True),
        ((), 2, False),
        (("ray_kwargs.ray_init.num_cpus=null",), 16, False),
        (("ray_kwargs.ray_init.num_cpus=16",), 64, False),
        (("trainer.nnodes=2",), 16, False),
        (("actor_rollout_ref.rollout.full_determinism=true",), 16, False),
        (
            ("reward.reward_model.enable=true", "reward.reward_model.rollout.full_determinism=true"),
            16,
            False,
        ),
        (("trainer.logger=[console,rl_insight]",), 16, False),
        (("+ray_kwargs.ray_init.address=auto",), 16, False),
        (("+ray_kwargs.ray_init.runtime_env.working_dir=x",), 16, False),
    ],
)
def test_ray_is_started_here_where_idle_workers_can_be_used(tmp_path, monkeypatch, words, cores, fits):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    cfg = composed(tmp_path, *(words if any("num_cpus" in word for word in words) else (*words, WORKERS)))
    assert local_ray.fits(cfg) is fits
