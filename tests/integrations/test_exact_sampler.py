"""The sampler of an exact flow on a GPU, as far as a CPU can run it: which engines get it, and that no other sees it."""

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample import logprob
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates

from jetrl.integrations.vllm import exact, exact_sampler


@pytest.fixture
def engine(monkeypatch):
    """(model, sampler) of an engine as vLLM's V2 runner makes them, by whether its flow is exact."""
    monkeypatch.setattr(DefaultModelState, "custom_sampler", DefaultModelState.custom_sampler)
    monkeypatch.setattr(exact, "is_exact", lambda config: config)
    exact_sampler.share_sampler()
    exact_sampler.share_sampler()  # idempotent

    def make(is_exact: bool):
        state, sampler = DefaultModelState.__new__(DefaultModelState), Sampler.__new__(Sampler)
        state.vllm_config, state.model = is_exact, torch.nn.Module()
        sampler.sampling_states = SamplingStates.__new__(SamplingStates)
        return state.model, sampler, state.custom_sampler(sampler)

    return make


def test_only_an_exact_engine_gets_the_shared_sampler(engine):
    model, sampler, custom = engine(True)
    assert custom == (sampler, None) and type(sampler) is exact_sampler.SharedSampler
    assert exact_sampler.shares_sampler(model)
    model, sampler, custom = engine(False)
    assert custom is None and type(sampler) is Sampler and type(sampler.sampling_states) is SamplingStates
    assert not exact_sampler.shares_sampler(model)


def test_vllms_function_is_replaced_only_while_an_exact_sampler_runs(engine, monkeypatch):
    """What `compute_topk_logprobs` finds, inside, behind and after a failure."""
    stock, found = logprob.compute_token_logprobs, []
    monkeypatch.setattr(Sampler, "__call__", lambda self, logits, batch: found.append(logprob.compute_token_logprobs))
    for is_exact in (True, False):
        engine(is_exact)[1](None, None)
    assert found == [exact_sampler.compute_token_logprobs, stock] and logprob.compute_token_logprobs is stock

    def fails(self, logits, batch):
        raise RuntimeError("in the sampler")

    monkeypatch.setattr(Sampler, "__call__", fails)
    with pytest.raises(RuntimeError, match="in the sampler"):
        engine(True)[1](None, None)
    assert logprob.compute_token_logprobs is stock


def test_temperature_divides_and_log_probs_are_the_trainers():
    class OnCpu:
        def __init__(self, values):
            self.np, self.gpu = np.array(values, dtype=np.float32), torch.tensor(values)

    states = exact_sampler.SharedStates.__new__(exact_sampler.SharedStates)
    states.temperature = OnCpu([0.7, 0.0, 1.0])
    raw = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    mapping = torch.tensor([0, 1, 2, 0])
    logits = raw.clone()
    states.apply_temperature(logits, mapping, mapping.numpy())
    assert torch.equal(logits, raw / torch.tensor([0.7, 1.0, 1.0, 0.7])[:, None])
    ids = torch.tensor([[3, 49], [0, 1], [7, 7], [2, 30]])
    got = exact_sampler.compute_token_logprobs(logits, ids)
    temperature = torch.tensor([0.7, 1.0, 1.0, 0.7])
    for column in range(2):
        want, _ = torch.ops.jetrl.token_logprobs(raw, ids[:, column].contiguous(), temperature, 50)
        assert torch.equal(got[:, column], want)
