"""jetrl's layers inside real vLLM models, built in this process without an engine: which flow gets which, both weight wires, faults."""

import itertools

import pytest
import torch
from checkpoints_for_tests import ARCHITECTURES
from vllm_models_for_tests import vllm_models
from vllm_sync_for_tests import K1, bundled_wire, changed, fp8_wire, packed_wire, state_of, stored, sync, without

from jetrl.errors import JobError, UserError

# Importing vLLM takes half a minute here, and it inspects every architecture in a process of its own.
pytestmark = pytest.mark.slow

SHARED = {"JetRMSNorm", "JetSiluAndMul", "JetRotaryEmbedding"}


@pytest.fixture(scope="module", params=["before_the_handshake", "after_it"])
def vllm_model(request, tmp_path_factory):
    """Function (architecture, flow, **engine arguments) -> (model, model_config), weights unset.

    The handshake gives a model its table of places (refit_plan.py); before it, vLLM's loaders call the layers' own.
    """
    from jetrl.integrations.vllm.refit_plan import attach

    def build(architecture: str, flow: str | None = "unified_fp8", **arguments):
        asked = {"quantization": "jetrl", "additional_config": {"jetrl_flow": flow}} if flow else {}
        model, config = model_of(architecture, **asked, **arguments)
        if request.param == "after_it":
            attach(model)
        return model, config

    with vllm_models(tmp_path_factory.mktemp("vllm")) as model_of:
        yield build


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
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_unified_rollout_turns_by_the_trainers_cosines_where_vllms_differ_in_the_last_bit(
    vllm_model, monkeypatch, architecture, dtype
):
    """The last bit as a GPU's powers have it; a trainer's module on this device says what the table must hold."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    from jetrl.integrations.vllm import operators

    powers = RotaryEmbedding._compute_inv_freq
    inexact = lambda self, base: torch.nextafter(powers(self, base), torch.tensor(0.0))  # noqa: E731
    monkeypatch.setattr(RotaryEmbedding, "_compute_inv_freq", inexact)
    longer = {"max_position_embeddings": 4096}
    operators.forget_cached_rotary()
    stock, _ = vllm_model(architecture, "bf16", dtype=dtype, hf_overrides=longer)
    model, config = vllm_model(architecture, dtype=dtype, hf_overrides=longer)
    (before,), (after,) = (
        {m.cos_sin_cache for m in each.modules() if hasattr(m, "cos_sin_cache")} for each in (stock, model)
    )
    hf_config = AutoConfig.from_pretrained(config.model, **longer)
    trainer = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16).model.rotary_emb
    cos, sin = trainer(torch.empty(0, dtype=getattr(torch, dtype)), torch.arange(4096)[None])
    half = cos.shape[-1] // 2
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
    assert torch.equal(after, expected)
    assert after.dtype == before.dtype and not torch.equal(before, expected)


def test_cosines_of_another_rotation_stay_vllms_and_are_named(vllm_model, monkeypatch, capsys):
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    from jetrl.integrations.vllm import operators

    operators.forget_cached_rotary()
    powers = RotaryEmbedding._compute_inv_freq
    monkeypatch.setattr(RotaryEmbedding, "_compute_inv_freq", lambda self, base: powers(self, base * 1.01))
    tables = []
    for flow in ("bf16", "unified_fp8"):
        model, _ = vllm_model("qwen3", flow)
        tables += [m.cos_sin_cache for m in model.modules() if hasattr(m, "cos_sin_cache")][:1]
    assert torch.equal(*tables)
    assert "rotary: some tokens will get other bits than in the trainer, because of cosines that differ" in (
        capsys.readouterr().out
    )


def test_the_cosines_need_no_matrix_product(monkeypatch):
    """In vLLM's worker one may be TF32 (batch-invariant mode, which VeRL's full_determinism switches on): angles off by 0.4."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import Qwen3Config

    from jetrl.integrations.vllm import rotary_cache

    called = set()

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.add(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    config = Qwen3Config(head_dim=64, max_position_embeddings=40000, vocab_size=256, num_hidden_layers=1)
    with torch.device("meta"):  # as a worker builds models with the GPU as the default: nothing may land there unasked
        ((frequencies, scaling),) = rotary_cache._trainer_frequencies(config)
    monkeypatch.setattr(rotary_cache, "_trainer_frequencies", lambda config: [(frequencies, scaling)])
    cache = table_in_float64(frequencies, 40000).to(torch.bfloat16)
    with torch.device("meta"), Record():
        assert rotary_cache._fill(cache, config) is None
    assert {"cos", "sin", "mul"} <= called and not called & {"mm", "bmm", "matmul", "addmm", "baddbmm"}
    assert torch.equal(cache, rotary_cache._rows(frequencies, scaling, 0, 40000, torch.bfloat16))


def table_in_float64(frequencies, rows):
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * frequencies.to(torch.float64)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@pytest.mark.parametrize("family", ["Cohere", "Gemma3Text"])
def test_rotary_modules_of_another_form_are_left_to_vllm(family):
    """Interleaved pairs; one table for each type of layer. vLLM's own table has the same values as a plain one would."""
    import transformers

    from jetrl.integrations.vllm import rotary_cache

    config = getattr(transformers, f"{family}Config")(
        hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=256, rope_parameters=None,
    )  # fmt: skip
    theta = (config.rope_parameters or {}).get("rope_theta") or 1e4
    before = table_in_float64(theta ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64), 512).to(torch.bfloat16)
    cache = before.clone()
    assert rotary_cache._fill(cache, config) is not None
    assert torch.equal(cache, before)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_both_wires_leave_the_same_bytes_whatever_the_buckets(vllm_model, architecture):
    model, config = vllm_model(architecture)
    state = state_of(architecture)
    sync(model, config, state.items())
    pointers = {n: p.data_ptr() for n, p in model.named_parameters()}
    first = stored(model)
    sync(model, config, state_of(architecture, seed=1).items())
    assert stored(model) != first
    # Only the table takes bundles, and only after the handshake does a trainer send any.
    wires = (packed_wire, fp8_wire, *[bundled_wire] * hasattr(model, "jetrl_load_plan"))
    for wire, buckets in itertools.product(wires, (1, 7)):
        sync(model, config, state_of(architecture, seed=1).items())
        sync(model, config, wire(state), buckets)
        assert stored(model) == first
        assert {n: p.data_ptr() for n, p in model.named_parameters()} == pointers


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


def rows_of_nan(packed: torch.Tensor) -> torch.Tensor:
    """The scales' bytes all ones."""
    changed = packed.clone()
    changed.view(torch.uint8)[packed.shape[0] // 128 * 128 :] = 0xFF
    return changed


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda i: without(i, f"{K1}.weight"), f"{K1} was not received"),
        (lambda i: changed(i, f"{K1}.weight", lambda t: t[:-2]), f"{K1} arrived as FP8 codes of shape"),
        (lambda i: changed(i, f"{K1}.weight", lambda t: t[:-1]), rf"{K1} \(scale\) was not received"),
        (lambda i: changed(i, f"{K1}.weight", rows_of_nan), f"{K1} holds NaN or Inf"),
    ],
)
def test_a_fault_of_a_packed_weight_is_named(vllm_model, fault, message):
    model, config = vllm_model("qwen3")
    with pytest.raises(JobError, match=message):
        sync(model, config, fault(packed_wire(state_of("qwen3"))), buckets=3)


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


def test_other_floating_point_dtypes_are_taken_as_bfloat16_and_integers_are_not(vllm_model):
    model, config = vllm_model("qwen2-bias")
    state = state_of("qwen2-bias")
    sync(model, config, state.items())
    want = {n: p.data.clone() for n, p in model.named_parameters()}
    for dtype in (torch.float32, torch.float64):
        sync(model, config, [(n, t.to(dtype)) for n, t in state.items()])
        for n, p in model.named_parameters():
            assert torch.equal(p.data.view(torch.uint8), want[n].view(torch.uint8)), (n, dtype)
    with pytest.raises(JobError, match=f"{K1} arrived as torch.int32"):
        sync(model, config, changed(state.items(), f"{K1}.weight", lambda t: t.int()))


def test_verls_delta_sync_is_refused_by_name(tmp_path):
    from vllm.config import WeightTransferConfig

    with vllm_models(tmp_path) as model_of, pytest.raises(UserError, match="backend=delta_sharded is not .*=naive$"):
        model_of("qwen3", quantization="jetrl", weight_transfer_config=WeightTransferConfig(backend="verl_delta_ipc"))


@pytest.mark.parametrize(
    "wire", [lambda state: list(state.items()), packed_wire, fp8_wire], ids=["bf16", "packed", "fp8"]
)
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2-bias"])
def test_vllms_own_reload_layer_by_layer_brings_every_layer(architecture, wire, vllm_model):
    """`reload_weights`: vLLM counts what is copied into meta tensors, then loads and finishes one layer after another."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model, config = vllm_model(architecture)
    sync(model, config, state_of(architecture, seed=1).items())
    want = stored(model)
    sync(model, config, state_of(architecture, seed=2).items())
    assert stored(model) != want
    places = {n: p.data_ptr() for n, p in model.named_parameters()}
    initialize_layerwise_reload(model)
    model.load_weights(wire(state_of(architecture, seed=1)))
    finalize_layerwise_reload(model, config)
    assert stored(model) == want
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == places
    assert not any(m.jetrl_receiver._places for m in model.modules() if hasattr(m, "jetrl_receiver"))
    sync(model, config, wire(state_of(architecture, seed=1)))  # and leaves nothing behind


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
