"""A vLLM KV connector under which decode measurements need no prefill: the whole KV cache holds noise from the start.

vLLM's own DecodeBenchConnector claims the contexts; it would fill them request by request and layer by layer, which takes
longer than the measurement. Only requests whose id starts with "decode" are claimed: prefill measurements in the same
engine compute their prompts.
"""

from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector


class DecodeOnly(DecodeBenchConnector):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if not request.request_id.startswith("decode"):
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        for cache in kv_caches.values():
            cache.normal_()

    def start_load_kv(self, forward_context, **kwargs):
        pass


TRANSFER = {"kv_connector": "DecodeOnly", "kv_connector_module_path": "decode_connector", "kv_role": "kv_both"}
