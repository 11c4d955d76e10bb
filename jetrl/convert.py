"""Swap a model's linear layers for the shared FP8 layer, exactly where its precision graph says so."""

from dataclasses import dataclass, field

from torch import nn

from jetrl.linear import Float8Linear
from jetrl.precision.graph import PrecisionGraph


@dataclass
class ConversionReport:
    """What was swapped, and why the other linear layers were not. Names are canonical module paths."""

    swapped: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.swapped:
            return f"0 of {len(self.kept)} linear layers run in FP8"
        reasons: dict[str, list[str]] = {}
        for name, reason in self.kept.items():
            reasons.setdefault(reason, []).append(name)
        kept = "; ".join(f"{len(names)} kept ({reason}: {_abbreviate(names)})" for reason, names in reasons.items())
        return f"{len(self.swapped)} linear layers run in FP8" + (f"; {kept}" if kept else "")


def convert(model: nn.Module, graph: PrecisionGraph) -> ConversionReport:
    """Swap in place. Raises ValueError where the graph wants FP8 for something that is no linear layer of the model."""
    report = ConversionReport()
    wanted = {name: fmt for name in graph.linear_names() if (fmt := graph.linear_format(name)) and fmt.is_fp8}
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        fmt = wanted.pop(name, None)
        if fmt is None:
            report.kept[name] = "BF16 in the precision graph"
        else:
            Float8Linear.from_linear(module, fmt)
            report.swapped.append(name)
    if wanted:
        raise ValueError(
            f"the precision graph assigns FP8 to {', '.join(sorted(wanted))}, which the model does not have"
        )
    return report


def _abbreviate(names: list[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, …"
