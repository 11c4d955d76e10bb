"""`-m`: which jobs a command line means, and that one failing job does not stop the others."""

import io
import sys

import pytest
from launch_for_tests import words

from jetrl import train
from jetrl.errors import UserError
from jetrl.launch import job, sweep
from jetrl.launch.args import parse


def jobs_of(folder, *more):
    return sweep.expand(parse(["-m", *words(folder, *more)]))


def test_one_folder_per_flow(tmp_path):
    jobs = jobs_of(tmp_path, "+precision=bf16,fp8_rollout,unified_fp8")
    assert [one.cfg.flow.name for one in jobs] == ["bf16", "fp8_rollout", "unified_fp8"]
    assert [one.folder.relative_to(tmp_path / "run").name for one in jobs] == [
        f"tiny-arithmetic-grpo-{flow}" for flow in ("bf16", "fp8_rollout", "unified_fp8")
    ]


def test_a_product_names_what_varies(tmp_path):
    jobs = jobs_of(tmp_path, "precision=bf16,fp8_rollout", "actor_rollout_ref.actor.optim.lr=1e-3,1e-4")
    assert [one.folder.name for one in jobs][:2] == [
        "tiny-arithmetic-grpo-bf16-lr=0.001",
        "tiny-arithmetic-grpo-bf16-lr=0.0001",
    ]
    assert len({one.folder for one in jobs}) == 4
    assert [one.cfg.actor_rollout_ref.actor.optim.lr for one in jobs] == [1e-3, 1e-4] * 2


def test_a_run_name_becomes_the_prefix(tmp_path):
    jobs = jobs_of(tmp_path, "precision=bf16,fp8_rollout", "run.name=mine")
    assert [one.cfg.run.name for one in jobs] == ["mine-bf16", "mine-fp8_rollout"]


def test_two_jobs_in_one_folder_are_refused(tmp_path):
    with pytest.raises(UserError, match="would share the folder"):
        jobs_of(tmp_path, "precision=bf16,bf16")


def test_an_unknown_name_in_a_list_is_refused_before_anything_starts(tmp_path, capsys):
    assert train.main(["-m", *words(tmp_path, "precision=bf16,bf17")]) == 2
    assert "precision=bf17 is unknown" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_every_job_is_checked_before_the_first_starts(tmp_path, capsys):
    # The second of the two is what pre-flight refuses.
    argv = ["-m", *words(tmp_path, "actor_rollout_ref.rollout.name=vllm,sglang")]
    assert train.main(argv) == 2
    assert "rollout.name=sglang" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_failing_job_is_reported_while_the_others_run(tmp_path, monkeypatch, capsys):
    script = """
import sys; from omegaconf import OmegaConf
sys.exit(OmegaConf.load(sys.argv[1]).flow.name == "bf16")
"""
    monkeypatch.setattr(
        sweep,
        "run_job",
        lambda cfg, folder, out: job.run_job(cfg, folder, out, lambda c: [sys.executable, "-c", script, str(c)]),
    )
    line = parse(["-m", *words(tmp_path, "precision=bf16,unified_fp8", "task.train_size=64", "task.val_size=8")])
    out = io.StringIO()
    assert sweep.run_sweep(line, out) == 1
    assert "precision=bf16 failed" in capsys.readouterr().err
    table = out.getvalue().splitlines()[-2:]
    assert "precision=bf16" in table[0] and "failed" in table[0]
    assert "precision=unified_fp8" in table[1] and table[1].endswith("ok")
