"""Where a host with sequence parallelism plugs its exchange of tokens and heads into the packed attention."""

from typing import Protocol

import torch


class Exchange(Protocol):
    """Ulysses: a rank holds a share of the tokens with all heads outside attention, all tokens with a share inside."""

    def active(self) -> bool:
        """Whether this process exchanges at all at this moment."""

    def heads_for_tokens(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B, S / n, H, D) -> (B, S, H / n, D), differentiable; KV heads are repeated where there are fewer than ranks."""

    def tokens_for_heads(self, out: torch.Tensor) -> torch.Tensor:
        """(B, S, H / n, D) -> (B, S / n, H, D), differentiable."""

    def gather_positions(self, position_ids: torch.Tensor) -> torch.Tensor:
        """(B, S / n) -> (B, S)."""


_exchange: Exchange | None = None


def use(exchange: Exchange | None) -> None:
    """Set the exchange of this process; None for none."""
    global _exchange
    _exchange = exchange


def active() -> Exchange | None:
    return _exchange if _exchange is not None and _exchange.active() else None
