"""What VeRL 0.9.1 offers no hook for on a CPU. Applied once per process, before VeRL's workers import these names.

All of it can go when VeRL supports a CPU platform itself.
"""

import functools
import os

import torch.distributed.fsdp
import verl.utils.distributed


class UnpinnedCPUOffloadPolicy(torch.distributed.fsdp.CPUOffloadPolicy):
    """CPUOffloadPolicy that never pins: pinning needs an NVIDIA driver, and VeRL's reference hard-codes pin_memory=True."""

    def __init__(self, pin_memory: bool = True):
        super().__init__(pin_memory=False)


def apply() -> None:
    """Idempotent."""
    # VeRL looks its engines up by device name and registers them for "cuda" and "npu" only.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")

    if torch.distributed.fsdp.CPUOffloadPolicy is not UnpinnedCPUOffloadPolicy:
        torch.distributed.fsdp.CPUOffloadPolicy = UnpinnedCPUOffloadPolicy

    # VeRL builds the backend string f"cpu:gloo,{device}:{backend}"; with device "cpu" torch refuses the duplicate.
    stock = verl.utils.distributed.initialize_global_process_group_ray
    if not hasattr(stock, "jetrl_stock"):

        @functools.wraps(stock)
        def initialize(timeout_second=None, backend=None):
            return stock(timeout_second=timeout_second, backend=backend or "cpu:gloo")

        initialize.jetrl_stock = stock
        verl.utils.distributed.initialize_global_process_group_ray = initialize
