"""vLLM's FlashAttention 3 whose key loop is never divided: a decoded token then gets the attention bits of a prefill.

The trainer's attention (jetrl/attention/backends.py) does not divide it either. A unified rollout on a GPU takes this
backend unless the user asks for splits or something stands against it (`obstacle`); an exact one insists (exact.py).
"""

import copy

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from jetrl.attention.choice import fa3_obstacle
from jetrl.precision.kernels import EXACT_HEADS

# With heads of 64, FA3 takes another kernel where the longest query, times the query heads of a KV head, is small (seen: 2
# rows to 8 rows differ from a prefill, 64 x 2 do not), and that one steps over the keys in another way. Told that there may
# be this many rows, it does not. With heads of 128 and 256 all lengths agree.
LEAST_ROWS = {64: 128}
# vLLM's schedule ahead of the forward was measured for these; elsewhere FA3 schedules by itself.
SCHEDULED_AHEAD = (128,)


def longest_query(longest: int, heads: int, kv_heads: int, size: int) -> int:
    """What to tell FA3 as the longest query of a batch."""
    return max(longest, -(-LEAST_ROWS.get(size, 1) * kv_heads // heads))


class UnsplitBuilder(FlashAttentionMetadataBuilder):
    """num_splits=1 in every call. vLLM's own choice depends on the batch, and a divided loop adds in another order.

    Where CUDA graphs hold attention, vLLM schedules ahead with an upper bound of splits, for batches that fit a graph;
    with the bound at 1 that serves every batch.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.max_num_splits = 1
        self.max_cudagraph_size = torch.iinfo(torch.int64).max

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = copy.copy(common_attn_metadata)  # other layers' builders read the original
        common.max_query_len = longest_query(common.max_query_len, self.num_heads_q, self.num_heads_kv, self.headdim)
        # Without graphs vLLM's builder would schedule ahead for a number of splits that FA3 chooses.
        ahead = self.use_full_cuda_graph and self.headdim in SCHEDULED_AHEAD and not fast_build
        metadata = super().build(common_prefix_len, common, not ahead)
        metadata.max_num_splits = 1
        return metadata


class UnsplitBackend(FlashAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return UnsplitBuilder


_PATH = f"{UnsplitBackend.__module__}.{UnsplitBackend.__qualname__}"


def obstacle(config: VllmConfig) -> str | None:
    """Why this engine cannot take the backend, with what to set instead in brackets where a key decides, or None."""
    custom, size = AttentionBackendEnum.CUSTOM, config.model_config.get_head_size()
    if custom.is_overridden() and custom.get_path() != _PATH:
        return f"vLLM's attention backend CUSTOM, which is {custom.get_path()} (remove that plug-in)"
    if found := settings_obstacle(config, ("FLASH_ATTN", "CUSTOM")):
        return found
    if config.attention_config.flash_attn_version not in (None, 3):
        return f"attention_config.flash_attn_version={config.attention_config.flash_attn_version} (remove it)"
    if config.model_config.dtype is not torch.bfloat16:
        return f"dtype={config.model_config.dtype}: it was shown for torch.bfloat16"
    if size not in EXACT_HEADS:
        return f"attention heads of {size}: it was shown for {', '.join(map(str, EXACT_HEADS))}"
    return fa3_obstacle()


def settings_obstacle(config: VllmConfig, backends: tuple[str, ...]) -> str | None:
    """The part of `obstacle` that holds on every device. backends: the names that may have been asked for."""
    asked = config.attention_config.backend
    if asked is not None and asked.name not in backends:
        return f"attention_config.backend={asked.name} (remove it)"
    if config.cache_config.cache_dtype not in ("auto", str(config.model_config.dtype).removeprefix("torch.")):
        return f"kv_cache_dtype={config.cache_config.cache_dtype} (set it to auto)"
    if not config.model_config.disable_cascade_attn:
        return "disable_cascade_attn=False, which adds a common prefix apart (remove it)"
    if config.parallel_config.decode_context_parallel_size > 1:
        return f"decode_context_parallel_size={config.parallel_config.decode_context_parallel_size} (set it to 1)"
    return None


def install(config: VllmConfig) -> None:
    """Before the model's first attention layer is built. Idempotent."""
    register_backend(AttentionBackendEnum.CUSTOM, _PATH)
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    config.attention_config.flash_attn_version = 3
