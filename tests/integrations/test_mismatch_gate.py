"""The gate on the real job: with FP32 carriers, sharing the layer removes the mismatch that FP8 rollout alone has.

Derivation of the two bounds. fp8_rollout: an FP8 product of two quantized operands has a relative error of 10^(-28.8/20) =
3.6 %, over 14 layers; k3 KL is about half the mean square of the log-prob error, 1e-4 to 1e-3 on a model of this size.
unified_fp8: both engines compute the same FP8 products; FP32 rounding around them (1e-7) only acts where an activation
lies within it of an FP8 rounding boundary, so k3 KL is many orders lower. 1e-5 and a factor of 50 leave room for a
handful of such flips in a batch of some hundred tokens.
"""

import pytest
from real_jobs import FP32_CARRIERS, THE_TWO_OVERRIDES, run_verl_job

pytestmark = pytest.mark.slow

FP8_ROLLOUT = (
    "+actor_rollout_ref.model.override_config.jetrl_flow=fp8_rollout",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.jetrl_flow=fp8_rollout",
)


def test_unified_fp8_removes_the_mismatch_of_fp8_rollout(tmp_path):
    unified = run_verl_job(tmp_path / "unified", *THE_TWO_OVERRIDES, *FP32_CARRIERS)
    assert unified.returncode == 0, unified.output[-3000:]
    rollout_only = run_verl_job(tmp_path / "rollout_only", *THE_TWO_OVERRIDES, *FP8_ROLLOUT, *FP32_CARRIERS)
    assert rollout_only.returncode == 0, rollout_only.output[-3000:]
    assert "flow fp8_rollout is not unified" in rollout_only.output
    k3 = {name: job.mean("mismatch/k3_kl") for name, job in (("unified", unified), ("rollout_only", rollout_only))}
    assert k3["unified"] < 1e-5, k3
    assert k3["unified"] < k3["rollout_only"] / 50, k3
