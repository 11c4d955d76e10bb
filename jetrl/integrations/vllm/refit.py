"""Weights on their way into one vLLM linear layer, written in place into the storage that CUDA graphs captured.

Two wires, told apart by dtype; both leave the same bytes:
  <name>.weight in a float dtype: this rank's part of it is quantized straight into the storage, so no second BF16 copy
  of the model, nor of a layer, ever exists;
  <name>.weight in E4M3 followed by <name>.weight_scale (float32): what `jetrl.linear.quantize_weight` made of the whole
  matrix, codes padded to 128 in both dimensions. Copied as they are.

Every cycle starts by setting all scales of the layer to NaN, so a matrix that does not arrive explodes.

Nothing here raises while weights stream in: VeRL's sender would wait for an answer for ever. Faults are kept and raised
by `finish`, which vLLM calls once after the last weight.
"""

import torch
from jetrl_kernels.constants import E4M3, TILE, ceil_div, pad_to_tile
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

from jetrl.errors import JobError
from jetrl.integrations.vllm import handshake
from jetrl.integrations.vllm.shards import Shard, shard_numbers
from jetrl.linear import quantize_weight

_PARTS = frozenset(("codes", "scale"))


class WeightReceiver:
    """Bookkeeping of one layer. `shards`: its logical matrices in storage order; scale_format: the rollout's."""

    def __init__(self, layer: torch.nn.Module, shards: tuple[Shard, ...], scale_format: str) -> None:
        self.layer = layer
        self.shards = shards
        self.scale_format = scale_format
        self.ever_loaded = False
        self._started_on_dummy_weights = False
        self._in_cycle = False
        self._received: dict[str, set[str]] = {}
        self._faults: list[str] = []

    @property
    def names(self) -> list[str]:
        return [shard.name for shard in self.shards]

    @property
    def out_features(self) -> tuple[int, ...]:
        """Row counts of the logical matrices on this rank."""
        return tuple(shard.rows for shard in self.shards)

    def empty_storage(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Uninitialized codes (sum of padded rows, padded columns) E4M3 and their scales, on the current default device."""
        rows = sum(pad_to_tile(n) for n in self.out_features)
        columns = pad_to_tile(self.shards[0].columns)
        return torch.empty(rows, columns, dtype=E4M3), torch.empty(rows // TILE, columns // TILE, dtype=torch.float32)

    def load_weight(self, param: torch.nn.Parameter, loaded: torch.Tensor, shard_id=None) -> None:
        """vLLM's weight_loader of `weight`."""
        numbers = shard_numbers(shard_id, len(self.shards))
        if loaded.dtype == E4M3:
            if self._fits("FP8 codes", numbers, loaded, tuple(pad_to_tile(n) for n in self._full(numbers))):
                self._copy_codes(numbers[0], loaded)
        elif not loaded.is_floating_point():
            self._faults.append(f"{self._name(numbers)} arrived as {loaded.dtype}, not as a floating-point weight")
        elif self._fits("a weight", numbers, loaded, self._full(numbers)):
            # Several logical matrices in one tensor: a checkpoint that stores them merged.
            heights = [self.shards[i].full[0] for i in numbers]
            for number, whole in zip(numbers, loaded.split(heights), strict=True):
                self._begin(number, *_PARTS)
                self._quantize(number, self.shards[number].of_weight(whole))

    def load_scale(self, param: torch.nn.Parameter, loaded: torch.Tensor, shard_id=None) -> None:
        """vLLM's weight_loader of `weight_scale`."""
        numbers = shard_numbers(shard_id, len(self.shards))
        if loaded.dtype != torch.float32:
            self._faults.append(f"{self._name(numbers)}.weight_scale arrived as {loaded.dtype}, not as torch.float32")
        elif self._fits("block scales", numbers, loaded, tuple(ceil_div(n, TILE) for n in self._full(numbers))):
            self._begin(numbers[0], "scale")
            self._stored(numbers[0])[1].copy_(self.shards[numbers[0]].of_scale(loaded))

    def finish(self) -> None:
        """Called once after all weights: raises JobError for what is missing, misshapen or not finite.

        Before the first load (vLLM starts VeRL's rollout on dummy weights) there is nothing to check: the trainer
        sends every weight before the first sample, and the call after that checks it.
        """
        faults, self._faults = self._faults, []
        received, self._received = self._received, {}
        began, self._in_cycle = self._in_cycle, False
        if faults:
            raise JobError(f"weight sync failed: {'; '.join(faults)}")
        if not began and not self.ever_loaded:
            self._started_on_dummy_weights = True
            self._fill_with_dummy_weights()
            return
        missing = [name for name in self.names if not received.get(name)]
        missing += [f"{name} ({part})" for name, parts in received.items() for part in sorted(_PARTS - parts)]
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

    def _name(self, numbers: list[int]) -> str:
        return ", ".join(self.shards[i].name for i in numbers)

    def _full(self, numbers: list[int]) -> tuple[int, int]:
        """Shape of the named matrices, whole and stacked along rows."""
        return sum(self.shards[i].full[0] for i in numbers), self.shards[numbers[0]].full[1]

    def _fits(self, what: str, numbers: list[int], loaded: torch.Tensor, want: tuple[int, int]) -> bool:
        if what != "a weight" and len(numbers) != 1:
            self._faults.append(f"{self._name(numbers)} arrived as {what} of one matrix; each must come by itself")
        elif tuple(loaded.shape) != want:
            shape = f"{what} of shape {tuple(loaded.shape)}"
            self._faults.append(
                f"{self._name(numbers)} arrived as {shape}, which does not fit the layer: it takes {want}"
            )
        else:
            return True
        return False

    def _begin(self, number: int, *parts: str) -> None:
        """Note the arrival of `parts`; poison the layer first where they open a new cycle.

        They do when nothing is open, and also when they were there already: then an earlier sync broke off without
        `finish`, and what it brought must not count for this one.
        """
        name = self.shards[number].name
        if not self._in_cycle or self._received.get(name, set()) & set(parts):
            self._in_cycle, self._received = True, {}
            self.layer.weight_scale.data.fill_(float("nan"))
        self._received.setdefault(name, set()).update(parts)

    def _quantize(self, number: int, part: torch.Tensor) -> None:
        codes, scale = self._stored(number)
        part = part.to(codes.device)
        if part.dtype not in (torch.bfloat16, torch.float32):
            part = part.to(torch.bfloat16)
        quantized = quantize_weight(part, self.scale_format)
        codes.copy_(quantized.codes.view(torch.uint8))
        scale.copy_(quantized.scale)

    def _copy_codes(self, number: int, whole: torch.Tensor) -> None:
        self._begin(number, "codes")
        self._stored(number)[0].copy_(self.shards[number].of_codes(whole.view(torch.uint8)))

    def _stored(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (as bytes: torch has few copy kernels for float8) and scales of one logical matrix in the layer."""
        start = sum(pad_to_tile(shard.rows) for shard in self.shards[:number])
        rows = pad_to_tile(self.shards[number].rows)
        codes = self.layer.weight.data[start : start + rows].view(torch.uint8)
        return codes, self.layer.weight_scale.data[start // TILE : (start + rows) // TILE]

    def _fill_with_dummy_weights(self) -> None:
        """What vLLM's dummy loader would put into a BF16 layer, quantized; its own filling of FP8 codes is all but zero."""
        device = self.layer.weight.device
        if device.type == "meta":
            return
        for number, shard in enumerate(self.shards):
            part = torch.empty(shard.rows, shard.columns, dtype=torch.bfloat16, device=device)
            initialize_single_dummy_weight(part)
            self._quantize(number, part)

    def _names_not_finite(self) -> list[str]:
        return [s.name for i, s in enumerate(self.shards) if not torch.isfinite(self._stored(i)[1]).all()]
