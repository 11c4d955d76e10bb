"""Rollout side of an exact flow: vLLM's attention, rotary table and sampler give a token the bits that the trainer gives it.

  attention   vLLM's own FlashAttention 3 backend whose key loop is never divided (unsplit_attention.py); on a CPU the trainer's
              row-by-row attention (exact_cpu.py)
  rotary      the cache of cos and sin is filled from the table of jetrl.attention.rotary_table
  sampler     the temperature divides by IEEE division, and log-probabilities come from jetrl.token_logprobs; vLLM's
              sampler for CPUs does just that already

Everything else of the forward is shared by every unified flow already (operators.py, quantization.py).
"""

from collections.abc import Callable

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from jetrl.attention.rotary_table import rotary_table
from jetrl.errors import UserError
from jetrl.integrations.vllm import exact_cpu
from jetrl.precision.graph import Operator


def prepare(config: VllmConfig) -> None:
    """In a worker, while the model is built and before its first attention layer. Idempotent. Raises UserError."""
    obstacle = _obstacle(config)
    if obstacle:
        raise UserError(f"precision=unified_exact cannot run this rollout: {obstacle}; or use precision=unified_fp8")
    if not current_platform.is_cpu():  # its attention is registered when the plug-in loads
        from jetrl.integrations.vllm import exact_sampler, unsplit_attention

        unsplit_attention.install(config)
        exact_sampler.share_sampler()


def _obstacle(config: VllmConfig) -> str | None:
    """What stands against equal bits, with the operator it touches and the key to change, or None."""
    parallel = config.parallel_config
    if parallel.tensor_parallel_size > 1:
        return (
            f"o_proj and down_proj add their shards in another order under tensor_model_parallel_size="
            f"{parallel.tensor_parallel_size}; set it to 1"
        )
    if config.speculative_config is not None:
        return "log_softmax takes another path under speculative decoding; remove speculative_config"
    if config.lora_config is not None:
        return "linear layers add LoRA terms that the trainer's layer does not have; remove enable_lora"
    if config.model_config.logprobs_mode != "processed_logprobs":
        return (
            f"log_softmax must be of the processed logits; set actor_rollout_ref.rollout.logprobs_mode=processed_logprobs, "
            f"not {config.model_config.logprobs_mode}"
        )
    if found := _attention_obstacle(config):
        return f"attention would have other bits than the trainer's, because of {found}"
    if not current_platform.is_cpu() and not config.use_v2_model_runner:
        return "log_softmax is shared with vLLM's V2 model runner only; set VLLM_USE_V2_MODEL_RUNNER=1 for this engine"
    return None


def _attention_obstacle(config: VllmConfig) -> str | None:
    from jetrl.integrations.vllm import unsplit_attention

    if current_platform.is_cpu():  # the names of a GPU's backends mean nothing there: vLLM takes its own for CPUs
        return unsplit_attention.settings_obstacle(config, ("CPU_ATTN", "FLASH_ATTN", "CUSTOM"))
    return unsplit_attention.obstacle(config)


def fill_rotary_cache(layer: nn.Module, hf_config: object) -> None:
    """Overwrite vLLM's cache (positions, cos and sin side by side) with the shared table, in place."""
    cache = layer.cos_sin_cache
    shared = torch.cat(rotary_table(hf_config, cache.shape[0]), dim=-1)
    if shared.shape != cache.shape:
        raise UserError(
            f"vLLM rotates {cache.shape[1]} elements of a head where the configuration says {shared.shape[1]}; "
            f"use precision=unified_fp8"
        )
    cache.copy_(shared)
    layer.jetrl_table = True


def _attention_kernel(layer: nn.Module) -> str | None:
    if current_platform.is_cpu():
        shared = isinstance(layer.impl, exact_cpu.RowsImpl)
    else:
        from jetrl.integrations.vllm.unsplit_attention import UnsplitBackend

        shared = layer.attn_backend is UnsplitBackend
    return None if shared else f"vLLM {layer.attn_backend.get_name()}"


def _shares_log_softmax(model: nn.Module) -> bool:
    if current_platform.is_cpu():
        return True
    from jetrl.integrations.vllm.exact_sampler import shares_sampler

    return shares_sampler(model)


def rollout_kernels(model: nn.Module) -> Callable[[Operator], str | None]:
    """What the live vLLM model runs, for kernels.with_kernels: None where it is what an exact flow prescribes."""
    from jetrl.integrations.vllm.operators import JetRMSNorm, JetSiluAndMul, _Rotary
    from jetrl.integrations.vllm.quantization import JetLinearMethod

    modules = dict(model.named_modules())
    rotary = [m for m in modules.values() if hasattr(m, "cos_sin_cache")]

    def of_linear(name: str) -> str | None:
        parent, _, leaf = name.rpartition(".")
        merged = next((k for k, parts in (model.packed_modules_mapping or {}).items() if leaf in parts), leaf)
        method = modules[f"{parent}.{merged}"].quant_method
        return None if isinstance(method, JetLinearMethod) else f"vLLM {type(method).__name__}"

    def kernel_of(operator: Operator) -> str | None:
        kind, name = operator.kind, operator.name
        if kind == "linear":
            return of_linear(name)
        if kind == "attention":
            return _attention_kernel(modules[f"{name}.attn"])
        if kind == "rotary_table":
            return None if rotary and all(hasattr(m, "jetrl_table") for m in rotary) else "vLLM cos_sin_cache"
        if kind == "rotary":
            return None if all(isinstance(m, _Rotary) for m in rotary) else "vLLM rotary embedding"
        if kind == "log_softmax":
            return None if _shares_log_softmax(model) else "vLLM sampler"
        if kind in ("norm", "activation"):
            shared = JetRMSNorm if kind == "norm" else JetSiluAndMul
            return None if isinstance(modules[name], shared) else f"vLLM {type(modules[name]).__name__}"
        return None

    return kernel_of


def is_exact(config: VllmConfig) -> bool:
    flow = getattr(config.quant_config, "flow", None)
    return flow is not None and flow(config).rollout.exact
