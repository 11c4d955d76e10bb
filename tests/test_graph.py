"""The precision graph of real Hugging Face models on the meta device: what is in it, and what a check of two finds."""

import json
import resource
import time

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from jetrl.convert import convert
from jetrl.errors import UserError
from jetrl.linear import Float8Linear
from jetrl.precision.architectures import bundled, load_config
from jetrl.precision.build_hf import build_inference_graph, build_training_graph, declare_from_config, meta_model
from jetrl.precision.flow import PrecisionAssignment, flow_names, load_flow
from jetrl.precision.formats import BF16, FP32, LinearFormat, TensorFormat, fp8_block, fp8_tile, fp8_token_tile
from jetrl.precision.graph import PrecisionGraph
from jetrl.precision.layout_rules import with_tensor_parallel
from jetrl.precision.patterns import match
from jetrl.precision.subgraph import check

SIZES = dict(
    hidden_size=256,
    intermediate_size=384,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
)
QWEN3 = Qwen3Config(**SIZES, head_dim=64)
FP8 = PrecisionAssignment(linear="fp8")
Q1 = "model.layers.1.self_attn.q_proj"
MODEL_GROUPS = [entry["names"][0] for entry in bundled().values()]


def unified(config, **changes):
    return declare_from_config(config, FP8, training=True, **changes)


def forward_operands(graph, operator):
    return {e.tensor: (e.producer, e.format) for e in graph.operands[operator] if e.phase == "forward"}


def test_one_linear_has_the_edges_of_the_paper():
    graph = unified(QWEN3)
    assert forward_operands(graph, Q1) == {
        "x": (f"{Q1}.x_quantizer", fp8_tile("fp32")),
        "weight": (f"{Q1}.weight_quantizer", fp8_block("fp32")),
    }
    # Quantizers read the carrier, and the weight's reads bf16(master) whatever the master is.
    assert forward_operands(graph, f"{Q1}.x_quantizer") == {"x": ("model.layers.1.input_layernorm", BF16)}
    assert forward_operands(graph, f"{Q1}.weight_quantizer") == {"weight": (f"{Q1}.weight", BF16)}
    edges = {key: edge.format for key, edge in graph.edge_by_key.items()}
    assert edges[f"{Q1}.dgrad", "dy"] == fp8_tile("fp32")
    assert edges[f"{Q1}.dgrad", "weight"] == fp8_block("fp32")
    assert edges[f"{Q1}.wgrad", "dy"] == edges[f"{Q1}.wgrad", "x"] == fp8_token_tile("fp32")
    saved = graph.edge_by_key[f"{Q1}.wgrad_x_quantizer", "x"]
    assert (saved.producer, saved.format, saved.phase) == (f"{Q1}.x_quantizer", fp8_tile("fp32"), "saved")
    # Gradients between operators stay BF16.
    assert edges[f"{Q1}.dy_quantizer", "dy"] == BF16
    assert graph.edge_by_key[f"{Q1}.dy_quantizer", "dy"].producer == "model.layers.1.self_attn.q_norm.backward"


def test_master_format_is_the_dtype_of_the_parameters_and_moments_are_fp32():
    model = meta_model(QWEN3)
    for dtype, expected in ((torch.float32, FP32), (torch.bfloat16, BF16)):
        graph = build_training_graph(model.to(dtype), FP8)
        assert graph.edge_by_key["model.norm.weight", "master"].format == expected
        assert graph.edge_by_key["optimizer", "model.norm.weight.exp_avg_sq"].format == FP32


def test_the_training_graph_contains_the_inference_graph_edge_by_edge():
    train = unified(QWEN3)
    infer = declare_from_config(QWEN3, FP8)
    assert check(infer, train) == []
    assert set(infer.edges) <= set(train.edges) and set(infer.operators) <= set(train.operators)
    assert infer.digest() == train.forward().digest() != train.digest()


def test_every_operator_of_a_layer_is_a_node():
    kinds = {}
    for operator in unified(QWEN3).operators:
        if operator.phase == "forward" and operator.name.startswith("model.layers.0"):
            kinds[operator.kind] = kinds.get(operator.kind, 0) + 1
    # 7 linears with two quantizers and one weight each; 4 norms with their gains.
    assert kinds == {
        "linear": 7, "quantizer": 14, "parameter": 11, "norm": 4, "rotary": 1, "attention": 1, "activation": 1,
        "residual_add": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "biased", "tied"),
    [
        (QWEN3, False, False),
        (Qwen2Config(**SIZES), True, False),
        (LlamaConfig(**SIZES), False, False),
        (LlamaConfig(**SIZES, tie_word_embeddings=True), False, True),
    ],
    ids=["qwen3", "qwen2 with biases", "llama", "tied embeddings"],
)
def test_the_four_architectures_are_fully_classified(config, biased, tied):
    graph = unified(config)
    assert graph.meta["unclassified"] == []
    assert len(graph.fp8_linear_names()) == 7 * 3
    assert graph.linear_names()[-1] == "lm_head" and not graph.linear_format("lm_head").is_fp8
    assert ((Q1, "bias") in graph.edge_by_key) == biased
    source = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert graph.edge_by_key["lm_head", "weight"].producer == source


def test_router_and_experts_stay_unquantized():
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    graph = unified(config)
    assert len(graph.fp8_linear_names()) == 4 * 3 and graph.meta["unclassified"] == []
    kinds = {o.name: o.kind for o in graph.operators}
    assert kinds["model.layers.0.mlp.gate"] == "router" and kinds["model.layers.0.mlp.experts"] == "experts"
    assert {e.format for e in graph.operands["model.layers.0.mlp.experts"]} == {BF16}


def test_what_cannot_be_classified_is_listed_and_never_wired():
    graph = unified(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=128))
    assert any("h.0.attn.c_attn (Conv1D)" in name for name in graph.meta["unclassified"])
    assert graph.fp8_linear_names() == []
    config = Qwen3Config(**SIZES, head_dim=64)
    model = meta_model(config)
    model.model.layers[1].mlp.extra = torch.nn.Dropout(0.5)
    graph = build_training_graph(model, FP8)
    assert graph.meta["unclassified"][-1].endswith("extra (Dropout)")
    # The linears are still known; what feeds them no longer is.
    assert graph.edge_by_key[f"{Q1}.x_quantizer", "x"].producer == "unclassified"


def test_an_8b_graph_takes_under_10_seconds_and_2_gigabytes():
    config, source = load_config("Qwen/Qwen3-8B")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    graph = declare_from_config(config, FP8, training=True)
    graph.digest()
    assert time.perf_counter() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 * 1024 * 1024  # kB
    assert len(graph.fp8_linear_names()) == 36 * 7 and "bundled" in source


@pytest.mark.parametrize("flow_name", flow_names())
@pytest.mark.parametrize("path", MODEL_GROUPS)
def test_verdict_of_every_model_and_flow(path, flow_name):
    config, _ = load_config(path)
    flow = load_flow(flow_name)
    train = declare_from_config(config, flow.train, training=True)
    violations = check(declare_from_config(config, flow.rollout), train)
    if flow.unified:
        assert violations == []
    else:
        linears = [name for name in train.linear_names() if name != "lm_head"]
        expected = {(name, tensor) for name in linears for tensor in ("x", "weight")}
        assert {(v.operator, v.tensor) for v in violations} == expected and len(violations) == len(expected)


def test_vllm_fp8_is_described_as_what_it_is():
    train = declare_from_config(QWEN3, PrecisionAssignment(), training=True)
    violations = check(declare_from_config(QWEN3, load_flow("fp8_vllm").rollout), train)
    first = next(v for v in violations if (v.operator, v.tensor) == (Q1, "x"))
    assert first.rollout == "e4m3 tile_1x128 pow2-scale by vllm's quantizer" and first.training == "bf16"
    assert first.key == "actor_rollout_ref.rollout.engine_kwargs.vllm.quantization"


def test_json_round_trip_and_digest():
    graph = unified(QWEN3)
    again = PrecisionGraph.from_dict(json.loads(json.dumps(graph.to_dict())))
    assert again == graph and again.digest() == graph.digest()
    assert unified(QWEN3, master=FP32).digest() != unified(QWEN3, master=BF16).digest()
    assert with_tensor_parallel(graph, 2).digest() == graph.digest()


def test_linear_format_is_what_the_layer_gets():
    for graph in (unified(QWEN3), declare_from_config(QWEN3, FP8)):
        assert graph.linear_format(Q1) == LinearFormat.fp8_blockwise("fp32")
        assert graph.linear_format("lm_head") == LinearFormat.bf16()
        assert graph.linear_format("model.norm") is None and graph.linear_format("no.such.layer") is None


def test_converted_model_reads_back_as_declared():
    model = meta_model(QWEN3)
    declared = build_training_graph(model, FP8)
    convert(model, declared)
    live = build_training_graph(model, None)
    assert live.digest() == declared.digest()
    # Swap one layer back: the live graph says so, and the check names it.
    layer = model.model.layers[1].self_attn.q_proj
    assert type(layer) is Float8Linear
    layer.__class__ = torch.nn.Linear
    del layer.format
    violations = check(build_inference_graph(meta_model(QWEN3), FP8), build_training_graph(model, None))
    assert [(v.operator, v.tensor) for v in violations] == [(Q1, "weight"), (Q1, "x")]
    assert violations[0].key == "flow.train.exclude" and violations[0].training == "bf16"


def test_changing_one_live_scale_format_is_named():
    model = meta_model(QWEN3)
    convert(model, build_training_graph(model, FP8))
    model.model.layers[2].mlp.up_proj.format = LinearFormat.fp8_blockwise("pow2")
    violations = check(build_inference_graph(meta_model(QWEN3), FP8), build_training_graph(model, None))
    assert [(v.operator, v.tensor) for v in violations] == [("model.layers.2.mlp.up_proj", t) for t in ("weight", "x")]
    assert {v.key for v in violations} == {"flow.rollout.scale_format"}
    assert "pow2" in violations[0].training and "\n" not in str(violations[0])


@pytest.mark.parametrize(
    ("change", "key", "layers"),
    [
        (dict(exclude=("model.layers.1.*",)), "flow.train.exclude", {1}),
        (dict(bf16_first_layers=1), "flow.train.bf16_first_layers", {0}),
        (dict(bf16_last_layers=2), "flow.train.bf16_last_layers", {1, 2}),
    ],
)
def test_layers_kept_on_the_rollout_only_are_named_with_their_key(change, key, layers):
    rollout = PrecisionAssignment(linear="fp8", **change)
    violations = check(declare_from_config(QWEN3, rollout), unified(QWEN3))
    assert {v.key for v in violations} == {key}
    assert {int(v.operator.split(".")[2]) for v in violations} == layers
    assert len(violations) == 7 * 2 * len(layers)
    assert check(declare_from_config(QWEN3, rollout), declare_from_config(QWEN3, rollout, training=True)) == []


def test_kv_cache_format_is_checked():
    cache = TensorFormat("e4m3", "tensor", "fp32")
    violations = check(build_inference_graph(meta_model(QWEN3), FP8, kv=cache), unified(QWEN3))
    assert {(v.operator, v.tensor) for v in violations} == {
        (f"model.layers.{i}.self_attn", t) for i in range(3) for t in ("k", "v")
    }
    assert {v.key.rsplit(".", 1)[-1] for v in violations} == {"kv_cache_dtype"}


def test_another_carrier_is_checked():
    violations = check(declare_from_config(QWEN3, FP8, carrier=FP32), unified(QWEN3))
    assert {v.key for v in violations} == {"actor_rollout_ref.rollout.dtype"}
    assert check(declare_from_config(QWEN3, FP8, carrier=FP32), unified(QWEN3, carrier=FP32)) == []


@pytest.mark.parametrize(("tp", "cut"), [(1, set()), (2, {"k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"})])
def test_tensor_parallel_edges_must_be_block_edges(tp, cut):
    # 2 KV heads of 64 at TP 2: 64 rows a rank; 384 / 2 = 192 columns a rank; q and o: 256 / 2 = 128.
    violations = check(with_tensor_parallel(declare_from_config(QWEN3, FP8), tp), unified(QWEN3))
    assert {v.operator.rpartition(".")[2] for v in violations} == cut
    assert all(v.key.endswith("tensor_model_parallel_size") and "use one of 1" in v.advice for v in violations)


def test_a_merge_of_unlike_matrices_is_refused_although_both_sides_agree():
    assignment = PrecisionAssignment(linear="fp8", exclude=("model.layers.0.self_attn.v_proj",))
    infer, train = (declare_from_config(QWEN3, assignment, training=t) for t in (False, True))
    (violation,) = check(infer, train)
    assert violation.operator == "model.layers.0.self_attn.q_proj" and violation.key == "flow.rollout.exclude"


def test_blocks_spanning_two_matrices_of_a_merged_projection_are_named():
    graph = declare_from_config(QWEN3, FP8)
    names = [f"model.layers.0.self_attn.{n}_proj" for n in "qkv"]
    merged = {"name": "model.layers.0.self_attn.qkv_proj", "members": names, "method": "Fp8LinearMethod"}
    for per_member, rows, expected in (
        (False, [256, 64, 64], [names[1]]),
        (True, [256, 64, 64], []),
        (False, [256, 128, 128], []),
    ):
        graph.meta["merged"] = [{**merged, "rows": rows, "blocks_per_member": per_member}]
        assert [v.operator for v in check(graph, unified(QWEN3))] == expected


def test_patterns_are_anchored_and_must_match():
    names = ["model.layers.0.self_attn.q_proj", "model.layers.10.self_attn.q_proj", "lm_head"]
    assert match("model.layers.0.*", names, "k") == names[:1]
    assert match("*q_proj", names, "k") == names[:2]
    with pytest.raises(
        UserError, match=r"flow.train.exclude: .*'q_proj' matches none .* model.layers.0.self_attn.q_proj"
    ):
        match("q_proj", names, "flow.train.exclude")
    with pytest.raises(UserError, match="exceed the model's 3 decoder layers"):
        declare_from_config(QWEN3, PrecisionAssignment(linear="fp8", bf16_first_layers=2, bf16_last_layers=2))


def test_another_model_in_the_rollout_is_named():
    other = Qwen3Config(**{**SIZES, "intermediate_size": 512}, head_dim=64)
    violations = check(declare_from_config(other, FP8), unified(QWEN3))
    assert {v.key for v in violations} == {"actor_rollout_ref.model.path"}
    assert {v.tensor for v in violations} == {"shape"}


@pytest.mark.parametrize("wgrad", ["requantize", "copy", "blocks", "bf16"])
def test_each_kind_of_wgrad_is_read_back_from_its_edges_and_changes_no_forward_edge(wgrad):
    train = build_training_graph(meta_model(QWEN3), PrecisionAssignment(linear="fp8", wgrad=wgrad))
    assert train.linear_format(Q1) == LinearFormat.fp8_blockwise("fp32", wgrad)
    assert check(declare_from_config(QWEN3, FP8), train) == []
    saved = [e for e in train.edges if e.phase == "saved" and e.consumer.startswith(f"{Q1}.wgrad")]
    assert [(e.producer, str(e.format)) for e in saved] == {
        "requantize": [(f"{Q1}.x_quantizer", "e4m3 tile_1x128 fp32-scale")],
        "blocks": [(f"{Q1}.x_quantizer", "e4m3 tile_1x128 fp32-scale")],
        "copy": [(f"{Q1}.wgrad_x_quantizer", "e4m3 tile_128x1 fp32-scale")],
        "bf16": [("model.layers.1.input_layernorm", "bf16")],
    }[wgrad]
