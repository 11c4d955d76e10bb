"""The FP8 wire of a weight sync: the bytes that the rollout would make of the weights, made here, at half of BF16's size.

A weight that both sides quantize alike goes out as one E4M3 tensor of codes and scales (packed_weight.py) under its own name,
and VeRL gets many of these as one (weight_bundle.py); everything else as VeRL sends it. The quantizer is the rollout's own,
and what it reads is bf16(master) on either side of the wire, so the rollout's storage ends up with the same bytes.
"""

from collections.abc import Iterator, Mapping

import torch

from jetrl.packed_weight import Slab, packed_bytes
from jetrl.precision.graph import PrecisionGraph

FP8_WIRE = "fp8"
SLAB_BYTES = 128 << 20  # three are alive at once


def equal_weight_formats(rollout: PrecisionGraph, trainer: PrecisionGraph) -> dict[str, str]:
    """Canonical name -> scale format of every linear layer whose weight both graphs quantize in the same way."""
    found = {}
    for name in rollout.linear_names():
        ours, theirs = trainer.linear_format(name), rollout.linear_format(name)
        if ours and theirs and theirs.is_fp8 and ours.weight == theirs.weight:
            found[name] = theirs.weight.scale_format
    return found


def quantized_on_the_way(
    weights: Iterator[tuple[str, torch.Tensor]], scale_formats: Mapping[str, str], device: torch.device | str | int
) -> Iterator[tuple[str, torch.Tensor]]:
    """weights: (name, whole tensor) as VeRL gathers them, one at a time; quantized on `device`.

    Quantized weights lie behind one another in slabs, which are never larger than the largest tensor that was sent before:
    VeRL's bucket has to hold that one, and nothing here knows the bucket's size.
    """
    slab, largest, device = None, 0, torch.device(device)
    for name, tensor in weights:
        scale_format = scale_formats.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if scale_format is not None:
            if tensor.device != device:
                tensor = tensor.to(device, non_blocking=True)
            size = packed_bytes(tensor.shape)
            if slab is None or not slab.has_room_for(size):
                slab = Slab(max(size, min(SLAB_BYTES, largest // 128 * 128)), tensor.device)
            tensor = slab.quantize(tensor, scale_format)
        largest = max(largest, tensor.nbytes)
        yield name, tensor
