"""The FP8 wire: the rollout's storage holds the same bytes whichever form the weights arrive in."""

import pytest
import torch
from checkpoints_for_tests import build_model
from jetrl_kernels.backends import GEMM_BACKENDS

from jetrl.errors import UserError
from jetrl.integrations.verl.wire import quantized_on_the_way
from jetrl.linear import quantize_weight
from jetrl.settings import GEMMS, engine_settings, rollout_gemm


def test_codes_and_scales_are_the_receivers_own_and_everything_else_travels_untouched():
    torch.manual_seed(0)
    weights = {
        "a.q_proj.weight": torch.randn(200, 130),  # ragged in both dimensions; an FP32 master
        "a.q_proj.bias": torch.randn(200),
        "a.o_proj.weight": torch.randn(128, 256).bfloat16(),
        "lm_head.weight": torch.randn(64, 130),
    }
    sent = list(quantized_on_the_way(iter(weights.items()), {"a.q_proj": "fp32", "a.o_proj": "pow2"}, "cpu"))
    names = [name for name, _ in sent]
    assert names == [
        "a.q_proj.weight",
        "a.q_proj.weight_scale",
        "a.q_proj.bias",
        "a.o_proj.weight",
        "a.o_proj.weight_scale",
        "lm_head.weight",
    ]
    sent = dict(sent)
    for name, scale_format in (("a.q_proj", "fp32"), ("a.o_proj", "pow2")):
        on_arrival = quantize_weight(weights[f"{name}.weight"].bfloat16(), scale_format)
        assert torch.equal(sent[f"{name}.weight"].view(torch.uint8), on_arrival.codes.view(torch.uint8))
        assert torch.equal(sent[f"{name}.weight_scale"], on_arrival.scale)
    assert sent["a.q_proj.weight"].shape == (256, 256) and sent["a.q_proj.weight_scale"].shape == (2, 2)
    assert sent["a.q_proj.bias"] is weights["a.q_proj.bias"] and sent["lm_head.weight"] is weights["lm_head.weight"]


def test_the_sync_of_a_models_linears_takes_half_of_bf16s_bytes():
    model = build_model("qwen3").bfloat16()
    linears = {n: "fp32" for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    weights = [(f"{name}.weight", model.get_parameter(f"{name}.weight")) for name in linears]
    sent = sum(t.nbytes for _, t in quantized_on_the_way(iter(weights), linears, "cpu"))
    # Padding to 128 aside: one byte a weight, and four bytes a block of 128 x 128.
    padded = sum(-(-w.shape[0] // 128) * 128 * -(-w.shape[1] // 128) * 128 for _, w in weights)
    assert sent == padded + 4 * padded // 128**2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"jetrl_wire": "fp16"}, ["jetrl_wire=fp16", "fp8, bf16"]),
        ({"jetrl_weight_cache": "always"}, ["jetrl_weight_cache=always", "auto, step, micro_batch"]),
        ({"jetrl_gemm": "cutlass"}, ["jetrl_gemm=cutlass", "auto, deepgemm, cublaslt, triton"]),
        ({"jetrl_wires": "fp8"}, ["jetrl_wires", "is not a key of jetrl", "jetrl_wire,"]),
    ],
)
def test_a_wrong_setting_is_one_sentence(config, words):
    with pytest.raises(UserError) as e:
        engine_settings({"attn_implementation": "sdpa", **config})
    assert all(word in str(e.value) for word in words) and "\n" not in str(e.value)


def test_the_rollouts_own_keys_are_checked():
    assert rollout_gemm({"jetrl_flow": "bf16", "other": 1}) == "auto"
    assert rollout_gemm({"jetrl_gemm": "triton"}) == "triton"
    with pytest.raises(UserError, match="additional_config.jetrl_gemm=cutlass is unknown; allowed: auto, deepgemm"):
        rollout_gemm({"jetrl_gemm": "cutlass"})
    with pytest.raises(
        UserError, match="additional_config.jetrl_wire is not a key of jetrl; allowed: jetrl_flow, jetrl_gemm"
    ):
        rollout_gemm({"jetrl_wire": "fp8"})


def test_the_gemms_that_may_be_named_are_the_kernels_own():
    assert GEMMS == ("auto", *GEMM_BACKENDS)
