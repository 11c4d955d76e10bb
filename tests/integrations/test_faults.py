"""A real job whose weight sync goes wrong ends, with the reason, instead of waiting for ever or sampling from wrong weights."""

from pathlib import Path

import pytest
from faults_for_tests import FAULT, SPOILT
from real_jobs import THE_TWO_OVERRIDES, JobResult, run_verl_job

pytestmark = pytest.mark.slow

EXTERNAL = "actor_rollout_ref.model.external_lib=[jetrl.integrations.verl,faults_for_tests]"


def job_with(fault: str, folder: Path, monkeypatch) -> JobResult:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv(FAULT, fault)
    return run_verl_job(folder, EXTERNAL, THE_TWO_OVERRIDES[1], timeout=900)


def test_a_vllm_worker_killed_in_the_middle_of_a_weight_sync_ends_the_job(tmp_path, monkeypatch):
    job = job_with("killed", tmp_path, monkeypatch)
    assert job.returncode == 1
    assert len(job.metrics) <= 1  # the second sync comes after the first update
    assert "weight sync failed: the rollout did not take the weights (" in job.output


def test_a_worker_without_the_plug_in_ends_the_job_before_the_first_sample(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    external, _ = THE_TWO_OVERRIDES
    job = run_verl_job(tmp_path, external, "+actor_rollout_ref.model.override_config.jetrl_flow=bf16", timeout=900)
    assert job.returncode == 1 and job.metrics == []
    assert "could not tell which precision graph it runs (" in job.output
    assert "is jetrl's vLLM plug-in installed in the rollout's environment and allowed by VLLM_PLUGINS?" in job.output


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "missing",
            f"weight sync incomplete: {SPOILT.removesuffix('.weight')} was not received by the rollout",
        ),
        ("shape", "which does not fit the layer"),
        ("dtype", f"weight sync failed: {SPOILT.removesuffix('.weight')} arrived as torch.int8"),
        ("nan", f"weight sync failed: {SPOILT.removesuffix('.weight')} holds NaN or Inf"),
    ],
)
def test_a_weight_that_is_wrong_ends_the_job_before_the_first_sample(fault, said, tmp_path, monkeypatch):
    job = job_with(fault, tmp_path, monkeypatch)
    assert job.returncode == 1 and job.metrics == []
    assert said in job.output, job.output[-4000:]
