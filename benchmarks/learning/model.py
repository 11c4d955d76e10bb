"""The model and the precision variants of the learning comparison."""

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from jetrl.convert import convert
from jetrl.precision.build_hf import build_training_graph
from jetrl.precision.flow import PrecisionAssignment
from jetrl.small_qwen3 import Size, qwen3_config

from . import stream

# BF16 from weights of which one differs in its last bit: how far two runs come apart that no one calls different.
NUDGED = "bf16 nudged"
# Training settings of each variant; "fp32" is the reference of the gradients, not a flow.
VARIANTS = {
    "bf16": PrecisionAssignment(),
    NUDGED: PrecisionAssignment(),
    "unified_fp8": PrecisionAssignment(linear="fp8"),
    "unified_fp8_pow2": PrecisionAssignment(linear="fp8", scale_format="pow2"),
    "unified_fp8 wgrad=bf16": PrecisionAssignment(linear="fp8", wgrad="bf16"),
    "unified_fp8 wgrad=copy": PrecisionAssignment(linear="fp8", wgrad="copy"),
    "unified_fp8 wgrad=blocks": PrecisionAssignment(linear="fp8", wgrad="blocks"),
}


# `full` has 101 million parameters, all but 0.5 million of them in FP8 linear layers.
SIZES = {"full": Size(1024, 3072, 8, 8, 4, 128), "tiny": Size(128, 256, 2, 2, 1)}


def config(size: Size, length: int) -> Qwen3Config:
    return qwen3_config(size, stream.VOCABULARY, length)


def initial_weights(size: Size, length: int, seed: int) -> dict[str, torch.Tensor]:
    """float32 weights on the CPU, as Hugging Face initialises them; the same for every variant."""
    torch.manual_seed(seed)
    return {name: weight.float() for name, weight in Qwen3ForCausalLM(config(size, length)).state_dict().items()}


def nudged(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with the first weight of the final norm, 1 at the start, one BF16 step higher."""
    norm = weights["model.norm.weight"].clone()
    norm[0] += 2**-7
    return {**weights, "model.norm.weight": norm}


def build(size: Size, length: int, variant: str, weights: dict[str, torch.Tensor], device: str) -> nn.Module:
    """A Hugging Face Qwen3 in BF16 ("fp32": float32) with bf16(weights), converted by jetrl as the variant says."""
    dtype = torch.float32 if variant == "fp32" else torch.bfloat16
    with torch.device(device):
        model = Qwen3ForCausalLM(config(size, length)).to(dtype)
    model.load_state_dict({name: weight.to(torch.bfloat16) for name, weight in weights.items()})
    if variant not in ("fp32", "bf16", NUDGED):
        report = convert(model, build_training_graph(model, VARIANTS[variant]), weight_cache="micro_batch")
        print(f"{variant}: {report}", flush=True)
    return model.train()


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per byte, float32. tokens (rows, length + 1)."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
