"""The trainer's fused activation flow: what lies between two FP8 GEMMs of a decoder layer is one kernel where it can be.

A norm's output exists as FP8 codes only, quantized once for q, k and v (and for gate and up); SiLU-mul feeds the down
projection and attention's output the o projection in the same way. Forward bits are those of the unfused composition of
the same operators. `fuse` replaces the forward of the decoder layers that it recognises and says why not for the others.
A unified rollout computes every RMSNorm through jetrl.rms_norm, beside linears that stay in BF16 as well, so every norm
outside fused layers is recognised by itself and does the same.
"""

from dataclasses import dataclass, field

from torch import nn

from jetrl.fusion.layer import swap_layer
from jetrl.fusion.norm import swap_norm
from jetrl.fusion.recognise import why_norm_not_shared, why_not_fused
from jetrl.linear import Float8Linear
from jetrl.precision.hf_parts import is_norm
from jetrl.weight_cache import CachePolicy


@dataclass
class FusionReport:
    """fused: names of the fused layers; kept: name -> why a layer with FP8 linears keeps its own forward.

    norms: names of the norms outside fused layers that compute through jetrl.rms_norm; stock_norms: name -> why one does not.
    """

    fused: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    norms: list[str] = field(default_factory=list)
    stock_norms: dict[str, str] = field(default_factory=dict)


def fuse(model: nn.Module, policy: CachePolicy) -> FusionReport:
    """Fuse every decoder layer of `model` (a Hugging Face causal LM with Float8Linear layers) that can be, in place.

    Every RMSNorm outside these layers that computes what jetrl.rms_norm computes does so through it.
    """
    report = FusionReport()
    for name, layer in list(model.named_modules()):
        if "self_attn" not in dict(layer.named_children()) or not _has_fp8(layer):
            continue
        reason = why_not_fused(layer, model.config)
        if reason is None:
            swap_layer(layer, policy)
            report.fused.append(name)
        else:
            report.kept[name] = reason
    inside = tuple(f"{name}." for name in report.fused)
    for name, module in model.named_modules():
        if not is_norm(module) or name.startswith(inside):
            continue
        reason = why_norm_not_shared(module)
        if reason is None:
            swap_norm(module)
            report.norms.append(name)
        else:
            report.stock_norms[name] = reason
    return report


def _has_fp8(layer: nn.Module) -> bool:
    return any(isinstance(m, Float8Linear) for m in layer.modules())
