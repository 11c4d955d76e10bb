"""The GPU kernels of an exact flow in vLLM: FlashAttention 3 whose key loop is never divided, and the sampler's arithmetic."""

import copy
import functools

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample import logprob
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates

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


def install(config: VllmConfig) -> None:
    """Before the model's first attention layer is built. Idempotent."""
    register_backend(AttentionBackendEnum.CUSTOM, f"{UnsplitBackend.__module__}.{UnsplitBackend.__qualname__}")
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    config.attention_config.flash_attn_version = 3
    share_sampler()


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


class SharedStates(SamplingStates):
    """One engine's sampling parameters, whose temperature divides as the trainer's does."""

    def apply_temperature(self, logits, expanded_idx_mapping, idx_mapping_np) -> None:
        of_requests = self.temperature.np[idx_mapping_np]
        if ((of_requests != 0.0) & (of_requests != 1.0)).any():  # a division by 1 changes nothing
            divide_by_temperature(logits, expanded_idx_mapping, self.temperature.gpu)


class SharedSampler(Sampler):
    """One engine's sampler, with log-probabilities by the trainer's operator.

    vLLM has no method to override for them: `compute_topk_logprobs` looks `compute_token_logprobs` up in its module. So
    that name is replaced while this sampler runs, and no longer; a worker samples in one thread.
    """

    def __call__(self, logits, input_batch):
        stock = logprob.compute_token_logprobs
        logprob.compute_token_logprobs = compute_token_logprobs
        try:
            return super().__call__(logits, input_batch)
        finally:
            logprob.compute_token_logprobs = stock


def share_sampler() -> None:
    """Give the engines of exact flows, and no others, the trainer's arithmetic in their samplers. Idempotent.

    Cause: vLLM's log-softmax sums in tiles of its own and its temperature kernel divides approximately; both differ from
    the trainer in the last bits. vLLM asks a model's state for a sampler of its own (`custom_sampler`, V2 model runner),
    but takes the state's class from the model alone, so the question is answered here for the default state, by its engine.
    vLLM 0.24 seen (`custom_sampler` is new there); it can go when a plug-in can name an engine's sampler.
    """
    stock = DefaultModelState.custom_sampler
    if hasattr(stock, "jetrl_stock"):
        return

    @functools.wraps(stock)
    def custom_sampler(self, sampler):
        from jetrl.integrations.vllm.exact import is_exact

        if not is_exact(self.vllm_config):
            return stock(self, sampler)
        sampler.__class__, sampler.sampling_states.__class__ = SharedSampler, SharedStates
        self.model.jetrl_sampler = sampler  # for the handshake, which is given the model
        return sampler, None

    custom_sampler.jetrl_stock = stock
    DefaultModelState.custom_sampler = custom_sampler


def shares_sampler(model: torch.nn.Module) -> bool:
    """Whether the engine of this live model samples by the trainer's operators."""
    sampler = getattr(model, "jetrl_sampler", None)
    return type(sampler) is SharedSampler and type(sampler.sampling_states) is SharedStates
