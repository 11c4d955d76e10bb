"""Reads what a live vLLM linear layer does, whatever quantization method is active in it.

Formats come from the method's own quantization keys and from the kernel it selected, never from the name the user gave
to `quantization`. A method without such facts is not described: the caller lists the layer as unclassified.
"""

from dataclasses import dataclass

import torch
from torch import nn

from jetrl.precision.formats import BF16, LinearFormat, TensorFormat, format_of_dtype
from jetrl.precision.layout import Linear

# (rows, columns) of a vLLM quantization group; -1 spans the dimension.
_ACTIVATION_GROUPS = {(1, 128): "tile_1x128", (-1, -1): "tensor", (1, -1): "token"}
_WEIGHT_GROUPS = {(128, 128): "block_128x128", (-1, -1): "tensor", (-1, 1): "channel", (1, -1): "channel"}


@dataclass(frozen=True)
class MergedStorage:
    """How one vLLM layer stores its logical matrices: rows of each on this rank, and whether blocks may span two."""

    name: str
    members: tuple[str, ...]
    rows: tuple[int, ...]
    method: str
    blocks_per_member: bool


def describe_linear(
    name: str, layer: nn.Module, members: list[str], carrier: TensorFormat
) -> tuple[list[Linear], MergedStorage] | None:
    """The logical matrices of one vLLM LinearBase layer.

    name: the layer's path; members: canonical names of its logical matrices, in storage order. Returns None where the
    quantization method cannot be described.
    """
    method = layer.quant_method
    method_name = type(method).__name__
    formats = getattr(method, "formats", None)
    outputs = list(getattr(layer, "output_sizes", [layer.output_size]))
    if len(outputs) != len(members):
        return None
    outputs = _logical_rows(layer, outputs)
    if isinstance(formats, dict):
        if not set(members) <= set(formats):
            return None
        chosen, quantizer = [formats[m] for m in members], "jetrl"
        source = [BF16 if fmt.is_fp8 else carrier for fmt in chosen]
    else:
        fmt = _foreign_format(method, layer, carrier)
        if fmt is None:
            return None
        chosen, quantizer = [fmt] * len(members), "vllm"
        source = [format_of_dtype(getattr(layer, "orig_dtype", None) or layer.params_dtype)] * len(members)
    bias = getattr(layer, "bias", None) is not None
    linears = [
        Linear(member, (rows, layer.input_size), fmt, bias, quantizer, src)
        for member, rows, fmt, src in zip(members, outputs, chosen, source, strict=True)
    ]
    rows = tuple(layer.output_partition_sizes)
    return linears, MergedStorage(name, tuple(members), rows, method_name, isinstance(formats, dict))


def _logical_rows(layer: nn.Module, outputs: list[int]) -> list[int]:
    """Full row counts; where ranks hold copies of KV heads, `output_sizes` counts the copies."""
    replicas = getattr(layer, "num_kv_head_replicas", 1)
    return [outputs[0], *(rows // replicas for rows in outputs[1:])]


def _foreign_format(method: object, layer: nn.Module, carrier: TensorFormat) -> LinearFormat | None:
    if type(method).__name__ == "UnquantizedLinearMethod":
        return LinearFormat.unquantized(carrier)
    weight_key, activation_key = (getattr(method, f"{side}_quant_key", None) for side in ("weight", "activation"))
    kernel = getattr(method, "fp8_linear", None)
    if weight_key is None or kernel is None or weight_key.dtype != torch.float8_e4m3fn:
        return None
    weight_granularity = _WEIGHT_GROUPS.get(tuple(weight_key.scale.group_shape))
    if weight_granularity is None:
        return None
    scale_format = "pow2" if _rounds_scales_to_pow2(kernel) else "fp32"
    weight = TensorFormat("e4m3", weight_granularity, scale_format)
    if _is_weight_only(kernel):
        x = carrier
    else:
        granularity = activation_key and _ACTIVATION_GROUPS.get(tuple(activation_key.scale.group_shape))
        if granularity is None or activation_key.dtype != torch.float8_e4m3fn:
            return None
        x = TensorFormat("e4m3", granularity, scale_format)
    return LinearFormat(x, weight, carrier, carrier, carrier)


def _rounds_scales_to_pow2(kernel: object) -> bool:
    """DeepGEMM kernels carry their decision; the kernel that switches by batch size carries it in its fallback."""
    for candidate in (kernel, getattr(kernel, "fallback", None)):
        if getattr(candidate, "use_deep_gemm_e8m0", False):
            return True
    return False


def _is_weight_only(kernel: object) -> bool:
    """Kernels that multiply BF16 activations with FP8 weights."""
    return getattr(kernel, "apply_input_quant", True) is False or "Marlin" in type(kernel).__name__
