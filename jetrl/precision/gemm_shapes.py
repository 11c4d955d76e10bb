"""Which FP8 products a job will compute: shapes and row counts, for compiling their kernels beforehand (jetrl.warm).

DeepGEMM compiles a kernel for a weight's shape and for a choice of tiles, which it makes from the number of rows in steps of 64.
So every multiple of 64 up to the most rows that a batch can have meets every kernel. Weight gradients are not among them:
those in BF16 are cuBLASLt's, which compiles nothing (under flow.train.wgrad=blocks the first update compiles one for each matrix).
"""

from dataclasses import dataclass

from jetrl.errors import UserError
from jetrl.precision.flow import PrecisionAssignment
from jetrl.precision.tensor_parallel import BLOCK, sharded_linears

ROW_STEP = 64


@dataclass(frozen=True, order=True)
class Product:
    """x (rows, k) times a weight (n, k) in blocks, for every `rows` up to `most_rows`; n and k padded to 128."""

    n: int
    k: int
    most_rows: int

    def rows(self) -> list[int]:
        whole = list(range(ROW_STEP, self.most_rows + 1, ROW_STEP))
        return whole if self.most_rows % ROW_STEP == 0 else [*whole, self.most_rows]


def _padded(n: int) -> int:
    return -(-n // BLOCK) * BLOCK


def matrices(hf_config: dict, tensor_parallel: int = 1, merged: bool = True) -> list[tuple[int, int]]:
    """(n, k) of a decoder layer's weights on one rank, each part padded to 128. merged: q, k, v and gate, up as one.

    Raises UserError where tensor_parallel does not divide one.
    """
    hidden, part = _padded(hf_config["hidden_size"]), {}
    for linear in sharded_linears(hf_config):
        shard = linear.shard(tensor_parallel)
        if shard is None:
            raise UserError(
                f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor_parallel} does not divide {linear.name}"
            )
        part[linear.name.rpartition(".")[2]] = _padded(shard)
    q, k, v, o, gate, up, down = (part[f"{name}_proj"] for name in ("q", "k", "v", "o", "gate", "up", "down"))
    into = [q + k + v, gate + up] if merged else [q, k, gate]
    return [*((n, hidden) for n in into), (hidden, o), (hidden, down)]


def products(
    hf_config: dict, train: PrecisionAssignment, rollout: PrecisionAssignment,
    micro_batch_tokens: int, batched_tokens: int, tensor_parallel: int,
) -> list[Product]:  # fmt: skip
    """Of both sides of a job; nothing for a side that runs no FP8 of jetrl's.

    Whether the trainer merges is seen in the live layer (jetrl/fusion), so both ways are among its products.
    """
    most: dict[tuple[int, int], int] = {}

    def add(n: int, k: int, rows: int) -> None:
        most[n, k] = max(rows, most.get((n, k), 0))

    if rollout.linear == "fp8":
        for n, k in matrices(hf_config, tensor_parallel):
            add(n, k, batched_tokens)
    if train.linear == "fp8":
        for n, k in (*matrices(hf_config), *matrices(hf_config, merged=False)):
            add(n, k, micro_batch_tokens)
            add(k, n, micro_batch_tokens)  # input gradients
    return sorted(Product(n, k, rows) for (n, k), rows in most.items())
