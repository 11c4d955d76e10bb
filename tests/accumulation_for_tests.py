"""Runs in each rank of tests/test_accumulation.py: gradients of one accumulated batch, as the optimizer would see them."""

import torch
from fsdp_for_tests import wrap
from torch import nn

from jetrl.integrations.verl.accumulation import accumulation_for
from jetrl.integrations.verl.masters import local

MICRO_BATCHES = 16
WIDTH = 32


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)).to(torch.bfloat16)


def micro_batch(rank: int, index: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + index)).to(torch.bfloat16)


def all_cases(rank: int, cases: list[tuple]) -> dict:
    return {case: gradients_of_one_batch(rank, *case) for case in cases}


def gradients_of_one_batch(rank: int, strategy: str, use_orig_params: bool, ours: bool) -> dict:
    """This rank's gradient shards, flattened, and their dtypes. ours: through jetrl's accumulation, else FSDP's own."""
    module = wrap(small_model(), strategy, use_orig_params)
    accumulation = accumulation_for(module) if ours else None
    for _ in range(2):  # the second batch must not see anything of the first
        for p in module.parameters():
            p.grad = None
        for index in range(MICRO_BATCHES):
            if ours:
                with accumulation.micro_batch(is_last=index == MICRO_BATCHES - 1):
                    module(micro_batch(rank, index)).square().sum().backward()
            else:
                module(micro_batch(rank, index)).square().sum().backward()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    if strategy == "fsdp2":
        module.to("cpu")  # VeRL's offloading moves gradients with their parameters
    return {"dtypes": {g.dtype for g in grads}, "grads": [local(g).flatten() for g in grads]}


class Branched(nn.Module):
    """Its second weight has no part in a forward that does not ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = small_model()

    def forward(self, x: torch.Tensor, with_second: bool) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if with_second else x


def gradients_of_two_batches(rank: int, cases: list[tuple]) -> dict:
    """case -> of both weights, this rank's shards after each of two batches whose last micro-batch leaves the second out."""
    found = {}
    for strategy, use_orig_params in cases:
        module = wrap(Branched(), strategy, use_orig_params)
        accumulation = accumulation_for(module)
        batches = []
        for _ in range(2):
            for index in range(MICRO_BATCHES):
                is_last = index == MICRO_BATCHES - 1
                with accumulation.micro_batch(is_last):
                    module(micro_batch(rank, index), not is_last).square().sum().backward()
            batches.append([local(p.grad).flatten().clone() for p in module.parameters() if p.grad is not None])
            module.zero_grad()
        found[strategy, use_orig_params] = batches
    return found
