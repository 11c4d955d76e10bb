"""The FP8 wire: the rollout's storage holds the same bytes whichever form the weights arrive in."""

import pytest
import torch
from checkpoints_for_tests import build_model
from jetrl_kernels.backends import GEMM_BACKENDS

from jetrl.errors import UserError
from jetrl.integrations.verl.wire import quantized_on_the_way
from jetrl.linear import quantize_weight
from jetrl.packed_weight import packed_shape, parts, quantize_packed
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
    assert [name for name, _ in sent] == list(weights)
    sent = dict(sent)
    for name, scale_format in (("a.q_proj", "fp32"), ("a.o_proj", "pow2")):
        on_arrival = quantize_weight(weights[f"{name}.weight"].bfloat16(), scale_format)
        codes, scale = parts(sent[f"{name}.weight"], weights[f"{name}.weight"].shape)
        assert torch.equal(codes.view(torch.uint8), on_arrival.codes.view(torch.uint8))
        assert torch.equal(scale, on_arrival.scale)
    assert sent["a.q_proj.weight"].shape == (256 + 1, 256) and sent["a.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert sent["a.q_proj.bias"] is weights["a.q_proj.bias"] and sent["lm_head.weight"] is weights["lm_head.weight"]


def test_the_sync_of_a_models_linears_takes_half_of_bf16s_bytes():
    model = build_model("qwen3").bfloat16()
    linears = {n: "fp32" for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    weights = [(f"{name}.weight", model.get_parameter(f"{name}.weight")) for name in linears]
    sent = sum(t.nbytes for _, t in quantized_on_the_way(iter(weights), linears, "cpu"))
    # One byte a weight, padded to 128, and the rows that four bytes a block of 128 x 128 take.
    padded = [(-(-w.shape[0] // 128) * 128, -(-w.shape[1] // 128) * 128) for _, w in weights]
    assert sent == sum((n + -(-4 * (n // 128) * (k // 128) // k)) * k for n, k in padded)


@pytest.mark.parametrize("shape", [(1, 1), (200, 130), (128, 4096), (4224, 128), (8192, 256)])
@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_a_packed_weight_is_read_back_from_wherever_a_bucket_holds_it(shape, offset):
    """One row of scales' bytes up to 4096 rows of codes, two from there; buckets align a tensor by its elements, here bytes."""
    torch.manual_seed(0)
    weight = torch.randn(shape)
    packed = quantize_packed(weight, "fp32")
    assert packed.shape == packed_shape(shape) and packed.shape[0] % 128 == -(-packed.shape[0] // 4097)
    bucket = torch.zeros(packed.nbytes + 8, dtype=torch.uint8)
    view = bucket[offset : offset + packed.nbytes].view(packed.dtype).view(packed.shape)
    view.view(torch.uint8).copy_(packed.view(torch.uint8))
    codes, scale = parts(view, shape)
    want = quantize_weight(weight, "fp32")
    assert torch.equal(codes.view(torch.uint8), want.codes.view(torch.uint8)) and torch.equal(scale, want.scale)


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
