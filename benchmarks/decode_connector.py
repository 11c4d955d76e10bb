"""A vLLM KV connector under which decode measurements need no prefill: the whole KV cache holds noise from the start.

vLLM's own DecodeBenchConnector claims the contexts; it would fill them request by request and layer by layer, which takes
longer than the measurement. Only requests whose id starts with "decode" are claimed: prefill measurements in the same
engine compute their prompts.

With `copies`, only that many layers have memory for K and V and the others use it in turn: several engines then fit on one
GPU. A layer reads as many bytes as ever, and `copies` - 1 other layers (weights, K and V: hundreds of MB) pass through the
50 MB of L2 before the same memory is read again.
"""

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector


class DecodeOnly(DecodeBenchConnector):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        copies = vllm_config.kv_transfer_config.get_from_extra_config("copies", 0)
        if role == KVConnectorRole.WORKER and copies:
            _share(kv_cache_config, copies)  # the worker allocates by this object right after

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if not request.request_id.startswith("decode"):
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        filled = set()
        for cache in kv_caches.values():
            if cache.data_ptr() not in filled:
                filled.add(cache.data_ptr())
                cache.normal_()

    def start_load_kv(self, forward_context, **kwargs):
        pass


def _share(kv_cache_config, copies: int) -> None:
    tensors = kv_cache_config.kv_cache_tensors
    if len({t.size for t in tensors}) != 1 or any(getattr(t, "block_stride", 0) for t in tensors):
        raise ValueError("only layers of one size, each with a tensor of its own, can share memory for K and V")
    for i, tensor in enumerate(tensors[copies:]):
        tensors[i % copies].shared_by += tensor.shared_by
    del tensors[copies:]


def transfer(copies: int = 0) -> dict:
    """vLLM's kv_transfer_config. copies: 0, or how many layers have memory of their own."""
    return {
        "kv_connector": "DecodeOnly",
        "kv_connector_module_path": "decode_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"copies": copies},
    }
