"""On a GPU, one decoder layer of Qwen3-8B's shape executes what its graph declares."""

import pytest
import torch

from jetrl.convert import convert
from jetrl.precision.architectures import load_config
from jetrl.precision.build_hf import build_training_graph, declare_from_config
from jetrl.precision.flow import PrecisionAssignment
from jetrl.precision.probe import Probe

pytestmark = pytest.mark.gpu

ASSIGNMENTS = {
    "bf16": PrecisionAssignment(),
    "fp8": PrecisionAssignment(linear="fp8"),
    "fp8 pow2 but down_proj": PrecisionAssignment(linear="fp8", scale_format="pow2", exclude=("*down_proj",)),
}


@pytest.mark.parametrize("name", list(ASSIGNMENTS))
def test_a_qwen3_8b_layer_executes_the_declared_graph(name):
    from transformers import AutoModelForCausalLM

    config, _ = load_config("Qwen/Qwen3-8B")
    # One layer of the real width; the embedding cut to what a test needs.
    config.num_hidden_layers, config.vocab_size, config.layer_types = 1, 4096, ["full_attention"]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(torch.bfloat16).eval()
    assignment = ASSIGNMENTS[name]
    convert(model, build_training_graph(model, assignment))
    graph = declare_from_config(config, assignment)
    for tokens in (1, 300):  # a decode-like row, and a ragged batch of rows
        with Probe(model) as probe, torch.no_grad():
            model(torch.arange(tokens, device="cuda").unsqueeze(0))
        assert probe.differences(graph) == []
        gemms = sum(record.op == "jetrl::gemm_nt" for record in probe.records)
        # A fused layer multiplies for q, k, v at once, and for gate and up; a layer with one linear in BF16 is not fused.
        assert gemms == {"bf16": 0, "fp8": 4}.get(name, 6)
        assert len(graph.fp8_linear_names()) == {"bf16": 0, "fp8": 7}.get(name, 6)
