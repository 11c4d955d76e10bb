"""FP8 copies of weights, kept while the weights stay the same.

A weight is the same in all micro-batches of an optimizer step, so its codes can be made once per step, where memory allows
one byte a parameter for fprop and one for dgrad. Who changes weights says so: `weights_changed()` starts a new generation
and frees every copy of the old one. Nothing is kept before the first such call, so a program that never calls it gets
codes made from the weights in every pass and can hold none that are stale. What changes weights without a call:

- an optimizer's step, a `load_state_dict` of the model or of a part of it (`watch_loads`): every copy is dropped;
- other storage (`param.data = x`, `load_state_dict(assign=True)`, moves between devices, storage that FSDP makes anew):
  copies belong to the storage they were made from, and FSDP gathers into the same one in every pass;
- a change in place of a parameter of its own, by its version counter. What FSDP gathers counts no versions.

A write through an alias that hides it from the counter (`param.data.mul_(2)`) cannot be seen: it has to be announced.

Copies are attributes of no module: they are in no state_dict, and neither copied nor saved with a model.
"""

import logging
import weakref
from collections.abc import Sequence

import jetrl_kernels.ops  # noqa: F401  (registers torch.ops.jetrl)
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from jetrl.errors import UserError
from jetrl.settings import WEIGHT_CACHES

# `auto` keeps copies that fit into this part of the memory which is free when the first one of a generation is made:
# activations are still to come, and the copies live until the next one.
AUTO_SHARE = 0.15
# Before the first optimizer step its state is not allocated yet, and the free memory is not what it seems.
FIRST_AUTO_GENERATION = 2

_log = logging.getLogger("jetrl")
_generation = 0
_moves = 0
_holders: "weakref.WeakSet[WeightCodes]" = weakref.WeakSet()


def weights_changed(moved: bool = False) -> None:
    """Drop every kept copy: call it after an optimizer step, a load, and when weights move to or from the CPU.

    moved: they only moved, which an offloading job does before its first optimizer step as well.
    """
    global _generation, _moves
    _generation += 1
    _moves += moved
    _drop()


def watch_loads(module: nn.Module) -> None:
    """Drop every kept copy when `module`, or a module around it, loads a state_dict."""
    module.register_load_state_dict_post_hook(_drop)


def _drop(*_) -> None:
    for holder in list(_holders):
        holder.clear()


# No generation begins with it: `auto` counts steps that the job announces, and this one may be another model's.
register_optimizer_step_post_hook(_drop)


class CachePolicy:
    """One model's choice: "step" (from one `weights_changed` to the next), "micro_batch" (codes are made in each pass) or
    "auto", which is one of the two for each generation, by the memory that is free when it begins.

    `decided` is the current one, None before any. Raises UserError for another choice.
    """

    def __init__(self, choice: str = "auto") -> None:
        if choice not in WEIGHT_CACHES:
            raise UserError(f"weight_cache={choice} is unknown; allowed: {', '.join(WEIGHT_CACHES)}")
        self.choice = choice
        self.decided: str | None = None if choice == "auto" else choice
        self.elements = 0
        self._decided_for = 0

    def keeps(self, device: torch.device) -> bool:
        if _generation == 0:
            return False
        if self.choice == "auto" and self._decided_for != _generation:
            before, self._decided_for = self.decided, _generation
            self.decided, why = self._decide(device)
            if self.decided != before:
                _log.info("weight_cache=auto: %s (%s)", self.decided, why)
        return self.decided == "step"

    def _decide(self, device: torch.device) -> tuple[str, str]:
        size = 2 * self.elements
        if _generation - _moves < FIRST_AUTO_GENERATION:
            return "micro_batch", "before the first optimizer step"
        if device.type != "cuda":
            return "step", f"{size / 2**30:.2f} GiB of FP8 copies in host memory"
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + held
        why = f"{size / 2**30:.1f} GiB of FP8 copies, {free / 2**30:.1f} GiB of GPU memory free"
        return ("step" if size <= AUTO_SHARE * free else "micro_batch"), why


class WeightCodes:
    """The codes of one weight, or of several over the same input, stacked with each padded to 128 rows.

    The weights come with every call: under FSDP they exist only during a pass.
    """

    def __init__(self, scale_format: str, policy: CachePolicy) -> None:
        self.scale_format, self.policy = scale_format, policy
        self.clear()
        _holders.add(self)

    def clear(self) -> None:
        self._kept: dict[str, tuple[tuple, tuple[torch.Tensor, torch.Tensor]]] = {}

    def __deepcopy__(self, memo: dict) -> "WeightCodes":
        return WeightCodes(self.scale_format, self.policy)

    def __getstate__(self) -> dict:
        return {"scale_format": self.scale_format, "policy": self.policy}

    def __setstate__(self, state: dict) -> None:
        self.__init__(**state)

    def for_fprop(self, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """codes (sum of N_i padded, K padded), scale: the same / 128."""
        return self._get("fprop", weights)

    def for_dgrad(self, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The transpose: codes (K padded, sum of N_i padded), scale."""
        return self._get("dgrad", weights)

    def _get(self, use: str, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        keep = self.policy.keeps(weights[0].device)
        key = (_generation, *(_identity(w) for w in weights)) if keep else None
        kept = self._kept.get(use)
        if keep and kept is not None and kept[0] == key:
            return kept[1]
        codes = _quantize(use, weights, self.scale_format)
        if keep:
            self._kept[use] = (key, codes)
        return codes


def _identity(weight: torch.Tensor) -> tuple:
    """Equal for one weight whose values are the same. A storage's reference keeps its address from being given to another."""
    version = weight._version if isinstance(weight, nn.Parameter) and not weight.is_inference() else -1
    return StorageWeakRef(weight.untyped_storage()), weight.storage_offset(), version


def _quantize(use: str, weights: Sequence[torch.Tensor], scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.jetrl.quantize_blocks_stacked([w.detach() for w in weights], scale_format, use == "dgrad")
