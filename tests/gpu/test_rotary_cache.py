"""On a GPU: the cosines that a unified rollout is given are those of the trainer's own module there, at every position."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from jetrl.integrations.vllm import rotary_cache

pytestmark = pytest.mark.gpu

_SMALL = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 256}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
CONFIGS = {
    "qwen3-8b": Qwen3Config(
        head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **_SMALL, **_HEADS
    ),
    "smollm2": LlamaConfig(
        head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 1e5}, **_SMALL, **_HEADS
    ),
    "llama3.1": LlamaConfig(head_dim=128, rope_parameters=_LLAMA3, **_SMALL, **_HEADS),
}
ROWS = 40960


def powers_of_the_device(frequencies: torch.Tensor) -> torch.Tensor:
    """The same frequencies with the last bit as another power function has it: a tenth of them, one ulp up."""
    up = torch.arange(len(frequencies), device=frequencies.device) % 10 == 3
    return torch.where(up, torch.nextafter(frequencies, torch.ones_like(frequencies)), frequencies)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", CONFIGS)
def test_the_cache_gets_the_bits_of_the_trainers_forward(model, dtype, device="cuda"):
    config = CONFIGS[model]
    ((frequencies, scaling),) = rotary_cache._trainer_frequencies(config)
    other = powers_of_the_device(frequencies.to(device))
    cache = rotary_cache._rows(other, scaling, 0, ROWS, dtype)
    before = cache.clone()
    with torch.device(device):  # as vLLM builds a model
        assert rotary_cache._fill(cache, config) is None
    trainer = AutoModelForCausalLM.from_config(config).model.rotary_emb.to(device)
    assert trainer.inv_freq.dtype is torch.float32
    expected = []
    for start in range(0, ROWS, 1000):  # a packed batch at a time, as a trainer asks
        cos, sin = trainer(
            torch.empty(0, dtype=dtype, device=device),
            torch.arange(start, min(start + 1000, ROWS), device=device)[None],
        )
        half = cos.shape[-1] // 2
        expected.append(torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1))
    assert torch.equal(cache, torch.cat(expected))
    assert not torch.equal(cache, before)
