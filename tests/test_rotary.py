"""Rotary frequencies of a BF16 model are those of the FP32 model, bit by bit."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from jetrl.integrations.verl.rotary import restore_frequencies

SIZES = dict(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=32,
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [Qwen3Config(**SIZES, head_dim=32), Qwen2Config(**SIZES), LlamaConfig(**SIZES, rope_parameters=LLAMA3)],
    ids=["qwen3", "qwen2", "llama3-scaled"],
)
def test_cos_and_sin_of_the_cast_model_equal_the_fp32_models(config):
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    cast = copy.deepcopy(model).to(torch.bfloat16)
    x, positions = torch.zeros(1, 1, 64), torch.arange(0, 8192, 37)[None]
    wanted = model.model.rotary_emb(x, positions)
    assert not torch.equal(cast.model.rotary_emb(x, positions)[0], wanted[0])  # what VeRL's cast does
    assert restore_frequencies(cast) == 1
    assert all(torch.equal(a, b) for a, b in zip(cast.model.rotary_emb(x, positions), wanted, strict=True))
    assert {p.dtype for p in cast.parameters()} == {torch.bfloat16}
    assert restore_frequencies(cast) == 0
    assert not any("inv_freq" in key for key in cast.state_dict())
