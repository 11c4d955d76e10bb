"""A vLLM KV connector that fills the contexts of decode measurements with noise instead of computing them.

vLLM's own DecodeBenchConnector, for requests whose id starts with "decode": prefill measurements in the same engine
compute their prompts.
"""

from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector


class DecodeOnly(DecodeBenchConnector):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if not request.request_id.startswith("decode"):
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


TRANSFER = {
    "kv_connector": "DecodeOnly",
    "kv_connector_module_path": "decode_connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 1.0},
}
