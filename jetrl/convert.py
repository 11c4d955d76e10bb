"""Swap a model's linear layers for the shared FP8 layer, exactly where its precision graph says so, and fuse around them."""

from dataclasses import dataclass, field

from torch import nn

from jetrl.fusion import FusionReport, fuse
from jetrl.fusion.stock import stock_forward
from jetrl.linear import Float8Linear
from jetrl.precision.graph import PrecisionGraph
from jetrl.weight_cache import CachePolicy, watch_loads

__all__ = ["ConversionReport", "convert", "stock_forward"]


@dataclass
class ConversionReport:
    """What was swapped, and why the other linear layers were not. Names are canonical module paths.

    fusion: which decoder layers are fused, and why others are not; cache: when the weights' codes are kept.
    """

    swapped: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    fusion: FusionReport = field(default_factory=FusionReport)
    cache: CachePolicy | None = None

    def __str__(self) -> str:
        if not self.swapped:
            return f"0 of {len(self.kept)} linear layers run in FP8"
        kept = "; ".join(
            f"{len(names)} kept ({reason}: {_abbreviate(names)})" for reason, names in _by_reason(self.kept)
        )
        text = f"{len(self.swapped)} linear layers run in FP8" + (f"; {kept}" if kept else "")
        if self.fusion.fused:
            text += f"; {len(self.fusion.fused)} decoder layers fused"
        for reason, names in _by_reason(self.fusion.kept):
            text += f"; {len(names)} decoder layers not fused ({reason}: {_abbreviate(names)})"
        for reason, names in _by_reason(self.fusion.stock_norms):
            text += f"; {len(names)} norms not shared with the rollout ({reason}: {_abbreviate(names)})"
        return text


def convert(
    model: nn.Module, graph: PrecisionGraph, *, weight_cache: str = "auto", fuse_layers: bool = True
) -> ConversionReport:
    """Swap in place, then fuse the decoder layers that are recognised (jetrl.fusion).

    weight_cache: "auto", "step" or "micro_batch" (jetrl.weight_cache). fuse_layers: False leaves every forward outside the
    linear layers as it is. Raises ValueError where the graph wants FP8 for something that is no linear layer of the
    model, UserError for an unknown weight_cache.
    """
    policy = CachePolicy(weight_cache)
    report = ConversionReport(cache=policy)
    wanted = {name: fmt for name in graph.linear_names() if (fmt := graph.linear_format(name)) and fmt.is_fp8}
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        fmt = wanted.pop(name, None)
        if fmt is None:
            report.kept[name] = "BF16 in the precision graph"
        else:
            Float8Linear.from_linear(module, fmt, policy)
            watch_loads(module)
            report.swapped.append(name)
    if wanted:
        raise ValueError(
            f"the precision graph assigns FP8 to {', '.join(sorted(wanted))}, which the model does not have"
        )
    # Also where every linear layer is excluded: the rollout of such a flow shares its norms all the same.
    if fuse_layers and (report.swapped or graph.meta.get("assignment", {}).get("linear") == "fp8"):
        report.fusion = fuse(model, policy)
    return report


def _by_reason(kept: dict[str, str]) -> list[tuple[str, list[str]]]:
    reasons: dict[str, list[str]] = {}
    for name, reason in kept.items():
        reasons.setdefault(reason, []).append(name)
    return list(reasons.items())


def _abbreviate(names: list[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, …"
