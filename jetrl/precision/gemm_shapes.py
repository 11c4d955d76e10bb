"""Which FP8 products a job will compute: shapes and row counts, for compiling their kernels beforehand (jetrl.warm).

DeepGEMM compiles a kernel for a weight's shape and for a choice of tiles, which it makes from the number of rows in steps of 64.
So every multiple of 64 up to the most rows that a batch can have meets every kernel.
"""

from dataclasses import dataclass

from jetrl.precision.flow import PrecisionAssignment
from jetrl.precision.tensor_parallel import BLOCK, sharded_linears

ROW_STEP = 64
# Decoder layers whose q, k, v and whose gate, up run as one product in the trainer; vLLM merges them in every model.
FUSED_MODEL_TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, order=True)
class Product:
    """x (rows, k) times a weight (n, k) in blocks, for every `rows` up to `most_rows`; all sizes as they are padded.

    weight_gradient: the product (n, tokens) x (tokens, k) instead, whose kernel is one for every number of tokens.
    """

    n: int
    k: int
    most_rows: int
    weight_gradient: bool = False

    def rows(self) -> list[int]:
        whole = list(range(ROW_STEP, self.most_rows + 1, ROW_STEP))
        return whole if self.most_rows % ROW_STEP == 0 else [*whole, self.most_rows]


def _padded(n: int) -> int:
    return -(-n // BLOCK) * BLOCK


def matrices(hf_config: dict, tensor_parallel: int = 1, merged: bool = True) -> list[tuple[int, int]]:
    """(n, k) of a decoder layer's weights on one rank, each part padded to 128. merged: q, k, v and gate, up as one."""
    hidden = _padded(hf_config["hidden_size"])
    part = {
        linear.name.rpartition(".")[2]: _padded(linear.shard(tensor_parallel)) for linear in sharded_linears(hf_config)
    }
    q, k, v, o, gate, up, down = (part[f"{name}_proj"] for name in ("q", "k", "v", "o", "gate", "up", "down"))
    into = [q + k + v, gate + up] if merged else [q, k, gate]
    return [*((n, hidden) for n in into), (hidden, o), (hidden, down)]


def products(
    hf_config: dict, train: PrecisionAssignment, rollout: PrecisionAssignment,
    micro_batch_tokens: int, batched_tokens: int, tensor_parallel: int,
) -> list[Product]:  # fmt: skip
    """Of both sides of a job; nothing for a side that runs no FP8 of jetrl's."""
    most: dict[tuple[int, int, bool], int] = {}

    def add(n: int, k: int, rows: int, weight_gradient: bool = False) -> None:
        most[n, k, weight_gradient] = max(rows, most.get((n, k, weight_gradient), 0))

    if rollout.linear == "fp8":
        for n, k in matrices(hf_config, tensor_parallel):
            add(n, k, batched_tokens)
    if train.linear == "fp8":
        for n, k in matrices(hf_config, merged=hf_config.get("model_type") in FUSED_MODEL_TYPES):
            add(n, k, micro_batch_tokens)
            add(k, n, micro_batch_tokens)  # input gradients
            if train.wgrad not in (
                "bf16",
                "blocks",
            ):  # BF16 is cuBLAS's; of blocks DeepGEMM compiles one for each number of tokens
                add(n, k, micro_batch_tokens, weight_gradient=True)
    return sorted(Product(n, k, rows, wgrad) for (n, k, wgrad), rows in most.items())
