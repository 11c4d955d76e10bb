"""Rollout side of an exact flow: vLLM's attention, rotary table and sampler give a token the bits that the trainer gives it.

  attention   vLLM's own FlashAttention 3 backend whose key loop is never split (`UnsplitBackend`)
  rotary      the cache of cos and sin is filled from the table of jetrl.attention.rotary_table
  sampler     the temperature divides by IEEE division, and log-probabilities come from jetrl.token_logprobs

Everything else of the forward is shared by every unified flow already (operators.py, quantization.py).
"""

from collections.abc import Callable

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from jetrl.attention.choice import fa3_obstacle
from jetrl.attention.rotary_table import rotary_table
from jetrl.errors import UserError
from jetrl.precision.graph import Operator


class UnsplitBuilder(FlashAttentionMetadataBuilder):
    """num_splits=1 in every call. vLLM's own choice depends on the batch, and a split loop adds in another order.

    Where CUDA graphs hold attention, vLLM schedules ahead with an upper bound of splits, for batches that fit a graph;
    with the bound at 1 that serves every batch.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.max_num_splits = 1
        self.max_cudagraph_size = torch.iinfo(torch.int64).max

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        # Without graphs vLLM's builder would schedule ahead for a number of splits that FA3 chooses.
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build or not self.use_full_cuda_graph)
        metadata.max_num_splits = 1
        return metadata


class UnsplitBackend(FlashAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return UnsplitBuilder


def prepare(config: VllmConfig) -> None:
    """In a worker, while the model is built and before its first attention layer. Idempotent. Raises UserError."""
    obstacle = _obstacle(config)
    if obstacle:
        raise UserError(f"precision=unified_exact cannot run this rollout: {obstacle}; or use precision=unified_fp8")
    register_backend(AttentionBackendEnum.CUSTOM, f"{UnsplitBackend.__module__}.{UnsplitBackend.__qualname__}")
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    config.attention_config.flash_attn_version = 3
    share_sampler()


def _obstacle(config: VllmConfig) -> str | None:
    """What stands against equal bits, with the operator it touches and the key to change, or None."""
    parallel, attention = config.parallel_config, config.attention_config
    if parallel.tensor_parallel_size > 1:
        return (
            f"o_proj and down_proj add their shards in another order under tensor_model_parallel_size="
            f"{parallel.tensor_parallel_size}; set it to 1"
        )
    if config.speculative_config is not None:
        return "log_softmax takes another path under speculative decoding; remove speculative_config"
    if config.lora_config is not None:
        return "linear layers add LoRA terms that the trainer's layer does not have; remove enable_lora"
    if attention.backend not in (None, AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.CUSTOM):
        return f"attention needs FLASH_ATTN, not {attention.backend.name}; remove attention_config.backend"
    if str(config.cache_config.cache_dtype).startswith("fp8"):
        return f"attention reads keys from a cache in {config.cache_config.cache_dtype}; set kv_cache_dtype=auto"
    if not config.model_config.disable_cascade_attn:
        return "attention adds a common prefix apart in cascade attention; remove disable_cascade_attn=False"
    if config.model_config.logprobs_mode != "processed_logprobs":
        return (
            f"log_softmax must be of the processed logits; set actor_rollout_ref.rollout.logprobs_mode=processed_logprobs, "
            f"not {config.model_config.logprobs_mode}"
        )
    if not config.use_v2_model_runner:
        return "log_softmax is shared with vLLM's V2 model runner only; unset VLLM_USE_V2_MODEL_RUNNER"
    missing = fa3_obstacle()
    return f"attention needs vLLM's FA3: {missing}" if missing else None


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


def divide_by_temperature(logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, temperature: torch.Tensor) -> None:
    """In place of vLLM's kernel, which divides approximately. logits (M, V) float32; temperature by request; 0 is greedy."""
    t = temperature[expanded_idx_mapping]
    logits.div_(torch.where(t == 0, 1.0, t).unsqueeze(1))


def compute_token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """In place of vLLM's function: log-probabilities (M, N) float32 of token_ids (M, N) from processed logits (M, V)."""
    ones = torch.ones(logits.shape[0], dtype=torch.float32, device=logits.device)
    columns = token_ids.to(torch.int64).unbind(1)
    found = [torch.ops.jetrl.token_logprobs(logits, ids.contiguous(), ones, logits.shape[1])[0] for ids in columns]
    return torch.stack(found, dim=1)


def share_sampler() -> None:
    """vLLM has no hook for either function; both are looked up in their module at every call. Idempotent."""
    from vllm.v1.worker.gpu.sample import logprob, states

    states.apply_temperature = divide_by_temperature
    logprob.compute_token_logprobs = compute_token_logprobs


def _shares_sampler() -> bool:
    from vllm.v1.worker.gpu.sample import logprob, states

    return (
        states.apply_temperature is divide_by_temperature and logprob.compute_token_logprobs is compute_token_logprobs
    )


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
            backend = modules[f"{name}.attn"].attn_backend
            return None if backend is UnsplitBackend else f"vLLM {backend.get_name()}"
        if kind == "rotary_table":
            return None if rotary and all(hasattr(m, "jetrl_table") for m in rotary) else "vLLM cos_sin_cache"
        if kind == "rotary":
            return None if all(isinstance(m, _Rotary) for m in rotary) else "vLLM rotary embedding"
        if kind == "log_softmax":
            return None if _shares_sampler() else "vLLM sampler"
        if kind in ("norm", "activation"):
            shared = JetRMSNorm if kind == "norm" else JetSiluAndMul
            return None if isinstance(modules[name], shared) else f"vLLM {type(modules[name]).__name__}"
        return None

    return kernel_of


def is_exact(config: VllmConfig) -> bool:
    flow = getattr(config.quant_config, "flow", None)
    return flow is not None and flow(config).rollout.exact
