"""Gradients of BF16 masters over micro-batches: an FP32 sum, rounded to BF16 once, under FSDP1 and FSDP2."""

import pytest
import torch
from accumulation_for_tests import (
    MICRO_BATCHES,
    Branched,
    all_cases,
    gradients_of_two_batches,
    micro_batch,
    small_model,
)
from fsdp_for_tests import run_ranks

# strategy, use_orig_params, whether jetrl accumulates
CASES = [
    ("fsdp", False, True),
    ("fsdp", True, True),
    ("fsdp2", False, True),
    ("fsdp", False, False),
    ("fsdp2", False, False),
]


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request, tmp_path_factory):
    """(number of ranks, what each rank returned)."""
    return request.param, run_ranks(all_cases, request.param, tmp_path_factory.mktemp("ranks"), CASES)


def summed(world: int, part) -> torch.Tensor:
    """FP64 sum over ranks and micro-batches of part(a rank's own BF16 gradient in FP64); both weights, flat."""
    model = small_model()
    total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for rank in range(world):
        for index in range(MICRO_BATCHES):
            model.zero_grad()
            model(micro_batch(rank, index)).square().sum().backward()
            for sum_, p in zip(total, model.parameters(), strict=True):
                sum_ += part(p.grad.double())
    return torch.cat([sum_.flatten() for sum_ in total])


def exact_mean(world: int) -> torch.Tensor:
    """FP64 sum over micro-batches of the mean over ranks of each rank's own BF16 gradient."""
    return summed(world, lambda grad: grad / world)


def magnitudes(world: int) -> torch.Tensor:
    """Per element, the sum of the magnitudes that `exact_mean` adds up."""
    return summed(world, torch.abs)


def whole(results: list[dict], case: tuple) -> torch.Tensor:
    """Both weights' gradients, flat, from the ranks' shards: FSDP deals out each weight's elements in order."""
    shards = [r[case]["grads"] for r in results]
    return torch.cat([torch.cat(parts) for parts in zip(*shards, strict=True)]).double()


@pytest.mark.parametrize("case", [c for c in CASES if c[2]], ids=["fsdp", "fsdp-use_orig_params", "fsdp2"])
def test_the_sum_is_rounded_once(ranks, case):
    world, results = ranks
    exact = exact_mean(world)
    # One rounding to BF16 (8 bits of significand): at most 2^-8 of the value. The FP32 sum before it has world *
    # MICRO_BATCHES additions, each 2^-24 of a partial sum, which is no larger than the sum of all magnitudes.
    fp32 = world * MICRO_BATCHES * 2**-24 * magnitudes(world)
    assert ((whole(results, case) - exact).abs() <= 2**-8 * exact.abs() * (1 + 2**-8) + fp32).all()
    assert results[0][case]["dtypes"] == {torch.bfloat16}


@pytest.mark.parametrize("case", [c for c in CASES if not c[2]], ids=["fsdp", "fsdp2"])
def test_what_fsdp_does_by_itself_is_worse_than_one_rounding(ranks, case):
    world, results = ranks
    exact = exact_mean(world)
    off = (whole(results, case) - exact).abs() > 2**-7 * exact.abs()
    assert off.double().mean() > 0.05  # a good share of the elements is off by more than two roundings


@pytest.mark.parametrize("world", [1, 2])
def test_a_weight_without_a_gradient_in_the_last_micro_batch_gets_its_sum_in_that_batch(world, tmp_path):
    cases = [("fsdp", False), ("fsdp", True), ("fsdp2", False)]
    results = run_ranks(gradients_of_two_batches, world, tmp_path, cases)
    model = Branched()
    exact, magnitude = (torch.zeros(model.second.weight.shape, dtype=torch.float64) for _ in range(2))
    for rank in range(world):
        for index in range(MICRO_BATCHES - 1):
            model.zero_grad()
            model(micro_batch(rank, index), True).square().sum().backward()
            exact += model.second.weight.grad.double() / world
            magnitude += model.second.weight.grad.double().abs()
    # As above: one rounding to BF16 and an FP32 sum.
    tolerance = (2**-8 * exact.abs() * (1 + 2**-8) + world * MICRO_BATCHES * 2**-24 * magnitude).flatten()
    for case in cases:
        for batch in range(2):
            shards = [r[case][batch] for r in results]
            assert all(len(parts) == 2 for parts in shards), case
            second = torch.cat([parts[1] for parts in shards]).double()
            assert ((second - exact.flatten()).abs() <= tolerance).all(), (case, batch)
