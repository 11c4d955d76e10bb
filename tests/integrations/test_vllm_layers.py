"""jetrl's layers inside real vLLM models, built in this process without an engine: which flow gets which, both weight wires, faults."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from checkpoints_for_tests import ARCHITECTURES, build_model
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_models_for_tests import vllm_models

from jetrl.errors import JobError, UserError
from jetrl.integrations.verl.wire import quantized_on_the_way
from jetrl.packed_weight import parts
from jetrl.weight_bundle import bundled

# Importing vLLM takes half a minute here, and it inspects every architecture in a process of its own.
pytestmark = pytest.mark.slow

K1 = "model.layers.1.self_attn.k_proj"
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


def sync(model, model_config, items, buckets: int = 1) -> None:
    """What VeRL's worker extension does: load_weights per bucket, then post-processing once."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    items = list(items)
    for i in range(buckets):
        model.load_weights(items[i * len(items) // buckets : (i + 1) * len(items) // buckets])
    process_weights_after_loading(model, model_config, torch.device("cpu"))


def state_of(architecture: str, seed: int = 0) -> dict[str, torch.Tensor]:
    return {n: w.to(torch.bfloat16) for n, w in build_model(architecture, seed).state_dict().items()}


def packed_wire(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The weights as jetrl's own trainer makes them; it sends them in bundles."""
    matrices = {n.removesuffix(".weight"): "fp32" for n in state if n.endswith("_proj.weight")}
    return list(quantized_on_the_way(iter(state.items()), matrices, "cpu"))


def bundled_wire(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return list(bundled(packed_wire(state)))


def fp8_wire(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The same with scales in tensors of their own."""
    found = []
    for name, tensor in packed_wire(state):
        if tensor.dtype != torch.float8_e4m3fn:
            found.append((name, tensor))
            continue
        codes, scale = parts(tensor, state[name].shape)
        found += [(name, codes), (f"{name}_scale", scale)]
    return found


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
    # Only the table takes bundles, and only after the handshake does a trainer send any.
    wires = (packed_wire, fp8_wire, *[bundled_wire] * hasattr(model, "jetrl_load_plan"))
    for wire, buckets in itertools.product(wires, (1, 7)):
        sync(model, config, state_of(architecture, seed=1).items())
        sync(model, config, wire(state), buckets)
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


@pytest.fixture(scope="module")
def known_model(tmp_path_factory):
    """(model, model_config, its load_weights before jetrl's table), after the handshake and one sync."""
    from jetrl.integrations.vllm.refit_plan import attach

    with vllm_models(tmp_path_factory.mktemp("known")) as model_of:
        model, config = model_of("qwen3", quantization="jetrl")
        stock = model.load_weights
        attach(model)
        sync(model, config, state_of("qwen3").items())
        yield model, config, stock


def test_the_table_gives_vllm_only_what_is_neither_matrix_nor_norm(known_model, monkeypatch):
    model, config, stock = known_model
    seen = []

    def watching(weights):
        return stock((seen.append(name) or (name, tensor)) for name, tensor in weights)

    monkeypatch.setattr(model.load_weights, "_stock", watching)
    state = state_of("qwen3", seed=1)
    for items in (list(state.items()), packed_wire(state), bundled_wire(state), fp8_wire(state)):
        seen.clear()
        scales = {n for n, _ in model.named_parameters() if n.endswith("weight_scale")}
        sent = {n for n, _ in model.named_parameters()} - (scales if len(items) <= len(state) else set())
        assert model.load_weights(items) == sent
        assert sorted(seen) == ["lm_head.weight", "model.embed_tokens.weight"]
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter.data, state[name]), name
    sync(model, config, items)


@pytest.mark.parametrize(
    ("flow", "drafter", "wires"),
    [
        ("unified_fp8", None, ("bf16", "fp8")),
        ("unified_fp8", "mtp", ("bf16",)),
        ("bf16", None, ("bf16",)),
        (None, None, ("bf16",)),
    ],
)
def test_a_worker_says_fp8_only_where_its_models_load_weights_takes_it(tmp_path, monkeypatch, flow, drafter, wires):
    """vLLM's own block-FP8 layers can have the trainer's weight format; they cannot read its codes, nor bundles."""
    from jetrl.integrations.vllm import handshake

    monkeypatch.setattr(handshake, "_trainer_has_asked", False)  # and back at the end: `report` sets it
    asked = {"quantization": "jetrl", "additional_config": {"jetrl_flow": flow}} if flow else {}
    with vllm_models(tmp_path) as model_of:
        model, _ = model_of("qwen3", **asked)
        worker = SimpleNamespace(
            vllm_config=SimpleNamespace(quant_config=None, speculative_config=drafter),
            model_runner=SimpleNamespace(model=model), get_model=lambda: model, rank=0,
        )  # fmt: skip
        assert handshake.report(worker, [])["wires"] == wires


def test_verls_delta_sync_is_refused_by_name(tmp_path):
    from vllm.config import WeightTransferConfig

    with vllm_models(tmp_path) as model_of, pytest.raises(UserError, match="backend=delta_sharded is not .*=naive$"):
        model_of("qwen3", quantization="jetrl", weight_transfer_config=WeightTransferConfig(backend="verl_delta_ipc"))


def test_a_matrix_that_a_bundle_leaves_out_is_named(known_model):
    model, config, _ = known_model
    good = packed_wire(state_of("qwen3"))
    with pytest.raises(JobError, match=f"{K1} was not received"):
        sync(model, config, bundled(without(good, f"{K1}.weight")), buckets=3)
    sync(model, config, bundled(good))


@pytest.mark.parametrize(
    "architecture,left_out,named",
    (
        ("qwen3", "model.layers.1.self_attn.q_norm.weight", "model.layers.1.self_attn.q_norm.weight"),
        ("qwen3", "lm_head.weight", "lm_head.weight"),
        ("qwen2-bias", "model.norm.weight", "model.norm.weight"),
        ("llama-ragged-tied", "model.embed_tokens.weight", "model.embed_tokens.weight"),
    ),
)
def test_a_norm_or_an_embedding_that_a_sync_leaves_out_is_named(tmp_path, architecture, left_out, named):
    """vLLM's own loader would go on with what the last sync brought."""
    from jetrl.integrations.vllm.refit_plan import attach

    with vllm_models(tmp_path) as model_of:
        model, config = model_of(architecture, quantization="jetrl")
        attach(model)
        state = state_of(architecture)
        if architecture == "llama-ragged-tied":
            state.pop("lm_head.weight", None)  # trainers send a tied weight once
        for items in (list(state.items()), bundled_wire(state)):
            sync(model, config, items, buckets=3)
            with pytest.raises(JobError, match=f"weight sync incomplete: {named} was not received"):
                sync(model, config, [(n, t) for n, t in state.items() if n != left_out], buckets=2)
            model.load_weights(items[:5])  # then the sender died
            sync(model, config, items, buckets=2)


def test_a_failed_sync_leaves_nothing_behind_for_the_next(known_model):
    """Two layers at fault: post-processing ends at the first, so the second's fault and what later layers got is still there."""
    model, config, _ = known_model
    good = fp8_wire(state_of("qwen3"))
    sync(model, config, good)
    want = stored(model)
    bad = changed(good, f"{K1}.weight_scale", lambda t: t.half())
    bad = changed(bad, "model.layers.0.self_attn.q_proj.weight", lambda t: t[:-1])
    with pytest.raises(JobError, match=r"model.layers.0.self_attn.q_proj arrived as FP8 codes of shape"):
        sync(model, config, bad)
    sync(model, config, good)
    assert stored(model) == want


def test_every_layer_is_nan_until_a_broken_off_sync_is_made_good(known_model):
    model, config, _ = known_model
    items = list(state_of("qwen3").items())
    first = next(i for i, (name, _) in enumerate(items) if name.endswith("_proj.weight"))
    model.load_weights(items[: first + 1])  # one matrix, then the sender died
    scales = {n: p for n, p in model.named_parameters() if n.endswith("weight_scale")}
    assert sum(torch.isfinite(p).any().item() for p in scales.values()) == 1 and len(scales) == 8
    with pytest.raises(JobError, match=r"model.layers.1.mlp.down_proj was not received"):
        sync(model, config, [(n, t) for n, t in items if "layers.1.mlp.down_proj" not in n])
    sync(model, config, items)
    assert all(torch.isfinite(p).all() for p in scales.values())


def test_a_layer_that_the_first_sync_leaves_out_is_no_dummy_layer(tmp_path):
    from jetrl.integrations.vllm.refit_plan import attach

    with vllm_models(tmp_path) as model_of:
        model, config = model_of("qwen3", quantization="jetrl")
        attach(model)
        rest = [(n, t) for n, t in state_of("qwen3").items() if "layers.0." not in n]
        with pytest.raises(JobError, match=r"model.layers.0.self_attn.q_proj, .* was not received"):
            sync(model, config, rest)


def test_a_loader_that_vllm_puts_around_a_layers_own_is_called(known_model, monkeypatch):
    """As while vLLM reloads a checkpoint layer by layer."""
    model, config, _ = known_model
    weight, calls = model.model.layers[1].self_attn.qkv_proj.weight, []
    own = weight.weight_loader

    def around(param, loaded, shard_id):
        calls.append(shard_id)
        own(param, loaded, shard_id)

    monkeypatch.setattr(weight, "weight_loader", around)
    sync(model, config, state_of("qwen3").items())
    assert sorted(calls) == ["k", "q", "v"]


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


def test_a_norm_of_another_shape_is_refused_as_vllm_refuses_it(known_model):
    model, _, _ = known_model
    with pytest.raises(AssertionError, match="Attempted to load weight"):
        model.load_weights([("model.norm.weight", torch.ones(3))])


def test_the_check_at_the_end_asks_the_device_once_for_all_layers(known_model):
    model, config, _ = known_model
    calls = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    items = packed_wire(state_of("qwen3"))
    with Watch():
        sync(model, config, items)
    aten = torch.ops.aten
    assert calls.count(aten._foreach_norm.Scalar) == calls.count(aten.stack.default) == 1
    assert calls.count(aten._foreach_add_.Scalar) == 1  # the poison


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
