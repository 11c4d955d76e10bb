"""The sampler of an exact flow in vLLM on a GPU: temperature and log-probabilities by the trainer's arithmetic."""

import functools

import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample import logprob
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates


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
