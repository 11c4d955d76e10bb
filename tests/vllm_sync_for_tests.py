"""Weight syncs into a vLLM model built in this process: what a trainer sends by either wire, whole or at fault, and what is stored."""

import torch
from checkpoints_for_tests import build_model

from jetrl.integrations.verl.wire import quantized_on_the_way
from jetrl.packed_weight import parts
from jetrl.weight_bundle import bundled

K1 = "model.layers.1.self_attn.k_proj"


def sync(model, model_config, items, buckets: int = 1) -> None:
    """What VeRL's worker extension does: load_weights per bucket, then post-processing once."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    items = list(items)
    for i in range(buckets):
        model.load_weights(items[i * len(items) // buckets : (i + 1) * len(items) // buckets])
    process_weights_after_loading(model, model_config, torch.device("cpu"))


def state_of(architecture: str, seed: int = 0) -> dict[str, torch.Tensor]:
    return {n: w.to(torch.bfloat16) for n, w in build_model(architecture, seed).state_dict().items()}


def packed_wire(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The weights as jetrl's own trainer makes them; it sends them in bundles."""
    matrices = {n.removesuffix(".weight"): "fp32" for n in state if n.endswith("_proj.weight")}
    return list(quantized_on_the_way(iter(state.items()), matrices, "cpu"))


def bundled_wire(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return list(bundled(packed_wire(state)))


def fp8_wire(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The same with scales in tensors of their own."""
    found = []
    for name, tensor in packed_wire(state):
        if tensor.dtype != torch.float8_e4m3fn:
            found.append((name, tensor))
            continue
        codes, scale = parts(tensor, state[name].shape)
        found += [(name, codes), (f"{name}_scale", scale)]
    return found


def stored(model) -> dict[str, bytes]:
    return {
        n: p.data.contiguous().view(torch.uint8).numpy().tobytes()
        for n, p in model.named_parameters()
        if "_proj.weight" in n
    }


def without(items, name):
    return [(n, t) for n, t in items if n != name]


def changed(items, name, change):
    return [(n, change(t) if n == name else t) for n, t in items]
