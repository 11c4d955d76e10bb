"""The CPU platform answers what VeRL asks of an accelerator's torch module."""

import pytest
import torch
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.device import get_device_id, get_device_name, get_torch_device

from jetrl.integrations.verl_cpu import is_active

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="VeRL has a platform of its own for this machine")


def test_verl_runs_on_the_platform_here():
    assert is_active() and get_device_name() == "cpu"
    assert torch.zeros(1, device=get_device_id()).device.type == "cpu" and f"{get_device_id()}" == "0"


def test_a_checkpoint_s_random_state_is_restored():
    """VeRL's own save and load of it: what a resumed job calls first."""
    torch.manual_seed(1)
    state = BaseCheckpointManager.get_rng_state()
    drawn = torch.rand(4)
    BaseCheckpointManager.load_rng_state(state)
    assert torch.equal(torch.rand(4), drawn)


def test_what_verl_calls_on_the_device_module_exists():
    device = get_torch_device()
    state = device.get_rng_state()
    device.set_rng_state(state)
    device.empty_cache()
    device.synchronize()
    assert device.max_memory_allocated() == device.memory_reserved() == 0
    assert device.mem_get_info() == (0, 0)
