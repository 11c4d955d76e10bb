"""PlatformCPU: VeRL's platform interface for a machine without an accelerator."""

import shutil
import types
from contextlib import contextmanager

import torch
from verl.plugin.platform.platform_base import PlatformBase

PLATFORM_NAME = "cpu"


class _CPUDevice(str):
    """What `get_device_id()` returns: usable as a torch device ("cpu") and inside f"{name}:{id}" (as index 0).

    VeRL uses the one value in both ways; a plain 0 would mean CUDA device 0 to `tensor.to`.
    """

    def __format__(self, spec: str) -> str:
        return "0"


class _CPUDeviceModule(types.ModuleType):
    """`torch.cpu` plus the calls VeRL makes on `torch.cuda`; memory figures are zero because there is no device memory."""

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)

    def empty_cache(self) -> None:
        return

    def ipc_collect(self) -> None:
        return

    def memory_allocated(self, device=None) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def reset_peak_memory_stats(self, device=None) -> None:
        return

    def mem_get_info(self, device=None) -> tuple[int, int]:
        return 0, 0

    def get_device_name(self, device=None) -> str:
        return "CPU"

    def set_device(self, device) -> None:
        return

    def is_available(self) -> bool:
        return False

    # VeRL restores the accelerator's random state from a checkpoint; here that is the CPU's own.
    def get_rng_state(self, device=None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device=None) -> None:
        torch.set_rng_state(state)


class PlatformCPU(PlatformBase):
    """Chosen by VeRL's auto-detection where no other registered platform is available."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CPUDeviceModule("torch.cpu")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return not torch.cuda.is_available() and shutil.which("nvidia-smi") is None

    def current_device(self) -> str:
        return _CPUDevice("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return

    def synchronize(self, device_index: int | None = None) -> None:
        return

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return

    def empty_cache(self) -> None:
        return

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str):
        yield

    def profiler_start(self) -> None:
        return

    def profiler_stop(self) -> None:
        return

    def ray_resource_name(self) -> str:
        # Ray only knows "GPU" as a countable accelerator; the job starts Ray with that many imaginary ones.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
