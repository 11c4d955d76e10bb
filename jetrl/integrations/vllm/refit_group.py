"""What the layers of one model do together in a weight sync, so that the host does it once and not once a layer.

A refit waits for the host: on an H200 the bytes of an 8B model take a third of the time that some hundred small torch calls
per layer take. Here are the ones that need no layer of their own: poison, the check at the end, and the copies of scales.
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jetrl.integrations.vllm.refit import WeightReceiver


class ReceiverGroup:
    """The receivers of one model, or a receiver by itself as long as its model is not known (see refit_plan.py)."""

    def __init__(self, receivers: list["WeightReceiver"]) -> None:
        self._receivers = receivers
        self._finite: dict[WeightReceiver, bool] = {}
        self._later: dict[tuple[torch.dtype, bool], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        # Parameters beside these layers' matrices that every sync brings, and those that have come since the last check.
        self._others: frozenset[str] = frozenset()
        self._others_loaded: set[str] | None = set()

    def expect(self, others: frozenset[str]) -> None:
        self._others = others

    def loaded(self, names: set[str]) -> None:
        """Names of parameters that one call of the model's load_weights has brought."""
        if self._others_loaded is not None:
            self._others_loaded |= names

    def missing_others(self) -> list[str]:
        """Asked by every layer after a sync, answered once: what never came of the norms, embeddings and biases."""
        loaded, self._others_loaded = self._others_loaded, set()
        return sorted(self._others - loaded) if loaded else []

    def poison(self) -> None:
        """NaN into all scales of every layer that has nothing of an open cycle and is not poisoned yet."""
        idle = [r for r in self._receivers if not (r.in_cycle or r.is_poisoned or r.scale.is_meta)]
        # Not fill_: there is no fill of many tensors in one call, and NaN plus anything is NaN.
        _for_each_device(torch._foreach_add_, [r.scale for r in idle], float("nan"))
        for receiver in idle:
            receiver.is_poisoned = True

    def start_again(self) -> None:
        """Forget what arrived since the last `finish`, and poison it."""
        self.copy_now()
        self._others_loaded = None  # which of them came in this sync is not known
        for receiver in self._receivers:
            receiver.forget()
            receiver.faults.clear()
        self.poison()

    def give_up(self) -> None:
        """The sync failed: nothing of it counts for the next one."""
        self._others_loaded = set()
        for receiver in self._receivers:
            receiver.forget()
            receiver.faults.clear()

    def arrived(self) -> None:
        """Something arrived: what `is_finite` has found is out of date."""
        if self._finite:
            self._finite = {}

    def is_finite(self, receiver: "WeightReceiver") -> bool:
        """Whether all scales of a layer are; False also where their sum is not. One wait for the device answers for all layers."""
        if receiver not in self._finite:
            here = [r for r in self._receivers if not r.scale.is_meta]
            # Scales are positive, and neither NaN nor Inf is lost in a sum.
            sums = _for_each_device(torch._foreach_norm, [r.scale for r in here], 1)
            self._finite = dict(zip(here, _are_finite(sums), strict=True))
        return self._finite.pop(receiver, False)

    def copy_later(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """For tensors so small that the call costs more than the copy. `source` must last until `copy_now`."""
        if target.is_meta:
            target.copy_(source)  # vLLM counts such copies
            return
        targets, sources = self._later.setdefault((target.dtype, source.is_contiguous()), ([], []))
        targets.append(target)
        sources.append(source)

    def copy_now(self) -> None:
        later, self._later = self._later, {}
        # CUDA has one launch for many copies only where all are of one dtype, and laid out like their targets.
        for targets, sources in later.values():
            torch._foreach_copy_(targets, sources)


def _for_each_device(operator, tensors: list[torch.Tensor], argument: float) -> list[torch.Tensor]:
    """Results in the order of `tensors`. vLLM's CPU offloading leaves some layers on another device."""
    if len({t.device for t in tensors}) == 1:
        return operator(tensors, argument)
    return [result for t in tensors for result in operator([t], argument) or [t]]


def _are_finite(values: list[torch.Tensor]) -> list[bool]:
    if len({v.device for v in values}) == 1:
        return torch.isfinite(torch.stack(values)).tolist()
    return [bool(torch.isfinite(v)) for v in values]
