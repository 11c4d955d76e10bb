"""A model's own load_weights for syncs (refit_plan.py): what its table takes, and what a failed sync leaves, over all layers."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_models_for_tests import vllm_models
from vllm_sync_for_tests import K1, bundled_wire, changed, fp8_wire, packed_wire, state_of, stored, sync, without

from jetrl.errors import JobError
from jetrl.weight_bundle import bundled

# Importing vLLM takes half a minute here, and it inspects every architecture in a process of its own.
pytestmark = pytest.mark.slow


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
        ("qwen2-bias", "model.layers.1.self_attn.k_proj.bias", "model.layers.1.self_attn.k_proj.bias"),
        ("llama-ragged-tied", "model.embed_tokens.weight", "model.embed_tokens.weight"),
    ),
)
def test_a_norm_a_bias_or_an_embedding_that_a_sync_leaves_out_is_named(tmp_path, architecture, left_out, named):
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
