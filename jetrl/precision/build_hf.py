"""Precision graphs of a Hugging Face causal LM: declared for an assignment, or read off a converted model."""

import copy
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from jetrl.precision.backward import BackwardWiring
from jetrl.precision.flow import PrecisionAssignment
from jetrl.precision.formats import BF16, LinearFormat, TensorFormat, format_of_dtype, fp8_block, fp8_tile
from jetrl.precision.graph import PrecisionGraph
from jetrl.precision.hf_parts import HuggingFaceParts
from jetrl.precision.kernels import with_kernels
from jetrl.precision.layout import Decoder, Linear
from jetrl.precision.patterns import kept_unquantized
from jetrl.precision.wiring import ForwardWiring

# vLLM's block FP8 rounds scales up to powers of two on Hopper unless VLLM_USE_DEEP_GEMM_E8M0=0.
VLLM_FP8_SCALE_FORMAT = "pow2"


def build_training_graph(
    model: nn.Module,
    assignment: PrecisionAssignment | None,
    *,
    carrier: TensorFormat = BF16,
    master: TensorFormat | None = None,
) -> PrecisionGraph:
    """Forward, saved tensors, backward and optimizer of `model` under `assignment`.

    assignment None reads each linear's format off the model as it is now (jetrl's converted layers carry theirs).
    carrier: format of unquantized tensors in the forward (BF16; FP32 where nothing is autocast). master: what the
    optimizer owns; default the dtype of the model's parameters.
    """
    decoder = _decoder(model, assignment, carrier, master, "train")
    formats = {linear.name: linear.format for linear in _linears(decoder)}
    forward = _forward(decoder, assignment)
    return BackwardWiring(forward, formats, carrier, decoder.master).graph()


def build_inference_graph(
    model: nn.Module,
    assignment: PrecisionAssignment | None,
    *,
    carrier: TensorFormat = BF16,
    kv: TensorFormat | None = None,
) -> PrecisionGraph:
    """The forward graph that a rollout of `model` under `assignment` declares. kv: of the KV cache, default carrier."""
    return _forward(_decoder(model, assignment, carrier, None, "rollout", kv), assignment)


def _forward(decoder: Decoder, assignment: PrecisionAssignment | None) -> PrecisionGraph:
    graph = ForwardWiring(decoder).graph()
    return with_kernels(graph) if assignment is not None and assignment.exact else graph


def declare_from_config(
    hf_config,
    assignment: PrecisionAssignment,
    *,
    training: bool = False,
    carrier: TensorFormat = BF16,
    master: TensorFormat | None = None,
) -> PrecisionGraph:
    """The graph of a model that exists only as a Hugging Face config: built on the meta device, no weights.

    training: the whole training graph, else the forward alone (what a rollout declares).
    """
    model = meta_model(hf_config)
    if training:
        return build_training_graph(model, assignment, carrier=carrier, master=master)
    return build_inference_graph(model, assignment, carrier=carrier)


def meta_model(hf_config) -> nn.Module:
    """The causal LM of a Hugging Face config on the meta device."""
    config = copy.deepcopy(hf_config)
    # A quantization section describes the rollout, and would make transformers look for its own quantized layers.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def _decoder(
    model: nn.Module,
    assignment: PrecisionAssignment | None,
    carrier: TensorFormat,
    master: TensorFormat | None,
    side: str,
    kv: TensorFormat | None = None,
) -> Decoder:
    reasons: dict[str, str] = {}
    if assignment is not None:
        names, always = _quantizable(model)
        reasons = kept_unquantized(names, assignment, model.config.num_hidden_layers, always, side)

    def make_linear(name: str, module: nn.Module) -> Linear:
        shape, bias = (module.out_features, module.in_features), module.bias is not None
        if assignment is None:
            fmt = getattr(module, "format", None) or LinearFormat.unquantized(carrier)
            return Linear(name, shape, fmt, bias, source=BF16 if fmt.is_fp8 else carrier)
        if name in reasons:
            return Linear(name, shape, LinearFormat.unquantized(carrier), bias, source=carrier)
        if assignment.linear == "vllm_fp8":
            s = VLLM_FP8_SCALE_FORMAT
            fmt = LinearFormat(fp8_tile(s), fp8_block(s), carrier, carrier, carrier)
            return Linear(name, shape, fmt, bias, quantizer="vllm", source=carrier)
        fmt = LinearFormat.fp8_blockwise(assignment.scale_format, assignment.wgrad, carrier)
        return Linear(name, shape, fmt, bias, source=BF16)

    if master is None:
        master = format_of_dtype(next(model.parameters()).dtype)
    meta = {
        "engine": "huggingface",
        "side": side,
        "model_type": model.config.model_type,
        "num_layers": model.config.num_hidden_layers,
        "kept_unquantized": reasons,
    }
    if assignment is not None:
        meta["assignment"] = assignment_to_dict(assignment)
    decoder = HuggingFaceParts(model, make_linear, carrier, kv=kv or carrier).decoder(master, meta)
    meta["unclassified"] = list(decoder.unclassified)
    return decoder


def _quantizable(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Canonical names of all linears, and those never quantized with the reason."""
    head = model.get_output_embeddings()
    names, always = [], {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        names.append(name)
        if module is head:
            always[name] = "lm_head stays unquantized"
        elif name.rsplit(".", 1)[-1] in ("gate", "router"):
            always[name] = "the router stays unquantized"
    return names, always


def _linears(decoder: Decoder) -> Sequence[Linear]:
    found = [linear for layer in decoder.layers for linear in layer.linears()]
    found += [part for part in decoder.loose if isinstance(part, Linear)]
    return found + ([decoder.lm_head] if decoder.lm_head else [])


def assignment_to_dict(assignment: PrecisionAssignment) -> dict:
    data = asdict(assignment)
    data["exclude"] = list(data["exclude"])
    return data
