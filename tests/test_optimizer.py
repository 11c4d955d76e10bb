"""BF16 master weights that learn: stochastic rounding of the weights, FP32 moments."""

import pytest
import torch
import torchao.optim
from torch._subclasses.fake_tensor import FakeTensorMode

from jetrl.optimizer import StochasticAdamW

N = 4096
STEPS = 1000
RELATIVE = 1e-5  # one update over its weight; half the spacing of BF16 numbers is 2e-3 to 4e-3 of them


def after_many_small_updates(optimizer_class, dtype=torch.bfloat16, **more) -> torch.Tensor:
    """Weights that started at 1, after STEPS updates of -RELATIVE each: with a constant gradient Adam's step is lr."""
    weight = torch.nn.Parameter(torch.ones(N, dtype=dtype))
    optimizer = optimizer_class([weight], lr=RELATIVE, weight_decay=0.0, **more)
    for _ in range(STEPS):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return weight.detach().double()


def test_stochastic_rounding_keeps_updates_that_rounding_to_nearest_loses():
    torch.manual_seed(0)
    moved = 1 - after_many_small_updates(StochasticAdamW).mean().item()
    # Below 1 BF16 numbers are 2^-8 apart, so after STEPS steps a weight is 1 - k 2^-8 with mean STEPS * RELATIVE and
    # binomial spread: each step moves it with probability p = RELATIVE / 2^-8. Six standard deviations of the mean.
    p = RELATIVE * 2**8
    deviation = 2**-8 * (STEPS * p * (1 - p) / N) ** 0.5
    # Adam's step with a constant gradient is lr to 1e-6 of it: bias corrections and eps.
    assert moved == pytest.approx(STEPS * RELATIVE, abs=6 * deviation + 1e-5 * STEPS * RELATIVE)


def test_without_stochastic_rounding_every_one_of_them_is_lost():
    assert (after_many_small_updates(torch.optim.AdamW) == 1).all()
    assert (after_many_small_updates(StochasticAdamW, bf16_stochastic_round=False) == 1).all()


def test_fp32_masters_move_as_torchs_adamw_moves_them():
    ours = after_many_small_updates(StochasticAdamW, dtype=torch.float32)
    theirs = after_many_small_updates(torch.optim.AdamW, dtype=torch.float32)
    # STEPS roundings of numbers near 1, 2^-24 each, on either side.
    assert (ours - theirs).abs().max() < 2 * STEPS * 2**-24


def second_moments(optimizer_class, gradients: list[float]) -> list[float]:
    """Adam's second moment of one weight after each step."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = optimizer_class([weight], lr=0.0)
    moments = []
    with torch.compiler.set_stance("force_eager"):
        for gradient in gradients:
            weight.grad = torch.full_like(weight, gradient)
            optimizer.step()
            moments.append(optimizer.state[weight]["exp_avg_sq"].item())
    return moments


def test_the_second_moment_grows_and_decays_in_fp32_and_stands_still_in_torchaos_bf16():
    steps = 1000
    gradients = [1.0] * steps + [0.0] * steps
    grown, decayed = 1 - 0.999**steps, (1 - 0.999**steps) * 0.999**steps
    ours = second_moments(StochasticAdamW, gradients)
    # 1e-4: thousands of FP32 roundings, and 1 - 0.999 in FP32.
    assert ours[steps - 1] == pytest.approx(grown, rel=1e-4)
    assert ours[-1] == pytest.approx(decayed, rel=1e-4)
    theirs = second_moments(torchao.optim._AdamW, gradients)
    # From v = 1/4 on BF16 numbers are 2^-9 apart, and 0.001 (1 - v) is less than half of that.
    assert theirs[steps - 1] <= 0.25
    assert theirs[-1] == theirs[steps - 1]


def trained(seed: int, steps: int):
    torch.manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(N).bfloat16())
    optimizer = StochasticAdamW([weight], lr=1e-4)
    gradients = torch.Generator().manual_seed(1)
    train(weight, optimizer, gradients, steps)
    return weight, optimizer, gradients


def train(weight, optimizer, gradients, steps):
    for _ in range(steps):
        weight.grad = torch.randn(N, generator=gradients).bfloat16()
        optimizer.step()


def test_a_resumed_optimizer_goes_on_bit_by_bit(tmp_path):
    weight, optimizer, gradients = trained(seed=0, steps=3)
    torch.save(
        {"weight": weight.detach(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}, tmp_path / "c"
    )
    grad_state = gradients.get_state()
    train(weight, optimizer, gradients, 2)
    straight = weight.detach().clone()

    saved = torch.load(tmp_path / "c", weights_only=False)
    resumed = torch.nn.Parameter(saved["weight"])
    again = StochasticAdamW([resumed], lr=1e-4)
    again.load_state_dict(saved["optimizer"])
    assert {s.dtype for k, s in again.state[resumed].items() if k != "step"} == {torch.float32}
    torch.set_rng_state(saved["rng"])
    gradients.set_state(grad_state)
    train(resumed, again, gradients, 2)
    assert torch.equal(resumed.detach(), straight)

    # The rounding's random bits are part of the state: another state gives other bits.
    other = torch.nn.Parameter(saved["weight"].clone())
    optimizer = StochasticAdamW([other], lr=1e-4)
    optimizer.load_state_dict(saved["optimizer"])
    torch.manual_seed(123)
    gradients.set_state(grad_state)
    train(other, optimizer, gradients, 2)
    assert not torch.equal(other.detach(), straight)


def test_counts_that_offloading_brought_back_on_the_gpu_are_used_on_the_cpu():
    """Fake tensors are on a GPU without one, and have no values: tests/gpu/test_optimizer_offload.py compares the bits."""
    with FakeTensorMode():
        weights = [torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16)) for _ in range(2)]
        optimizer = StochasticAdamW(weights)
        for device in ("cpu", "cuda", "cuda"):
            for w in weights:
                w.grad = torch.ones_like(w)
                if w in optimizer.state:
                    optimizer.state[w]["step"] = optimizer.state[w]["step"].to(device)
            optimizer.step()
            assert [optimizer.state[w]["step"].device.type for w in weights] == ["cpu", "cpu"]
