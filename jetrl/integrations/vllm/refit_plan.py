"""A model's `load_weights` for weight syncs: names looked up in one table, made once, instead of searched for in vLLM's.

vLLM finds a weight's place by walking the model's parameters, once a call, and trying its patterns on each name, which on
an 8B model takes longer than to move the bytes. The table holds the matrices of jetrl's layers under the names that the
trainer ships, and the norms. Everything else, and whatever vLLM has put another loader around, goes through vLLM's own.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from jetrl.integrations.vllm.refit_group import ReceiverGroup
from jetrl.weight_bundle import unbundled

_MARK = "jetrl_load_plan"


class LoadPlan:
    """The table of one model. Callable as its load_weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._stock: Callable = model.load_weights
        self._places: dict[str, tuple[str, Callable[[torch.Tensor], bool]]] = {}
        receivers, biases = [], set()
        for path, module in model.named_modules():
            receiver = getattr(module, "jetrl_receiver", None)
            if receiver is not None:
                receivers.append(receiver)
                if module._parameters.get("bias") is not None:
                    biases |= {f"{name}.bias" for name in receiver.names}
                for number, name in enumerate(receiver.names):
                    self._places[f"{name}.weight"] = f"{path}.weight", receiver.taker(number, "weight")
                    self._places[f"{name}.weight_scale"] = (
                        f"{path}.weight_scale",
                        receiver.taker(number, "weight_scale"),
                    )
            elif isinstance(module, RMSNorm) and "weight" in module._parameters:
                self._places[f"{path}.weight"] = f"{path}.weight", self._norm_taker(module)
        self._group = ReceiverGroup(receivers)
        for receiver in receivers:
            receiver.group = self._group
        # By the trainer's names: vLLM's own loader copies each into its part of a merged bias, and reports the whole.
        self._biases = frozenset(biases)
        self._group.expect(_others(model) | self._biases)

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As vLLM's: names of the parameters that were loaded. `weights` may come in bundles."""
        loaded: set[str] = set()
        biases: set[str] = set()
        rest = self._take(unbundled(weights), loaded, biases)
        first = next(rest, None)
        if first is not None:
            loaded |= self._stock(itertools.chain([first], rest)) or set()
        self._group.loaded(loaded | biases)
        return loaded

    def _take(
        self, weights: Iterable[tuple[str, torch.Tensor]], loaded: set[str], biases: set[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What is left for vLLM. Names of parameters go into `loaded`, and of biases on the way to vLLM into `biases`."""
        try:
            for name, tensor in weights:
                parameter, take = self._places.get(name, (name, None))
                if take is not None and take(tensor):
                    loaded.add(parameter)
                else:
                    if name in self._biases:
                        biases.add(name)
                    yield name, tensor
        finally:
            self._group.copy_now()

    def _norm_taker(self, module: RMSNorm) -> Callable[[torch.Tensor], bool]:
        def take(loaded: torch.Tensor) -> bool:
            weight = module._parameters["weight"]
            if hasattr(weight, "weight_loader") or weight.is_meta or weight.shape != loaded.shape:
                return False
            self._group.copy_later(weight.data, loaded)
            return True

        return take


def _others(model: torch.nn.Module) -> frozenset[str]:
    """Parameters that a trainer sends beside the layers' matrices and biases: norms, embeddings, an untied lm_head."""
    found = set()
    for path, module in model.named_modules():
        if isinstance(module, RMSNorm | VocabParallelEmbedding):
            found |= {f"{path}.{name}" for name in module._parameters if module._parameters[name] is not None}
    return frozenset(
        found.intersection(name for name, _ in model.named_parameters())
    )  # a tied lm_head has a name there, not two


def attach(model: torch.nn.Module) -> bool:
    """Give a model with jetrl's layers its table; whether it has one. Idempotent; other models stay as they are."""
    if not hasattr(model, _MARK) and any(hasattr(module, "jetrl_receiver") for module in model.modules()):
        setattr(model, _MARK, True)
        model.load_weights = LoadPlan(model)
    return hasattr(model, _MARK)
