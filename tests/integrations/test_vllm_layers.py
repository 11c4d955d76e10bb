"""jetrl's layers inside real vLLM models, built in this process without an engine: which flow gets which, both weight wires, faults."""

import pytest
import torch
from checkpoints_for_tests import ARCHITECTURES, build_model
from vllm_models_for_tests import vllm_models

from jetrl.errors import JobError, UserError
from jetrl.integrations.verl.wire import quantized_on_the_way

# Importing vLLM takes half a minute here, and it inspects every architecture in a process of its own.
pytestmark = pytest.mark.slow

K1 = "model.layers.1.self_attn.k_proj"
SHARED = {"JetRMSNorm", "JetSiluAndMul", "JetRotaryEmbedding"}


@pytest.fixture(scope="module")
def vllm_model(tmp_path_factory):
    """Function (architecture, flow, **engine arguments) -> (model, model_config), weights unset."""

    def build(architecture: str, flow: str | None = "unified_fp8", **arguments):
        asked = {"quantization": "jetrl", "additional_config": {"jetrl_flow": flow}} if flow else {}
        return model_of(architecture, **asked, **arguments)

    with vllm_models(tmp_path_factory.mktemp("vllm")) as model_of:
        yield build


def sync(model, model_config, items, buckets: int = 1) -> None:
    """What VeRL's worker extension does: load_weights per bucket, then post-processing once."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    items = list(items)
    for i in range(buckets):
        model.load_weights(items[i * len(items) // buckets : (i + 1) * len(items) // buckets])
    process_weights_after_loading(model, model_config, torch.device("cpu"))


def state_of(architecture: str, seed: int = 0) -> dict[str, torch.Tensor]:
    return {n: w.to(torch.bfloat16) for n, w in build_model(architecture, seed).state_dict().items()}


def fp8_wire(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The weights as jetrl's own trainer sends them."""
    matrices = {n.removesuffix(".weight"): "fp32" for n in state if n.endswith("_proj.weight")}
    return list(quantized_on_the_way(iter(state.items()), matrices, "cpu"))


def stored(model) -> dict[str, bytes]:
    return {
        n: p.data.contiguous().view(torch.uint8).numpy().tobytes()
        for n, p in model.named_parameters()
        if "_proj.weight" in n
    }


def classes(model) -> set[str]:
    return {type(module).__name__ for module in model.modules()}


def test_only_an_engine_of_a_unified_flow_gets_the_trainers_operators(vllm_model):
    """In turn in one process, because vLLM keeps rotary layers and jetrl registers its classes for the whole process."""
    stock = {"RMSNorm", "SiluAndMul", "RotaryEmbedding"}
    for flow, expected in (
        ("unified_fp8", SHARED), (None, stock), ("fp8_rollout", stock), ("unified_fp8", SHARED), ("bf16", stock),
    ):  # fmt: skip
        model, config = vllm_model("qwen3", flow)
        sync(model, config, [])
        assert classes(model) & (SHARED | stock) == expected, flow


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_both_wires_leave_the_same_bytes_whatever_the_buckets(vllm_model, architecture):
    model, config = vllm_model(architecture)
    state = state_of(architecture)
    sync(model, config, state.items())
    pointers = {n: p.data_ptr() for n, p in model.named_parameters()}
    first = stored(model)
    sync(model, config, state_of(architecture, seed=1).items())
    assert stored(model) != first
    for buckets in (1, 7):
        sync(model, config, fp8_wire(state), buckets)
        assert stored(model) == first
        assert {n: p.data_ptr() for n, p in model.named_parameters()} == pointers


def without(items, name):
    return [(n, t) for n, t in items if n != name]


def changed(items, name, change):
    return [(n, change(t) if n == name else t) for n, t in items]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda i: without(i, f"{K1}.weight"), rf"{K1} \(codes\) was not received"),
        (lambda i: without(i, f"{K1}.weight_scale"), rf"{K1} \(scale\) was not received"),
        (lambda i: without(without(i, f"{K1}.weight"), f"{K1}.weight_scale"), f"{K1} was not received"),
        (lambda i: changed(i, f"{K1}.weight", lambda t: t[:-1]), f"{K1} arrived as FP8 codes of shape"),
        (lambda i: changed(i, f"{K1}.weight_scale", lambda t: t.half()), f"{K1}.weight_scale arrived as torch.float16"),
        (lambda i: changed(i, f"{K1}.weight_scale", lambda t: t[:, :-1]), f"{K1} arrived as block scales of shape"),
        (lambda i: changed(i, f"{K1}.weight_scale", lambda t: t * float("nan")), f"{K1} holds NaN or Inf"),
    ],
)
def test_a_fault_on_the_fp8_wire_is_named_after_the_last_bucket(vllm_model, fault, message):
    model, config = vllm_model("qwen3")
    good = fp8_wire(state_of("qwen3"))
    sync(model, config, good)
    want = stored(model)
    with pytest.raises(JobError, match=message):
        sync(model, config, fault(good), buckets=3)
    sync(model, config, good)
    assert stored(model) == want


def test_what_a_sync_leaves_out_is_nan_in_the_engine(vllm_model):
    model, config = vllm_model("qwen3")
    state = state_of("qwen3")
    sync(model, config, state.items())
    model.load_weights(without(state.items(), f"{K1}.weight"))  # and no post-processing that would say so
    rows = model.model.layers[1].self_attn.qkv_proj.weight_scale
    assert torch.isnan(rows[2:3]).all() and torch.isfinite(rows[:2]).all() and torch.isfinite(rows[3:]).all()


def test_what_a_broken_off_sync_brought_does_not_count_for_the_next(vllm_model):
    model, config = vllm_model("qwen3")
    items = list(state_of("qwen3").items())
    model.load_weights(items)  # the sender died before the last message
    with pytest.raises(JobError, match=f"{K1} was not received"):
        sync(model, config, without(items, f"{K1}.weight"))


def test_a_worker_without_the_plug_in_does_not_start(vllm_model, monkeypatch):
    """Its quantization class still arrives, pickled inside vLLM's configuration, so vLLM itself would not notice."""
    from vllm.model_executor.custom_op import op_registry_oot

    vllm_model("qwen3")  # vLLM loads plug-ins once per process
    for name in ("RMSNorm", "SiluAndMul", "RotaryEmbedding", "Llama3RotaryEmbedding"):
        monkeypatch.delitem(op_registry_oot, name)
    dtype = torch.get_default_dtype()
    try:
        with pytest.raises(UserError, match="plug-in was not loaded in this worker"):
            vllm_model("qwen3")
    finally:
        torch.set_default_dtype(dtype)  # vLLM's context manager does not put it back when the body raises


def test_dummy_weights_are_quantized_noise(vllm_model):
    """vLLM's dummy loader alone would leave FP8 codes of which nearly all are zero."""
    model, config = vllm_model("llama-ragged-tied")
    sync(model, config, [])
    layer = model.model.layers[0].mlp.down_proj
    codes = layer.weight.data[:192, :320].to(torch.float32)
    assert (codes == 0).float().mean() < 0.01 and codes.std() > 100
    assert torch.isfinite(layer.weight_scale).all() and (layer.weight_scale > 0).all()
