"""StochasticAdamW with its state offloaded between updates, as VeRL does it: the same bits as without."""

import pytest
import torch
from verl.utils.fsdp_utils import load_fsdp_optimizer, offload_fsdp_optimizer

from jetrl.optimizer import StochasticAdamW

pytestmark = pytest.mark.gpu

N = 1 << 20
# Enough for both powers of a count to round otherwise on a GPU at some of them.
STEPS = 20


def trained(offload: bool, stance: str) -> torch.Tensor:
    torch.manual_seed(7)
    weight = torch.nn.Parameter(torch.randn(N, device="cuda").bfloat16())
    optimizer = StochasticAdamW([weight], lr=1e-3)
    with torch.compiler.set_stance(stance):
        for _ in range(STEPS):
            if offload:
                offload_fsdp_optimizer(optimizer)
                load_fsdp_optimizer(optimizer, torch.cuda.current_device())
            weight.grad = torch.randn_like(weight)
            optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("stance", ["default", "force_eager"])
def test_offloading_the_state_changes_no_bit_of_the_weights(stance):
    assert torch.equal(trained(True, stance), trained(False, stance))
