"""Weights on their way into one vLLM linear layer: BF16 in, FP8 codes and scales out, in place.

vLLM's own loader (sharding, merged and replicated projections) writes into a BF16 staging tensor filled with NaN. When
the last logical matrix of the layer has arrived, each is quantized by itself into the storage that CUDA graphs may have
captured, and the staging tensor is freed, so no second BF16 copy of the model ever exists.

Nothing here raises while weights stream in: VeRL's sender would wait for an answer for ever. Faults are kept and raised
by `finish`, which vLLM calls once after the last weight.
"""

from collections.abc import Callable

import torch
from jetrl_kernels.constants import E4M3, TILE, pad_to_tile

from jetrl.errors import JobError
from jetrl.integrations.vllm import handshake
from jetrl.linear import quantize_weight

_QKV_SHARDS = ("q", "k", "v")


class WeightReceiver:
    """Staging and bookkeeping of one layer.

    names: canonical names of the logical matrices; out_features: their row counts on this rank; in_features: their
    column count on this rank; stock_loader(param, loaded_weight, *shard_id): vLLM's weight_loader of the layer.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        names: list[str],
        out_features: tuple[int, ...],
        in_features: int,
        scale_format: str,
        stock_loader: Callable,
    ) -> None:
        self.layer = layer
        self.names = names
        self.out_features = out_features
        self.in_features = in_features
        self.scale_format = scale_format
        self.stock_loader = stock_loader
        self.ever_loaded = False
        self._started_on_dummy_weights = False
        self._staging: torch.nn.Parameter | None = None
        self._received: set[str] = set()
        self._faults: list[str] = []

    def empty_storage(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Uninitialized codes (sum of padded rows, padded columns) E4M3 and their scales, on the current default device."""
        rows = sum(pad_to_tile(n) for n in self.out_features)
        columns = pad_to_tile(self.in_features)
        return torch.empty(rows, columns, dtype=E4M3), torch.empty(rows // TILE, columns // TILE, dtype=torch.float32)

    def load(self, param: torch.nn.Parameter, loaded_weight: torch.Tensor, *shard_id) -> None:
        """vLLM's weight_loader for the `weight` parameter: stage, and quantize when the layer is complete."""
        names = self._names_of(*shard_id)
        if not loaded_weight.is_floating_point():
            self._faults.append(f"{', '.join(names)} arrived as {loaded_weight.dtype}, not as a floating-point weight")
            return
        if self._staging is None:
            # A new cycle. What an earlier, failed sync left behind must not count for this one.
            self._staging, self._received = self._new_staging(param.device), set()
        try:
            self.stock_loader(self._staging, loaded_weight, *shard_id)
        except (AssertionError, RuntimeError) as e:
            self._faults.append(
                f"{', '.join(names)} of shape {tuple(loaded_weight.shape)} does not fit the layer ({e})"
            )
            return
        self._received.update(names)
        if len(self._received) == len(self.names):
            self._quantize()
            self._staging = None

    def finish(self) -> None:
        """Called once after all weights: raises JobError for what is missing, misshapen or not finite.

        Before the first load (vLLM starts VeRL's rollout on dummy weights) there is nothing to check: the trainer
        sends every weight before the first sample, and the call after that checks it.
        """
        faults, self._faults = self._faults, []
        received, self._received = self._received, set()
        self._staging = None
        if faults:
            raise JobError(f"weight sync failed: {'; '.join(faults)}")
        if not received and not self.ever_loaded:
            self._started_on_dummy_weights = True
            return
        missing = [name for name in self.names if name not in received]
        if missing:
            raise JobError(f"weight sync incomplete: {', '.join(missing)} was not received by the rollout")
        if self._started_on_dummy_weights and not handshake.trainer_has_asked():
            raise JobError(
                "the rollout runs jetrl's FP8 layers but the trainer never asked for its precision graph, so it would train "
                "in another precision; set actor_rollout_ref.model.external_lib=jetrl.integrations.verl and an FSDP strategy"
            )
        self.ever_loaded = True
        if not torch.isfinite(self.layer.weight_scale).all():
            raise JobError(f"weight sync failed: {', '.join(self._names_not_finite())} holds NaN or Inf")

    def _names_of(self, *shard_id) -> list[str]:
        """The logical matrices that one loader call brings. No shard id: the whole layer."""
        if not shard_id or shard_id[0] is None:
            return self.names
        shard = shard_id[0]
        if isinstance(shard, tuple):
            return [self.names[i] for i in shard]
        return [self.names[_QKV_SHARDS.index(shard) if isinstance(shard, str) else shard]]

    def _new_staging(self, device: torch.device) -> torch.nn.Parameter:
        shape = (sum(self.out_features), self.in_features)
        # NaN: rows that the loader fails to write must not pass for weights.
        staging = torch.nn.Parameter(
            torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device), requires_grad=False
        )
        staging.output_dim, staging.input_dim = 0, 1  # read by vLLM's loaders to shard
        return staging

    def _quantize(self) -> None:
        for start, source, rows in self._logical_slices():
            quantized = quantize_weight(source, self.scale_format)
            self.layer.weight.data[start : start + rows].copy_(quantized.codes)
            self.layer.weight_scale.data[start // TILE : (start + rows) // TILE].copy_(quantized.scale)

    def _logical_slices(self):
        """(first padded row, BF16 rows of one logical matrix, padded row count) of each matrix in the staging tensor."""
        start = offset = 0
        for n in self.out_features:
            rows = pad_to_tile(n)
            yield start, self._staging.data[offset : offset + n], rows
            start, offset = start + rows, offset + n

    def _names_not_finite(self) -> list[str]:
        found, start = [], 0
        for name, n in zip(self.names, self.out_features, strict=True):
            blocks = pad_to_tile(n) // TILE
            if not torch.isfinite(self.layer.weight_scale[start : start + blocks]).all():
                found.append(name)
            start += blocks
        return found
