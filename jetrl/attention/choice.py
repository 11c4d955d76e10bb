"""Which attention the trainer runs: the first that this machine, model and batch layout allow, with the reason."""

import importlib.util
from dataclasses import dataclass

import torch

from jetrl.errors import UserError
from jetrl.precision.kernels import EXACT_HEADS

LARGEST_HEAD = 256
# By device: what an exact flow's rollout runs too.
EXACT = {"cuda": "jetrl_fa3", "cpu": "jetrl_rows"}


@dataclass(frozen=True)
class Choice:
    """name: a transformers attention implementation; reason: why not an earlier one, for the log."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"attention {self.name} ({self.reason})"


def choose(hf_config: object, device_type: str, packed: bool, dtype: torch.dtype = torch.bfloat16) -> Choice:
    """The order: vLLM's FA3, flash-attn, torch's varlen_attn; SDPA where sequences are not packed or there is no GPU."""
    unfit = _no_flash(hf_config, device_type, packed, dtype)
    if unfit:
        return Choice("sdpa", unfit)
    missing = []
    for name, what, obstacle in (
        ("jetrl_fa3", "vLLM's FA3 forward with torch's flash backward", fa3_obstacle()),
        ("jetrl_fa2", "flash-attn", None if importlib.util.find_spec("flash_attn") else "flash_attn is not installed"),
        ("jetrl_varlen", "torch's varlen_attn", None),
    ):
        if obstacle is None:
            return Choice(name, "; ".join((what, *missing)))
        missing.append(obstacle)
    raise AssertionError("torch's varlen_attn has no obstacle")


def require_exact(hf_config: object, device_type: str, packed: bool, dtype: torch.dtype = torch.bfloat16) -> Choice:
    """The one kernel with the rollout's bits on this device, or a UserError that says what stands against it."""
    if device_type == "cpu" and packed:
        return Choice(EXACT["cpu"], "an exact flow on a CPU: every sum in a written order, slow")
    choice = choose(hf_config, device_type, packed, dtype)
    if choice.name != EXACT.get(device_type):
        raise UserError(
            f"precision=unified_exact needs {EXACT.get(device_type, EXACT['cuda'])} for attention in the trainer, which it "
            f"cannot use here: {choice.reason}; use precision=unified_fp8"
        )
    if head_size(hf_config) not in EXACT_HEADS:
        raise UserError(
            f"precision=unified_exact was shown for attention heads of {', '.join(map(str, EXACT_HEADS))}, and this model's "
            f"have {head_size(hf_config)}: FA3 gives other bits in decode than in a prefill; use precision=unified_fp8"
        )
    return choice


def head_size(hf_config: object) -> int:
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads


def _no_flash(hf_config: object, device_type: str, packed: bool, dtype: torch.dtype) -> str | None:
    """Why no flash kernel can run this, or None."""
    if device_type != "cuda":
        return f"device {device_type}"
    if not packed:
        return "sequences are padded: actor_rollout_ref.model.use_remove_padding=false"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash kernels take no {dtype}"
    size = head_size(hf_config)
    if size > LARGEST_HEAD or size % 8:
        return f"flash kernels take heads of a multiple of 8 up to {LARGEST_HEAD}, not {size}"
    return None


def fa3_obstacle() -> str | None:
    """Why vLLM's FA3 cannot run on the current GPU, or None."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    if not torch.cuda.is_available():
        return "no GPU is visible"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"FA3 needs compute capability 9.x, this GPU has {major}.{minor}"
    from vllm.vllm_flash_attn.flash_attn_interface import FA3_AVAILABLE, FA3_UNAVAILABLE_REASON

    return None if FA3_AVAILABLE else f"vLLM's FA3 does not load: {FA3_UNAVAILABLE_REASON}"
