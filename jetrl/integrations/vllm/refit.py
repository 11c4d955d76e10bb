"""Weights on their way into one vLLM linear layer, written in place into the storage that CUDA graphs captured.

Two wires, told apart by dtype; both leave the same bytes:
  <name>.weight in a float dtype: this rank's part of it is quantized straight into the storage, so no second BF16 copy
  of the model, nor of a layer, ever exists;
  <name>.weight in E4M3: what `jetrl.linear.quantize_weight` made of the whole matrix, codes and scales in one tensor
  (packed_weight.py), or the codes alone, padded to 128 in both dimensions, and <name>.weight_scale (float32). Copied as they are.

Every cycle starts by setting all scales of the model to NaN, so a matrix that does not arrive explodes. (Of the layer, before
the trainer has asked for the graph and the layers of a model know of each other: refit_plan.py.)

Nothing here raises while weights stream in: VeRL's sender would wait for an answer for ever. Faults are kept and raised
by `finish`, which vLLM calls once after the last weight.
"""

from collections.abc import Callable

import torch
from jetrl_kernels.constants import E4M3, TILE, ceil_div, pad_to_tile
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

from jetrl.errors import JobError
from jetrl.integrations.vllm import handshake
from jetrl.integrations.vllm.refit_group import ReceiverGroup
from jetrl.integrations.vllm.shards import Shard, shard_numbers
from jetrl.linear import quantize_weight_into
from jetrl.packed_weight import packed_shape, parts

_PARTS = ("codes", "scale")


class WeightReceiver:
    """Bookkeeping of one layer. `shards`: its logical matrices in storage order; scale_format: the rollout's."""

    def __init__(self, layer: torch.nn.Module, shards: tuple[Shard, ...], scale_format: str) -> None:
        self.layer = layer
        self.shards = shards
        self.scale_format = scale_format
        # Of the model once its table is made; arrivals by vLLM's own way concern this layer alone, see `load_weight`.
        self.group = self._alone = ReceiverGroup([self])
        self.ever_loaded = False
        # Something arrived and `finish` has not been called; all scales are NaN and nothing has arrived since.
        self.in_cycle = self.is_poisoned = False
        self.faults: list[str] = []
        self._started_on_dummy_weights = False
        self._received: set[tuple[int, str]] = set()
        self._packed_shapes = [packed_shape(shard.full) for shard in shards]
        self._codes_shapes = [tuple(pad_to_tile(n) for n in shard.full) for shard in shards]
        self._scale_shapes = [tuple(ceil_div(n, TILE) for n in shard.full) for shard in shards]
        self._places: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._places_at: tuple[int, int] | None = None
        self._places_may_be_temporary = False

    @property
    def names(self) -> list[str]:
        return [shard.name for shard in self.shards]

    @property
    def out_features(self) -> tuple[int, ...]:
        """Row counts of the logical matrices on this rank."""
        return tuple(shard.rows for shard in self.shards)

    @property
    def scale(self) -> torch.Tensor:
        return self.layer._parameters["weight_scale"].data

    def empty_storage(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Uninitialized codes (sum of padded rows, padded columns) E4M3 and their scales, on the current default device."""
        rows = sum(pad_to_tile(n) for n in self.out_features)
        columns = pad_to_tile(self.shards[0].columns)
        return torch.empty(rows, columns, dtype=E4M3), torch.empty(rows // TILE, columns // TILE, dtype=torch.float32)

    def load_weight(self, param: torch.nn.Parameter, loaded: torch.Tensor, shard_id=None) -> None:
        """vLLM's weight_loader of `weight`.

        Called one layer after another where vLLM reloads a checkpoint: first on meta tensors, which counts the elements that
        are copied, then in storage for the moment, with `finish` before the next layer's turn. So other layers keep what they have.
        """
        self._places_may_be_temporary = True
        numbers = shard_numbers(shard_id, len(self.shards))
        if len(numbers) == 1:
            self._take_weight(numbers[0], loaded, self._alone)
            self.group.copy_now()
        elif not loaded.is_floating_point() or loaded.dtype == E4M3:
            self.faults.append(f"{self._name(numbers)} arrived merged as {loaded.dtype}; each must come by itself")
        elif self._fits("a weight", numbers, loaded, self._stacked(numbers)):
            # Several logical matrices in one tensor: a checkpoint that stores them merged.
            heights = [self.shards[i].full[0] for i in numbers]
            for number, whole in zip(numbers, loaded.split(heights), strict=True):
                self._take_weight(number, whole, self._alone)

    def load_scale(self, param: torch.nn.Parameter, loaded: torch.Tensor, shard_id=None) -> None:
        """vLLM's weight_loader of `weight_scale`."""
        self._places_may_be_temporary = True
        numbers = shard_numbers(shard_id, len(self.shards))
        if len(numbers) != 1:
            self.faults.append(f"{self._name(numbers)}.weight_scale arrived merged; each must come by itself")
            return
        self._take_scale(numbers[0], loaded, self._alone)
        self.group.copy_now()

    def taker(self, number: int, parameter: str) -> Callable[[torch.Tensor], bool]:
        """A function that takes a whole tensor of one matrix as vLLM's loaders above do, or says False where vLLM would not call them.

        parameter: weight or weight_scale. Scales may be read as late as the group's `copy_now`.
        """
        parameters = self.layer._parameters
        loader, take = {
            "weight": (self.load_weight, self._take_weight),
            "weight_scale": (self.load_scale, self._take_scale),
        }[parameter]

        def take_if_vllm_would(loaded: torch.Tensor) -> bool:
            # vLLM puts loaders of its own around these, and other parameters into the layer, while it reloads a checkpoint.
            if getattr(parameters[parameter], "weight_loader", None) != loader:
                return False
            take(number, loaded, self.group)
            return True

        return take_if_vllm_would

    def forget(self) -> None:
        """Of what arrived since the last `finish`; the storage holds a part of it."""
        self.in_cycle = self.is_poisoned = False
        self._received.clear()

    def finish(self) -> None:
        """Called once after all weights: raises JobError for what is missing, misshapen or not finite.

        Before the first load (vLLM starts VeRL's rollout on dummy weights) there is nothing to check: the trainer
        sends every weight before the first sample, and the call after that checks it.
        """
        try:
            self._finish()
        except JobError:
            # vLLM asks no further layer, and what they have must not count for the next sync.
            self.group.give_up()
            raise

    def _finish(self) -> None:
        began, received = self.in_cycle, self._received
        self.in_cycle, self._received = False, set()
        if self.faults:
            raise JobError(f"weight sync failed: {'; '.join(self.faults)}")
        if not (began or self.ever_loaded or self.is_poisoned):
            self._started_on_dummy_weights = True
            self._fill_with_dummy_weights()
            self._forget_places()
            return
        missing = [] if len(received) == len(_PARTS) * len(self.shards) else self._missing(received)
        if missing := missing or self.group.missing_others():
            raise JobError(f"weight sync incomplete: {', '.join(missing)} was not received by the rollout")
        if self._started_on_dummy_weights and not handshake.trainer_has_asked():
            raise JobError(
                "the rollout runs jetrl's FP8 layers but the trainer never asked for its precision graph, so it would train "
                "in another precision; set actor_rollout_ref.model.external_lib=jetrl.integrations.verl and an FSDP strategy"
            )
        self.ever_loaded = True
        if not self.group.is_finite(self) and (names := self._names_not_finite()):
            raise JobError(f"weight sync failed: {', '.join(names)} holds NaN or Inf")
        if self._places_may_be_temporary or self._places_at != self._storage():
            self._forget_places()

    def _forget_places(self) -> None:
        """They would keep memory that vLLM moves the layer out of."""
        self._places, self._places_at, self._places_may_be_temporary = [], None, False

    def _missing(self, received: set[tuple[int, str]]) -> list[str]:
        parts = {shard.name: [p for p in _PARTS if (i, p) not in received] for i, shard in enumerate(self.shards)}
        whole = [name for name, missing in parts.items() if len(missing) == len(_PARTS)]
        return whole + [f"{name} ({part})" for name, missing in parts.items() if name not in whole for part in missing]

    def _name(self, numbers: list[int]) -> str:
        return ", ".join(self.shards[i].name for i in numbers)

    def _stacked(self, numbers: list[int]) -> tuple[int, int]:
        """Shape of the named matrices, whole and stacked along rows."""
        return sum(self.shards[i].full[0] for i in numbers), self.shards[numbers[0]].full[1]

    def _fits(self, what: str, numbers: list[int], loaded: torch.Tensor, want: tuple[int, int]) -> bool:
        if loaded.shape == want:
            return True
        shape = f"{what} of shape {tuple(loaded.shape)}"
        self.faults.append(f"{self._name(numbers)} arrived as {shape}, which does not fit the layer: it takes {want}")
        return False

    def _begin(self, group: ReceiverGroup, number: int, *parts: str) -> None:
        """Note the arrival of `parts`; poison `group` first where they open a new cycle.

        They do when nothing is open, and also when they were there already: then an earlier sync broke off without
        `finish`, and what it brought must not count for this one.
        """
        if self.layer._parameters["weight_scale"].is_meta:  # vLLM counts elements, nothing arrives
            return
        arrived = [(number, part) for part in parts]
        if not self._received.isdisjoint(arrived):
            group.start_again()
        elif not self.in_cycle and not self.is_poisoned:
            group.poison()
        self.group.arrived()
        self.in_cycle, self.is_poisoned = True, False
        self._received.update(arrived)

    def _take_weight(self, number: int, loaded: torch.Tensor, group: ReceiverGroup) -> None:
        if loaded.dtype == E4M3:
            if loaded.shape == self._packed_shapes[number]:
                codes, scale = parts(loaded, self.shards[number].full)
                scale_place = self._take_codes(group, number, codes, *_PARTS)
                self.group.copy_later(scale_place, self.shards[number].of_scale(scale))
            elif self._fits("FP8 codes", [number], loaded, self._codes_shapes[number]):
                self._take_codes(group, number, loaded, "codes")
        elif not loaded.is_floating_point():
            self.faults.append(f"{self.shards[number].name} arrived as {loaded.dtype}, not as a floating-point weight")
        elif self._fits("a weight", [number], loaded, self.shards[number].full):
            self._begin(group, number, *_PARTS)
            self._quantize(number, self.shards[number].of_weight(loaded))

    def _take_codes(self, group: ReceiverGroup, number: int, codes: torch.Tensor, *arrived: str) -> torch.Tensor:
        """The place of the scales."""
        self._begin(group, number, *arrived)
        _, place, scale_place = self._place(number)
        place.copy_(self.shards[number].of_codes(codes.view(torch.uint8)))
        return scale_place

    def _take_scale(self, number: int, loaded: torch.Tensor, group: ReceiverGroup) -> None:
        if loaded.dtype != torch.float32:
            name = self.shards[number].name
            self.faults.append(f"{name}.weight_scale arrived as {loaded.dtype}, not as torch.float32")
        elif self._fits("block scales", [number], loaded, self._scale_shapes[number]):
            self._begin(group, number, "scale")
            self.group.copy_later(self._place(number)[2], self.shards[number].of_scale(loaded))

    def _quantize(self, number: int, part: torch.Tensor) -> None:
        codes, _, scale = self._place(number)
        if codes.is_meta:
            codes.copy_(codes)  # copies are what vLLM counts
            scale.copy_(scale)
            return
        if part.device != codes.device:
            part = part.to(codes.device)
        if part.dtype not in (torch.bfloat16, torch.float32):
            part = part.to(torch.bfloat16)
        quantize_weight_into(part, self.scale_format, codes, scale)

    def _storage(self) -> tuple[int, int]:
        return self.layer._parameters["weight"].data_ptr(), self.layer._parameters["weight_scale"].data_ptr()

    def _place(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, the same as bytes (torch has few copy kernels for float8), and scales of one logical matrix in the layer."""
        if self._places_at != (storage := self._storage()):
            codes, scale, start = self.layer.weight.data, self.scale, 0
            self._places, self._places_at = [], storage
            for shard in self.shards:
                end = start + pad_to_tile(shard.rows)
                part = codes[start:end]
                self._places.append((part, part.view(torch.uint8), scale[start // TILE : end // TILE]))
                start = end
        return self._places[number]

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
        return [s.name for i, s in enumerate(self.shards) if not torch.isfinite(self._place(i)[2]).all()]
