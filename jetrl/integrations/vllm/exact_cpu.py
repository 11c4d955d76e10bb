"""Attention of an exact flow in vLLM-CPU: the trainer's row-by-row attention over vLLM's paged cache.

vLLM's own CPU kernel divides its work by the batch. Its place in the registry of backends is taken once for the process;
in an engine of any other flow the replacement hands out vLLM's own implementation.
"""

import torch
from jetrl_kernels.attention_reference import attend_rows
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


class RowsImpl(CPUAttentionBackendImpl):
    """Cache (blocks, KV heads, tokens of a block, 2 x head size): key and value of a token side by side."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        used = slot_mapping >= 0
        slots = slot_mapping[used].long()
        block, offset = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
        both = torch.cat((key, value), dim=-1)[: len(slot_mapping)][used]
        kv_cache[block, :, offset] = both.to(kv_cache.dtype)

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output
        bounds, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        size = self.head_size
        for i, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            length = lengths[i]
            pages = attn_metadata.block_table[i, : -(-length // kv_cache.shape[2])].long()
            both = kv_cache[pages].transpose(1, 2).reshape(-1, self.num_kv_heads, 2 * size)[:length]
            seen = torch.arange(length - (end - start) + 1, length + 1)
            rows = query[start:end].view(end - start, self.num_heads, size)
            out = attend_rows(rows, both[..., :size], both[..., size:], seen, self.scale)
            output[start:end] = out.view(output[start:end].shape)
        return output


class RowsBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        from jetrl.integrations.vllm.exact import is_exact

        return RowsImpl if is_exact(get_current_vllm_config()) else CPUAttentionBackendImpl


def register() -> None:
    """Idempotent."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{RowsBackend.__module__}.{RowsBackend.__qualname__}")
