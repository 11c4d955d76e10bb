"""convert() swaps exactly what the graph says, on real Hugging Face models."""

import pytest
import torch
from checkpoints_for_tests import ARCHITECTURES, build_model
from torch import nn

from jetrl.convert import convert
from jetrl.linear import Float8Linear
from jetrl.precision.build_hf import build_training_graph
from jetrl.precision.flow import PrecisionAssignment, load_flow


def swapped_names(model):
    return {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_decoder_linear_and_nothing_else_runs_in_fp8(architecture):
    model = build_model(architecture)
    report = convert(model, build_training_graph(model, load_flow("unified_fp8").train))
    linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert swapped_names(model) == set(report.swapped) == linears - {"lm_head"}
    assert set(report.kept) == {"lm_head"}
    assert "14 linear layers run in FP8; 1 kept" in str(report)


def test_bf16_assignment_swaps_nothing():
    model = build_model("qwen3")
    report = convert(model, build_training_graph(model, load_flow("bf16").train))
    assert not report.swapped and not swapped_names(model)
    assert str(report) == "0 of 15 linear layers run in FP8"


def test_exclusions_and_first_layers_stay_bf16():
    model = build_model("qwen3")
    assignment = PrecisionAssignment(linear="fp8", exclude=("model.layers.*.mlp.down_proj",), bf16_first_layers=1)
    convert(model, build_training_graph(model, assignment))
    assert swapped_names(model) == {
        f"model.layers.1.{n}" for n in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    } | {"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"}


def test_a_graph_of_another_model_is_refused():
    graph = build_training_graph(build_model("qwen3"), load_flow("unified_fp8").train)
    with pytest.raises(ValueError, match="which the model does not have"):
        convert(nn.Sequential(nn.Linear(128, 128)), graph)


def test_a_converted_model_trains_and_saves_under_its_stock_names(tmp_path):
    model = build_model("qwen3")
    names = list(model.state_dict())
    convert(model, build_training_graph(model, load_flow("unified_fp8").train))
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)
