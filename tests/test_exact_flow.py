"""Flow unified_exact: kernels in the graph, refusals before a job starts, precision=auto, the trainer's log-probabilities."""

import copy
import functools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from launch_for_tests import words
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, Qwen3Config

from jetrl import attention
from jetrl.attention import choice
from jetrl.attention.rotary_table import rotary_table, share_rotary_table
from jetrl.check import main as jetrl_check
from jetrl.convert import convert
from jetrl.errors import JobError, UserError
from jetrl.launch import exact
from jetrl.launch.args import parse
from jetrl.launch.compose import compose_job
from jetrl.precision import kernels
from jetrl.precision.build_hf import build_inference_graph, build_training_graph, meta_model
from jetrl.precision.flow import flow_from_dict, load_flow
from jetrl.precision.graph import PrecisionGraph
from jetrl.precision.subgraph import check as compare
from jetrl.precision.trainer_kernels import exact_graph, trainer_kernels

CONFIG = Qwen3Config(
    hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    head_dim=64, vocab_size=64, dtype="bfloat16",
)  # fmt: skip


@pytest.fixture(scope="module")
def graphs():
    flow, model = load_flow("unified_exact"), meta_model(CONFIG)
    return build_inference_graph(model, flow.rollout), build_training_graph(model, flow.train)


def _with_kernel(graph: PrecisionGraph, name: str, definition: str) -> PrecisionGraph:
    operators = (replace(o, definition=definition) if o.name == name else o for o in graph.operators)
    return PrecisionGraph(tuple(operators), graph.edges, graph.meta)


def test_every_operator_of_the_forward_names_its_kernel_and_the_formats_are_those_of_unified_fp8(graphs):
    infer, train = graphs
    assert compare(infer, train) == []
    computing = [o for o in train.operators if o.phase == "forward" and o.kind not in ("parameter", "output")]
    assert computing and all(o.definition for o in computing)
    read = infer.edge_by_key["model.layers.0.self_attn.o_proj.x_quantizer", "x"]
    assert infer.operator_by_name[read.producer].definition == kernels.ATTENTION
    plain = build_inference_graph(meta_model(CONFIG), load_flow("unified_fp8").rollout)
    assert plain.edges == infer.edges and plain.digest() != infer.digest()


@pytest.mark.parametrize(
    "name",
    ("model.layers.1.self_attn", "model.norm", "log_softmax", "model.layers.0.self_attn.rotary", "lm_head",
     "model.layers.0.mlp.act_fn", "model.layers.1.mlp.down_proj", "model.rotary_emb", "model.embed_tokens"),
)  # fmt: skip
def test_a_differing_kernel_is_one_violation_that_names_the_operator(graphs, name):
    infer, train = graphs
    found = compare(_with_kernel(infer, name, "another kernel"), train)
    assert [v.operator for v in found] == [name]
    assert "another kernel" in str(found[0]) and train.operator_by_name[name].definition in str(found[0])


def test_flows_that_do_not_ask_for_equal_bits_compare_no_kernels():
    flow = load_flow("unified_fp8")
    graph = build_inference_graph(meta_model(CONFIG), flow.rollout)
    assert all(not o.definition for o in graph.operators if o.kind != "quantizer")


@pytest.mark.parametrize("key,value", (("exclude", ["*.q_proj"]), ("bf16_last_layers", 1), ("linear", "bf16")))
def test_a_linear_in_bf16_is_refused(key, value):
    data = {"name": "mine", "unified": True, "train": {"linear": "fp8", "exact": True} | {key: value}, "rollout": {}}
    with pytest.raises(UserError, match=f"flow.train.exact=True needs {key}="):
        flow_from_dict(data)


def _converted():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG)).to(torch.bfloat16)
    graph = build_training_graph(model, load_flow("unified_exact").train)
    return model, graph


def test_a_trainer_whose_attention_or_layers_are_stock_is_refused_by_operator():
    model, graph = _converted()
    convert(model, graph)
    model.config._attn_implementation = "sdpa"
    with pytest.raises(
        UserError, match=r"needs attention with undivided keys for model.layers.0.self_attn, .* transformers sdpa"
    ):
        exact_graph(model, graph)
    model.config._attn_implementation = "jetrl_fa3"
    assert exact_graph(model, graph).digest() == graph.digest()
    unfused, graph = _converted()
    convert(unfused, graph, fuse_layers=False)
    unfused.config._attn_implementation = "jetrl_fa3"
    share_rotary_table(unfused)
    kernel_of = trainer_kernels(unfused)
    differing = {o.kind for o in graph.operators if o.phase == "forward" and kernel_of(o)}
    assert differing == {"norm", "rotary", "linear", "activation", "residual_add"}


def test_the_shared_rotary_table_is_hugging_faces_to_the_last_bit_or_so():
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG))
    positions = torch.randint(0, CONFIG.max_position_embeddings, (1, 300))
    stock = model.model.rotary_emb(torch.zeros(1, 300, 1), positions)
    assert share_rotary_table(model) == 1
    shared = model.model.rotary_emb(torch.zeros(1, 300, 1), position_ids=positions)
    for a, b, half in zip(stock, shared, rotary_table(CONFIG, CONFIG.max_position_embeddings), strict=True):
        assert torch.equal(b[0, :, :32], half[positions[0]]) and torch.equal(b[..., :32], b[..., 32:])
        # Both are the cosine of one float32 angle, rounded to float32: within one unit in the last place of 1.
        torch.testing.assert_close(a, b, rtol=0, atol=2.0**-23)
    assert not any("table" in key for key in model.state_dict())


@functools.cache
def _composed():
    return compose_job(parse(["precision=unified_exact", "model=qwen3-8b", "hardware=1gpu"]), resolve_model=False)


def _cfg(*words_):
    cfg = copy.deepcopy(_composed())
    for word in words_:
        key, _, value = word.partition("=")
        OmegaConf.update(cfg, key, OmegaConf.create(f"x: {value}").x, force_add=True)
    return cfg


@pytest.mark.parametrize(
    "word,operator",
    (
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "o_proj and down_proj"),
        ("actor_rollout_ref.rollout.top_p=0.9", "log_softmax"),
        ("actor_rollout_ref.rollout.top_k=50", "log_softmax"),
        ("actor_rollout_ref.model.use_fused_kernels=true", "log_softmax"),
        ("actor_rollout_ref.model.use_remove_padding=false", "attention"),
        ("actor_rollout_ref.model.override_config.attn_implementation=sdpa", "attention"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8", "attention"),
        ("actor_rollout_ref.rollout.dtype=float32", "every operator"),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "attention"),
    ),
)
def test_what_breaks_equal_bits_is_refused_with_operator_and_key(word, operator):
    key, _, value = word.partition("=")
    found = exact.obstacle(_cfg(word))
    assert found.startswith(f"{operator}: ") and f"{key}={value}".lower() in found.lower() and "set it to" in found
    with pytest.raises(UserError, match="unified_exact cannot have equal bits in .*or use precision=unified_fp8"):
        exact.check(_cfg(word), "unified_exact")


def test_nothing_stands_against_the_shipped_gpu_job():
    assert exact.obstacle(_cfg()) is None
    exact.check_heads(_cfg(), "unified_exact", {"head_dim": 128})
    exact.check_heads(_cfg("trainer.device=cpu"), "unified_exact", {"hidden_size": 96, "num_attention_heads": 1})


def test_heads_whose_bits_differ_between_decode_and_prefill_are_refused():
    assert exact.EXACT_HEADS == choice.EXACT_HEADS
    with pytest.raises(UserError, match="this model's have 96"):
        exact.check_heads(_cfg(), "unified_exact", {"hidden_size": 960, "num_attention_heads": 10})


def _folder_with_heads_of(size, folder):
    config = CONFIG.to_dict() | {"head_dim": size, "architectures": ["Qwen3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return f"actor_rollout_ref.model.path={folder}"


def test_the_check_refuses_such_heads_too(capsys, tmp_path):
    words_ = ["precision=unified_exact", "hardware=1gpu", _folder_with_heads_of(96, tmp_path)]
    assert jetrl_check(words_) == 2 and "this model's have 96; use precision=unified_fp8" in capsys.readouterr().err
    _folder_with_heads_of(64, tmp_path)
    assert jetrl_check(words_) == 0


def test_auto_takes_unified_fp8_for_such_heads_and_unified_exact_for_others(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "fa3_obstacle", lambda: None)  # a machine that can run FA3
    line = parse(["precision=auto", "hardware=1gpu", _folder_with_heads_of(96, tmp_path)])
    assert compose_job(line).flow.name == "unified_fp8"
    assert "auto: unified_fp8 (no equal bits in attention: FA3 was shown to" in capsys.readouterr().err
    _folder_with_heads_of(64, tmp_path)
    assert compose_job(line).flow.name == "unified_exact"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="config.json has no hidden_size"):
        compose_job(line)


def test_a_cpu_job_packs_and_auto_takes_unified_fp8_there(capsys, tmp_path):
    assert compose_job(parse(words(tmp_path, "precision=unified_exact"))).actor_rollout_ref.model.use_remove_padding
    cfg = compose_job(parse(words(tmp_path, "precision=auto")))
    assert cfg.choices.precision == "unified_fp8" and cfg.flow.name == "unified_fp8"
    assert "precision=auto: unified_fp8 (no equal bits in reasonable time on a CPU)" in capsys.readouterr().err


def test_equality_counts_response_tokens_that_differ_and_ends_the_job():
    from jetrl.integrations.verl.log_probs import Equality

    lengths, prompts = (5, 4), (2, 3)
    values = torch.randn(9)
    starts = [0, 5]
    old = [values[s + p - 1 : s + n - 1] for s, n, p in zip(starts, lengths, prompts, strict=True)]
    nested = torch.nested.nested_tensor
    data = {
        "prompts": nested([torch.zeros(p) for p in prompts], layout=torch.jagged),
        "responses": nested([torch.zeros(n - p) for n, p in zip(lengths, prompts, strict=True)], layout=torch.jagged),
        "old_log_probs": nested(old, layout=torch.jagged),
        "response_mask": nested([torch.ones(len(o)) for o in old], layout=torch.jagged),
    }
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 5, 9]))}
    equality = Equality()
    assert equality.around(lambda model_output, data: "loss")(model_output=output, data=_dict(data)) == "loss"
    assert equality.metrics()["log_prob_tokens_compared"] == 4 and equality.metrics()["log_prob_tokens_differing"] == 0
    equality.require()
    values[2] += 0.25
    equality.around(lambda model_output, data: "loss")(model_output=output, data=_dict(data))
    assert equality.metrics()["log_prob_max_difference"] == pytest.approx(0.25, rel=1e-5)
    with pytest.raises(JobError, match="1 of 8 tokens differ"):
        equality.require()


def _dict(data):
    from tensordict import TensorDict

    return TensorDict(data, batch_size=[2])


@pytest.mark.parametrize(("flow", "columns"), [("unified_fp8", 40), ("bf16", 64), ("fp8_rollout", 64)])
def test_trainer_log_probs_are_those_of_the_operator_in_float32_and_masked_where_shared(flow, columns, monkeypatch):
    from jetrl.integrations.verl import log_probs
    from jetrl.integrations.verl.log_probs import SharedLogProbs

    monkeypatch.setattr(log_probs, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False)

    class Base:
        def prepare_model_outputs(self, *args):
            raise AssertionError("VeRL's path is not asked when only log-probabilities are wanted")

        def _gather_and_unpad_packed(self, tensor, pad_size):
            return tensor[:-pad_size] if pad_size else tensor

    class Engine(SharedLogProbs, Base):
        model_config = SimpleNamespace(tokenizer=range(40))

    Engine.flow = load_flow(flow)
    logits = torch.randn(1, 10, 64).to(torch.bfloat16).requires_grad_()
    ids, temperature = torch.randint(0, 40, (10,)), torch.full((10,), 0.7)
    batch = _dict({"input_ids": torch.nested.nested_tensor([torch.zeros(5), torch.zeros(4)], layout=torch.jagged)})
    args = {"input_ids_rmpad_rolled": ids, "temperature_rmpad": temperature, "pad_size": 1}
    result = Engine().prepare_model_outputs(SimpleNamespace(logits=logits), args, batch, None)["log_probs"]
    want = attention.token_logprobs(logits[0].detach(), ids, temperature, columns)[:-1]
    assert result.dtype == torch.float32 and torch.equal(result.values(), want)
    result.values().sum().backward()
    assert logits.grad[0, :9, :40].abs().sum() > 0 and logits.grad[0, :9, 40:].any() == (columns == 64)
    padded = torch.zeros(2, 5, 64, dtype=torch.bfloat16)
    padded[0], padded[1, :4] = logits[0, :5].detach(), logits[0, 5:9].detach()
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(batch, use_remove_padding=False)
    args = {"input_ids_rmpad_rolled": ids[:9], "temperature": torch.full((2,), 0.7)}
    result = Engine().prepare_model_outputs(SimpleNamespace(logits=padded), args, batch, None)["log_probs"]
    assert torch.equal(result.values(), want)


def test_with_flash_attn_a_stock_trainer_keeps_verls_log_probs(monkeypatch):
    from jetrl.integrations.verl import log_probs

    class Base:
        def prepare_model_outputs(self, *args):
            return "VeRL's"

    class Engine(log_probs.SharedLogProbs, Base):
        flow = load_flow("fp8_rollout")

    monkeypatch.setattr(log_probs, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", True)
    assert Engine().prepare_model_outputs(None, {}, _dict({}), None) == "VeRL's"
