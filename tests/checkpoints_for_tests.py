"""Tiny random Hugging Face checkpoints of the supported architectures, written to a folder. No tokenizer: tests use token ids."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB = 256
_COMMON = dict(vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=None)

# Sizes that are multiples of 128 where the real model's are, and ragged ones where SmolLM2's are (576, 192, 1536).
ARCHITECTURES = {
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config(
            hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
            tie_word_embeddings=False, **_COMMON,
        ),
    ),
    "qwen2-bias": (
        Qwen2ForCausalLM,
        Qwen2Config(
            hidden_size=256, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2,
            tie_word_embeddings=False, **_COMMON,
        ),
    ),
    "llama-ragged-tied": (
        LlamaForCausalLM,
        LlamaConfig(
            hidden_size=192, intermediate_size=320, num_attention_heads=3, num_key_value_heads=1, head_dim=64,
            tie_word_embeddings=True, **_COMMON,
        ),
    ),
}  # fmt: skip


def build_model(architecture: str, seed: int = 0) -> torch.nn.Module:
    """Random weights that BF16 holds exactly, in float32; biases are random too, so that a lost bias is seen.

    Not `model.to(bfloat16)`: that would round the rotary frequencies as well, which no checkpoint stores.
    """
    cls, config = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    model = cls(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
            elif "norm" not in name:
                parameter.normal_(std=0.05)
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


def save_checkpoint(architecture: str, folder: Path, seed: int = 0) -> Path:
    build_model(architecture, seed).to(torch.bfloat16).save_pretrained(folder)
    return folder
