"""A plain VeRL job (tests/jobs/verl_cpu_job.yaml) with none, one and both of the two overrides."""

from math import prod
from pathlib import Path

import pytest
from real_jobs import THE_TWO_OVERRIDES, run_verl_job
from safetensors import safe_open

from jetrl.data.models import TINY, resolve_model_path
from jetrl.packed_weight import packed_shape

pytestmark = pytest.mark.slow

EXTERNAL_LIB, QUANTIZATION = THE_TWO_OVERRIDES


def bytes_of_a_sync() -> int:
    """Codes, and scales in whole rows, for the linear layers; embedding, lm_head and norms as the FP32 masters they are."""
    with safe_open(Path(resolve_model_path(TINY)) / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    linears = {name: shape for name, shape in shapes.items() if name.endswith("_proj.weight")}
    assert len(linears) == 14
    return sum(prod(packed_shape(tuple(s))) if n in linears else 4 * prod(s) for n, s in shapes.items())


def test_without_the_overrides_jetrl_leaves_the_job_alone(tmp_path):
    job = run_verl_job(tmp_path)
    assert job.returncode == 0, job.output[-3000:]
    assert len(job.metrics) == 2
    assert "jetrl:" not in job.output
    assert not any(key.startswith("mismatch/") for step in job.metrics for key in step)


def test_the_two_overrides_make_it_unified_fp8(tmp_path):
    job = run_verl_job(tmp_path, *THE_TWO_OVERRIDES)
    assert job.returncode == 0, job.output[-3000:]
    assert "flow unified_fp8, actor: 14 linear layers run in FP8" in job.output
    assert "flow unified_fp8, reference: 14 linear layers run in FP8" in job.output
    assert "is a subgraph of the trainer's" in job.output
    assert "jetrl: FP32 masters (torch's AdamW)" in job.output
    for step in job.metrics:
        assert {"mismatch/k3_kl", "mismatch/abs_logprob_diff_p99", "mismatch/token_mult_prob_error"} <= set(step)
        assert step["actor/sync_seconds"] > 0
        assert step["actor/sync_bytes"] == bytes_of_a_sync()
        assert step["mismatch/k3_kl"] < 1e-2


def test_with_the_trainer_s_override_only_the_job_ends_before_the_first_sample(tmp_path):
    job = run_verl_job(tmp_path, EXTERNAL_LIB)
    assert job.returncode == 1 and job.metrics == []
    assert (
        "flow unified_fp8 claims to be unified, but the rollout's precision graph is not a subgraph"
        in job.last_exception
    )
    assert "model.layers.0" in job.last_exception


def test_with_the_rollout_s_override_only_the_job_ends_before_the_first_sample(tmp_path):
    job = run_verl_job(tmp_path, QUANTIZATION)
    assert job.returncode == 1 and job.metrics == []
    assert "set actor_rollout_ref.model.external_lib=jetrl.integrations.verl" in job.output
