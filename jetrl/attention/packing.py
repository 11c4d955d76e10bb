"""Where the sequences of a packed batch begin, from position ids, found once a micro-batch and not once a layer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True)
class Packing:
    """cu_seqlens (sequences + 1) int32 on the device of the tokens; longest: tokens of the longest sequence."""

    cu_seqlens: torch.Tensor
    longest: int


# Position ids live as long as their micro-batch, and gradient checkpointing recomputes layers with the same tensor.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def packing_of(
    position_ids: torch.Tensor, batch: int, gather: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Packing:
    """A sequence begins wherever a position is 0, and every row of the batch begins one.

    position_ids (batch or 1, tokens) integers; `gather` turns a rank's share of them into the whole (sequence
    parallelism). Reads the device once for each new tensor, which waits for the GPU.
    """
    key = (position_ids._version, batch, gather is not None)
    known = _known.get(position_ids)
    if known is None or known[0] != key:
        whole = position_ids if gather is None else gather(position_ids)
        known = _known[position_ids] = (key, _find(whole.expand(batch, -1)))
    return known[1]


def rows_of(batch: int, tokens: int, device: torch.device) -> Packing:
    """Every row of an unpadded batch is one sequence."""
    return Packing(torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=device), tokens)


def _find(position_ids: torch.Tensor) -> Packing:
    flat = position_ids.reshape(-1)
    starts = torch.nonzero(flat == 0).flatten().to("cpu", torch.int64)
    row_starts = torch.arange(0, flat.numel(), position_ids.shape[1])
    if not torch.isin(row_starts, starts).all():
        raise ValueError(
            "packed attention needs position ids that start at 0 in every row; these start later, as after a cut through "
            "a sequence or with a KV cache"
        )
    bounds = torch.cat((starts, torch.tensor([flat.numel()])))
    return Packing(bounds.to(position_ids.device, torch.int32), int(bounds.diff().max()))
