"""A Qwen3 of any small size, for models made from nothing: the embedded one, the warmed-up ones, the benchmarks'."""

from dataclasses import dataclass

from transformers import Qwen3Config


@dataclass(frozen=True)
class Size:
    """Widths in elements, all multiples of 128 so that FP8 blocks are whole; head_dim is one that FA3 and vLLM's CPU attention have."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 64


def qwen3_config(size: Size, vocabulary: int, longest: int, **special: int | None) -> Qwen3Config:
    """Without tied embeddings, with room for `longest` tokens. special: bos_token_id and the like."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=longest,
        tie_word_embeddings=False,
        **special,
    )
