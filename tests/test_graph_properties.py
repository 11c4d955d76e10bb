"""Any single change to a rollout's graph is found and named, and nothing else is: by random mutation of valid pairs."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from jetrl.precision.build_hf import declare_from_config
from jetrl.precision.flow import PrecisionAssignment
from jetrl.precision.formats import DTYPES, GRANULARITIES, TensorFormat
from jetrl.precision.graph import PrecisionGraph
from jetrl.precision.subgraph import check

SIZES = dict(
    hidden_size=256,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
)
CONFIGS = [
    Qwen3Config(**SIZES, head_dim=64),
    Qwen2Config(**SIZES),
    LlamaConfig(**SIZES, tie_word_embeddings=True),
    Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
]
ASSIGNMENTS = [
    PrecisionAssignment(),
    PrecisionAssignment(linear="fp8"),
    PrecisionAssignment(linear="fp8", scale_format="pow2", exclude=("*o_proj",)),
    PrecisionAssignment(linear="fp8", bf16_first_layers=1),
]
PAIRS = [
    (declare_from_config(config, a), declare_from_config(config, a, training=True))
    for config in CONFIGS
    for a in ASSIGNMENTS
]
FORMATS = [
    TensorFormat(dtype, granularity, scale)
    for dtype in DTYPES
    for granularity in GRANULARITIES
    for scale in ("none", "fp32", "pow2")
    if (granularity == "none") == (scale == "none")
]

# Drawn by index: Hypothesis would print whole graphs.
ALL = st.sampled_from(range(len(PAIRS)))
QUANTIZED = st.sampled_from([i for i, (infer, _) in enumerate(PAIRS) if infer.fp8_linear_names()])


def named(violations):
    return [(v.operator, v.tensor) for v in violations]


def with_edge(graph: PrecisionGraph, old, *new) -> PrecisionGraph:
    return replace(graph, edges=tuple(e for e in graph.edges if e != old) + new)


@settings(max_examples=300, deadline=None)
@given(ALL, st.data())
def test_changing_one_format_names_exactly_that_edge(index, data):
    infer, train = PAIRS[index]
    edge = data.draw(st.sampled_from(infer.edges))
    other = data.draw(st.sampled_from([f for f in FORMATS if f != edge.format]))
    violations = check(with_edge(infer, edge, replace(edge, format=other)), train)
    assert named(violations) == [edge.key]
    assert str(other) in violations[0].rollout and str(edge.format) in violations[0].training
    assert violations[0].key and violations[0].advice and "\n" not in str(violations[0])


@settings(max_examples=150, deadline=None)
@given(ALL, st.data())
def test_another_producer_names_exactly_that_edge(index, data):
    infer, train = PAIRS[index]
    edge = data.draw(st.sampled_from(infer.edges))
    producer = data.draw(st.sampled_from([o.name for o in infer.operators if o.name != edge.producer]))
    assert named(check(with_edge(infer, edge, replace(edge, producer=producer)), train)) == [edge.key]


@settings(max_examples=100, deadline=None)
@given(ALL, st.data())
def test_a_missing_operand_names_exactly_that_edge(index, data):
    infer, train = PAIRS[index]
    edge = data.draw(st.sampled_from(infer.edges))
    assert named(check(with_edge(infer, edge), train)) == [edge.key]


@settings(max_examples=100, deadline=None)
@given(ALL, st.data())
def test_an_extra_operand_names_exactly_that_edge(index, data):
    infer, train = PAIRS[index]
    edge = data.draw(st.sampled_from(infer.edges))
    extra = replace(edge, tensor="smuggled")
    assert named(check(with_edge(infer, edge, edge, extra), train)) == [extra.key]


@settings(max_examples=100, deadline=None)
@given(QUANTIZED, st.data())
def test_another_quantizer_with_the_same_formats_names_the_operand_it_makes(index, data):
    infer, train = PAIRS[index]
    quantizer = data.draw(st.sampled_from([o for o in infer.operators if o.kind == "quantizer"]))
    operators = tuple(replace(o, definition="vllm") if o == quantizer else o for o in infer.operators)
    linear, _, which = quantizer.name.rpartition(".")
    violations = check(replace(infer, operators=operators), train)
    assert named(violations) == [(linear, which.removesuffix("_quantizer"))]


@settings(max_examples=100, deadline=None)
@given(ALL, st.data())
def test_training_only_edges_never_matter_to_the_rollout(index, data):
    infer, train = PAIRS[index]
    edge = data.draw(st.sampled_from([e for e in train.edges if e.phase != "forward"]))
    other = data.draw(st.sampled_from([f for f in FORMATS if f != edge.format]))
    assert check(infer, with_edge(train, edge, replace(edge, format=other))) == []
