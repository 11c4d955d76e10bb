"""vLLM's cache of cos and sin, brought to the bits that the trainer's own rotary module computes on this device.

vLLM raises the frequencies to their powers on the GPU, transformers on the CPU. A frequency's last bit is, a thousand
positions on, an angle whose cosine rounds to another BF16; that key then changes every later token of its sequence. The
trainer's module stays as it is, and the cache is touched only where both mean the same rotation: see `tolerance`.
"""

import inspect
from collections.abc import Iterator

import torch
from torch import nn

from jetrl.attention.rotary_table import STATIC_TYPES
from jetrl.integrations.protocol import announce
from jetrl.precision.build_hf import meta_model
from jetrl.precision.hf_parts import is_rotary

CHUNK = 16384  # positions at a time: the float32 angles of a 128k table at once would be 130 MB


def follow_trainer(layer: nn.Module, hf_config: object) -> None:
    """Overwrite `layer.cos_sin_cache` (positions, R; cosines in the first half) in place, or say why it stays vLLM's."""
    obstacle = _fill(layer.cos_sin_cache, hf_config)
    if obstacle:
        announce(f"rotary: some tokens will get other bits than in the trainer, because of {obstacle}")


def tolerance(rows: int, dtype: torch.dtype) -> float:
    """How far two tables of one rotation can lie apart: by the angle, and by one rounding to the table's dtype.

    Two float32 powers, each within 2 ulp, and two products, each within half of one, give frequencies and angles within
    5 * 2^-23 of each other, relative; an angle is at most `rows`, and a cosine moves no more than its angle. Another
    base, scaling or order of pairs is off by 0.1 and more somewhere in a table.
    """
    return rows * 5 * 2.0**-23 + torch.finfo(dtype).eps


@torch.no_grad()
def _fill(cache: torch.Tensor, hf_config: object) -> str | None:
    kind = (getattr(hf_config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in STATIC_TYPES:
        return f"rotary embeddings of type {kind}, whose frequencies follow the sequence"
    allowed, nearest = tolerance(*cache.shape[:1], cache.dtype), float("inf")
    for module in _trainer_modules(hf_config):
        table = torch.cat([_rows(module, start, cache) for start in range(0, cache.shape[0], CHUNK)])
        if table.shape != cache.shape:
            continue
        apart = (table.float() - cache.float()).abs().max().item()
        if apart <= allowed:
            cache.copy_(table)
            return None
        nearest = min(nearest, apart)
    if nearest == float("inf"):
        return "a rotary embedding that transformers has in another form than vLLM"
    return f"cosines that differ from transformers' by {nearest:.2g}, more than the {allowed:.2g} of rounding"


def _trainer_modules(hf_config: object) -> Iterator[nn.Module]:
    """The rotary modules of the Hugging Face model, frequencies made on the CPU as from_pretrained makes them."""
    for module in meta_model(hf_config).modules():
        takes = list(inspect.signature(module.forward).parameters) if is_rotary(module) else None
        if takes == ["x", "position_ids"] and hasattr(module, "config"):
            with torch.device("cpu"):  # vLLM builds models with the GPU as the default
                yield type(module)(config=module.config)


def _rows(module: nn.Module, start: int, cache: torch.Tensor) -> torch.Tensor:
    """(n, R): cos and sin of CHUNK positions as the trainer's forward computes them, half of each, side by side."""
    positions = torch.arange(start, min(start + CHUNK, cache.shape[0]), device=cache.device)[None]
    cos, sin = module.to(cache.device)(torch.empty(0, dtype=cache.dtype, device=cache.device), positions)
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
