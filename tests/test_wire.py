"""The FP8 wire: the rollout's storage holds the same bytes whichever form the weights arrive in."""

import pytest
import torch
from checkpoints_for_tests import build_model
from jetrl_kernels.backends import GEMM_BACKENDS

from jetrl.errors import UserError
from jetrl.integrations.verl.wire import quantized_on_the_way
from jetrl.linear import quantize_weight
from jetrl.packed_weight import Slab, packed_bytes, packed_shape, parts
from jetrl.settings import GEMMS, engine_settings, rollout_gemm
from jetrl.weight_bundle import MATRICES, NORMS, bundled, unbundled


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
    packed = Slab(packed_bytes(weight.shape), weight.device).quantize(weight, "fp32")
    assert packed.shape == packed_shape(shape) and packed.shape[0] % 128 == -(-packed.shape[0] // 4097)
    bucket = torch.zeros(packed.nbytes + 8, dtype=torch.uint8)
    view = bucket[offset : offset + packed.nbytes].view(packed.dtype).view(packed.shape)
    view.view(torch.uint8).copy_(packed.view(torch.uint8))
    codes, scale = parts(view, shape)
    want = quantize_weight(weight, "fp32")
    assert torch.equal(codes.view(torch.uint8), want.codes.view(torch.uint8)) and torch.equal(scale, want.scale)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def model_weights() -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Weights of a small model, the embedding first, and the scale formats of its matrices."""
    state = {n: w.to(torch.bfloat16) for n, w in build_model("qwen3").state_dict().items()}
    return state, {n.removesuffix(".weight"): "fp32" for n in state if n.endswith("_proj.weight")}


@pytest.mark.parametrize("embedding_rows", [512, 100_000])
def test_bundles_hold_the_same_weights_in_fewer_tensors_none_larger_than_one_that_went_before(embedding_rows):
    state, formats = model_weights()
    state["model.embed_tokens.weight"] = torch.zeros(embedding_rows, 64, dtype=torch.bfloat16)
    plain = dict(quantized_on_the_way(iter(state.items()), formats, "cpu"))
    sent = list(bundled(quantized_on_the_way(iter(state.items()), formats, "cpu")))
    found = dict(unbundled(sent))
    assert found.keys() == plain.keys()
    for name, tensor in found.items():
        packed, shape = name.removesuffix(".weight") in formats, state[name].shape
        # What fills up the last row of a packed weight is nobody's.
        pairs = zip(parts(tensor, shape), parts(plain[name], shape), strict=True) if packed else [(tensor, plain[name])]
        assert tensor.shape == plain[name].shape and all(same_bytes(a, b) for a, b in pairs)
    kinds = [sum(name.startswith(kind) for name, _ in sent) for kind in (MATRICES, NORMS)]
    assert kinds[1] == 1 and kinds[0] >= 1 and (kinds[0] == 1 and len(sent) == 4 or embedding_rows == 512)
    bucket, largest_matrix = 0, max(plain[f"{name}.weight"].nbytes for name in formats)
    for _, tensor in sent:
        assert not bucket or tensor.nbytes <= max(bucket, largest_matrix)
        bucket = max(bucket, tensor.nbytes)


def test_a_bundle_of_matrices_is_the_memory_that_they_were_quantized_into():
    state, formats = model_weights()
    made = list(quantized_on_the_way(iter(state.items()), formats, "cpu"))
    memory = {tensor.untyped_storage().data_ptr() for _, tensor in made if tensor.dtype == torch.float8_e4m3fn}
    for name, tensor in bundled(made):
        if name.startswith(MATRICES):
            # float32 is what makes VeRL's bucket hold the scales at a multiple of four.
            assert tensor.dtype == torch.float32 and tensor.untyped_storage().data_ptr() in memory


def test_matrices_from_memory_of_their_own_and_biases_travel_as_they_are():
    weights = [
        (f"{i}.weight", Slab(packed_bytes((128, 128)), torch.device("cpu")).quantize(torch.randn(128, 128), "fp32"))
        for i in range(3)
    ]
    weights += [("a.bias", torch.randn(8)), ("norm.weight", torch.randn(2, 2))]
    sent = list(bundled(weights))
    assert dict(sent).keys() == dict(weights).keys() and all(same_bytes(t, dict(weights)[n]) for n, t in sent)


def test_a_bundle_of_another_size_than_its_name_says_is_an_error():
    (name, tensor), *_ = bundled([("a.norm.weight", torch.ones(4)), ("b.norm.weight", torch.ones(4))])
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        list(unbundled([(name, tensor[:-1])]))


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
