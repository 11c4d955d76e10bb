"""VeRL's Ulysses sequence parallelism around jetrl's packed attention.

VeRL puts its exchange into transformers' flash-attn function, which a registered attention never calls. The exchange itself
is VeRL's, and so is the choice of how KV heads are repeated where there are fewer of them than ranks.
"""

import torch
from verl.utils.ulysses import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_world_size,
)


class UlyssesExchange:
    """jetrl.attention.sequence_parallel.Exchange. The group is set by VeRL while an engine computes."""

    def active(self) -> bool:
        return get_ulysses_sequence_parallel_world_size() > 1

    def heads_for_tokens(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        repeats = max(get_ulysses_sequence_parallel_world_size() // k.shape[2], 1)
        if repeats > 1:
            k, v = (t.repeat_interleave(repeats, dim=2) for t in (k, v))
        return tuple(gather_seq_scatter_heads(t, seq_dim=1, head_dim=2) for t in (q, k, v))

    def tokens_for_heads(self, out: torch.Tensor) -> torch.Tensor:
        return gather_heads_scatter_seq(out, seq_dim=1, head_dim=2)

    def gather_positions(self, position_ids: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(position_ids) for _ in range(get_ulysses_sequence_parallel_world_size())]
        torch.distributed.all_gather(parts, position_ids.contiguous(), group=get_ulysses_sequence_parallel_group())
        return torch.cat(parts, dim=-1)
