"""A real job whose rollout dies in the middle of a weight sync ends, with the reason, instead of waiting for ever."""

from pathlib import Path

import pytest
from real_jobs import THE_TWO_OVERRIDES, run_verl_job

pytestmark = pytest.mark.slow


def test_a_vllm_worker_killed_in_the_middle_of_a_weight_sync_ends_the_job(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    _, quantization = THE_TWO_OVERRIDES
    external = "actor_rollout_ref.model.external_lib=[jetrl.integrations.verl,faults_for_tests]"
    job = run_verl_job(tmp_path, external, quantization, timeout=900)
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
