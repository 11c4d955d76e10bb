"""Which part of each logical matrix this tensor-parallel rank holds, in vLLM's layers."""

from dataclasses import dataclass

import torch
from jetrl_kernels.constants import TILE, ceil_div, pad_to_tile
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

from jetrl.errors import UserError

_QKV = ("q", "k", "v")


@dataclass(frozen=True)
class Shard:
    """One logical matrix (rows, columns), as the trainer ships it whole, and the part of it that is stored here."""

    name: str
    full: tuple[int, int]
    first_row: int
    rows: int
    first_column: int
    columns: int

    @property
    def is_whole(self) -> bool:
        return (self.rows, self.columns) == self.full

    def of_weight(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's view of the whole unquantized matrix."""
        if self.is_whole:
            return whole
        return whole[self.first_row : self.first_row + self.rows, self.first_column : self.first_column + self.columns]

    def of_codes(self, whole: torch.Tensor) -> torch.Tensor:
        """The same of the whole matrix's codes, which are padded to 128. Cuts inside the matrix lie on its blocks' edges."""
        if self.is_whole:
            return whole
        rows, columns = pad_to_tile(self.rows), pad_to_tile(self.columns)
        return whole[self.first_row : self.first_row + rows, self.first_column : self.first_column + columns]

    def of_scale(self, whole: torch.Tensor) -> torch.Tensor:
        """The same of the whole matrix's block scales."""
        if self.is_whole:
            return whole
        row, column = self.first_row // TILE, self.first_column // TILE
        return whole[row : row + ceil_div(self.rows, TILE), column : column + ceil_div(self.columns, TILE)]


def shards_of(layer: LinearBase, names: list[str], rows: list[int], columns: int) -> tuple[Shard, ...]:
    """The shards of `layer`, in storage order.

    names: canonical names of its logical matrices; rows: their row counts on this rank; columns: the column count on
    this rank. Raises UserError for a kind of layer whose split is not known here.
    """
    if not isinstance(layer, (ReplicatedLinear, ColumnParallelLinear, RowParallelLinear)):
        raise UserError(
            f"{layer.prefix} is a {type(layer).__name__}, whose split over tensor-parallel ranks jetrl does not know; "
            "keep it BF16 with flow.train.exclude and flow.rollout.exclude"
        )
    if len(names) != len(rows):
        raise UserError(f"{layer.prefix} holds {len(rows)} matrices but is known as {names}")
    if isinstance(layer, ReplicatedLinear):
        # Its tp_size is the job's, although every rank holds it whole.
        return tuple(Shard(name, (n, columns), 0, n, 0, columns) for name, n in zip(names, rows, strict=True))
    if isinstance(layer, RowParallelLinear):
        full, first = (rows[0], columns * layer.tp_size), columns * layer.tp_rank
        return (Shard(names[0], full, 0, rows[0], first, columns),)
    # Where there are fewer KV heads than ranks, several ranks hold the same ones.
    replicas = [1] + [layer.num_kv_head_replicas] * 2 if isinstance(layer, QKVParallelLinear) else [1] * len(rows)
    return tuple(
        Shard(name, (n * layer.tp_size // copies, columns), n * (layer.tp_rank // copies), n, 0, columns)
        for name, n, copies in zip(names, rows, replicas, strict=True)
    )


def shard_numbers(shard_id: object, count: int) -> list[int]:
    """The logical matrices that one call of vLLM's weight_loader brings. None: all of them, stacked along rows."""
    if shard_id is None:
        return list(range(count))
    if isinstance(shard_id, tuple):
        return list(shard_id)
    return [_QKV.index(shard_id) if isinstance(shard_id, str) else shard_id]
