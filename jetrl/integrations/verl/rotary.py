"""Rotary frequencies stay FP32 in a model that is otherwise BF16.

VeRL's `_build_module` ends with `module.to(dtype)`, which rounds every buffer, the rotary `inv_freq` among them: a token
at position 4096 may then sit up to 16 positions (2^-8 of it) from where vLLM, which computes its cache in FP32, puts it.
"""

import torch
from torch import nn

from jetrl.errors import UserError


def restore_frequencies(model: nn.Module) -> int:
    """Recompute, in FP32, the frequency buffers that a cast has rounded. Returns how many modules were restored.

    By transformers' own class for the module, from the configuration it was built from. Raises UserError for a module with
    rounded frequencies that cannot be built again that way.
    """
    restored = 0
    for name, module in model.named_modules():
        frequencies = module._buffers.get("inv_freq")
        if frequencies is None or frequencies.dtype is torch.float32:
            continue
        config = getattr(module, "config", None)
        if config is None:
            raise UserError(
                f"{name} ({type(module).__name__}) has rotary frequencies that VeRL rounded to {frequencies.dtype}, and "
                "jetrl does not know how to recompute them; use masters=fp32 (actor.fsdp_config.model_dtype=fp32)"
            )
        # On the CPU, as from_pretrained does: another device's pow may differ in the last bit.
        fresh = type(module)(config=config)
        for key, value in fresh._buffers.items():
            module.register_buffer(key, value.to(frequencies.device), persistent=False)
        restored += 1
    return restored
