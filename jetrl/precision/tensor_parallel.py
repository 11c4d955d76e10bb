"""Which tensor-parallel sizes leave every 128x128 weight block whole (DESIGN.md, numerics 4).

A shard may be quantized by itself only where its interior edges are multiples of 128: the trainer quantizes whole
matrices, and a block that two ranks share would get two other scales.
"""

from collections.abc import Callable
from dataclasses import dataclass

BLOCK = 128


@dataclass(frozen=True)
class ShardedLinear:
    """One logical matrix of a decoder layer and how vLLM cuts it.

    name: below the layer, e.g. `self_attn.k_proj`. size: elements along the cut dimension (rows of q, k, v, gate, up;
    columns of o and down). heads: attention heads along that dimension, 0 where there are none: a key-value head is
    replicated, not cut, once there are more ranks than heads.
    """

    name: str
    size: int
    heads: int = 0

    def shard(self, tp: int) -> int | None:
        """Elements on one of tp ranks; None where tp does not divide the matrix at all."""
        if self.heads:
            if tp > self.heads:
                return self.size // self.heads if tp % self.heads == 0 else None
            return self.size // tp if self.heads % tp == 0 else None
        return self.size // tp if self.size % tp == 0 else None

    def blocks_stay_whole(self, tp: int) -> bool:
        if tp == 1:
            return True
        shard = self.shard(tp)
        return shard is not None and shard % BLOCK == 0


def sharded_linears(hf_config: dict) -> list[ShardedLinear]:
    """The seven matrices of a Llama- or Qwen-like decoder layer, from the keys of its config.json."""
    hidden, heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
    kv_heads = hf_config.get("num_key_value_heads") or heads
    head_dim = hf_config.get("head_dim") or hidden // heads
    inner = hf_config["intermediate_size"]
    return [
        ShardedLinear("self_attn.q_proj", heads * head_dim, heads),
        ShardedLinear("self_attn.k_proj", kv_heads * head_dim, kv_heads),
        ShardedLinear("self_attn.v_proj", kv_heads * head_dim, kv_heads),
        ShardedLinear("self_attn.o_proj", heads * head_dim, heads),
        ShardedLinear("mlp.gate_proj", inner),
        ShardedLinear("mlp.up_proj", inner),
        ShardedLinear("mlp.down_proj", inner),
    ]


def first_cut_block(
    linears: list[ShardedLinear], tp: int, is_fp8: Callable[[str], bool] = lambda name: True
) -> ShardedLinear | None:
    """The first FP8 matrix in which tp ranks would cut a block, or None. is_fp8 gets `ShardedLinear.name`."""
    return next((lin for lin in linears if is_fp8(lin.name) and not lin.blocks_stay_whole(tp)), None)


def working_sizes(
    linears: list[ShardedLinear], most: int, is_fp8: Callable[[str], bool] = lambda name: True
) -> list[int]:
    """Every tensor-parallel size from 1 to `most` that cuts no block of any FP8 matrix."""
    return [tp for tp in range(1, most + 1) if first_cut_block(linears, tp, is_fp8) is None]
