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
PROBED = 512  # positions at which a module is asked whether it computes what `_rows` does


def follow_trainer(layer: nn.Module, hf_config: object) -> None:
    """Overwrite `layer.cos_sin_cache` (positions, R; cosines in the first half) in place, or say why it stays vLLM's."""
    obstacle = _fill(layer.cos_sin_cache, hf_config)
    if obstacle:
        announce(f"rotary: some tokens will get other bits than in the trainer, because of {obstacle}")


def tolerance(rows: int, dtype: torch.dtype) -> float:
    """How far two tables of one rotation can lie apart: by the angle, and by one rounding to the table's dtype.

    CUDA's float32 power is within 4 ulp; the other power, both reciprocals and both products are within half of one each:
    angles within 8 * 2^-23 of each other, relative. An angle is at most `rows`, and a cosine moves no more than its angle.
    """
    return rows * 8 * 2.0**-23 + torch.finfo(dtype).eps


@torch.no_grad()
def _fill(cache: torch.Tensor, hf_config: object) -> str | None:
    kind = (getattr(hf_config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in STATIC_TYPES:
        return f"rotary embeddings of type {kind}, whose frequencies follow the sequence"
    # The first rows decide: over a million of them the angle's own error would hide another base.
    judged = min(cache.shape[0], CHUNK)
    allowed, nearest = tolerance(judged, cache.dtype), None
    for frequencies, scaling in _trainer_frequencies(hf_config):
        if cache.shape[1] != 2 * len(frequencies):
            continue
        frequencies = frequencies.to(cache.device)
        first = _rows(frequencies, scaling, 0, judged, cache.dtype)
        apart = (first.float() - cache[:judged].float()).abs().max().item()
        if apart <= allowed:
            cache[:judged] = first
            for start in range(judged, cache.shape[0], CHUNK):
                end = min(start + CHUNK, cache.shape[0])
                cache[start:end] = _rows(frequencies, scaling, start, end, cache.dtype)
            return None
        nearest = apart if nearest is None else min(nearest, apart)
    if nearest is None:
        return "a rotary embedding that transformers has in another form than vLLM"
    return f"cosines that differ from transformers' by {nearest:.2g}, more than the {allowed:.2g} of rounding"


def _trainer_frequencies(hf_config: object) -> Iterator[tuple[torch.Tensor, float]]:
    """(frequencies, scaling) of the Hugging Face model's rotary modules, made on the CPU as from_pretrained makes them."""
    for module in meta_model(hf_config).modules():
        config = getattr(module, "config", None) if is_rotary(module) else None
        if config is None or list(inspect.signature(module.forward).parameters) != ["x", "position_ids"]:
            continue
        with torch.device("cpu"):  # vLLM builds models with the GPU as the default
            module = type(module)(config=config)
            cos, sin = module(torch.empty(0, dtype=torch.float32), torch.arange(PROBED)[None])
            frequencies, scaling = module.inv_freq, module.attention_scaling
            half, expected = len(frequencies), _rows(frequencies, scaling, 0, PROBED, torch.float32)
        if torch.equal(torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1), expected):
            yield frequencies, scaling


def _rows(frequencies: torch.Tensor, scaling: float, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """(end - start, R): cos and sin of these positions, side by side, as transformers computes them on this device.

    transformers has each angle from a matrix product over one element, which is the float32 product. That product itself is
    taken here: in vLLM's worker a matrix product may be TF32 (VLLM_BATCH_INVARIANT, VLLM_FLOAT32_MATMUL_PRECISION), and it
    would be the first to call cuBLAS, whose workspace would then lie in the memory that sleep mode unmaps.
    """
    positions = torch.arange(start, end, device=frequencies.device).float()
    angles = positions[:, None] * frequencies.float()
    return torch.cat((angles.cos() * scaling, angles.sin() * scaling), dim=-1).to(dtype)
