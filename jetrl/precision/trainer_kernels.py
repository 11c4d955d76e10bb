"""Which kernels a live, converted Hugging Face trainer runs, in the words of kernels.py."""

from collections.abc import Callable

from torch import nn

from jetrl.attention.choice import EXACT as EXACT_ATTENTION
from jetrl.attention.rotary_table import share_rotary_table
from jetrl.errors import UserError
from jetrl.precision import kernels
from jetrl.precision.graph import Operator, PrecisionGraph
from jetrl.precision.hf_parts import is_rotary

# Kinds of operators that a fused decoder layer computes with the shared kernels.
_FUSED = {"norm", "rotary", "linear", "activation", "residual_add"}


def trainer_kernels(model: nn.Module) -> Callable[[Operator], str | None]:
    """model: after convert(). What it returns for an operator is None where the prescribed kernel runs."""
    fused = tuple(f"{name}." for name, module in model.named_modules() if hasattr(module, "jetrl_steps"))
    tables = all(hasattr(m, "jetrl_table") for m in model.modules() if is_rotary(m))
    attention = model.config._attn_implementation

    def kernel_of(operator: Operator) -> str | None:
        if operator.kind == "attention":
            return None if attention in EXACT_ATTENTION.values() else f"transformers {attention}"
        if operator.kind == "rotary_table":
            return None if tables else "transformers rotary embedding"
        if operator.kind in _FUSED and not operator.name.startswith(fused or "\0"):
            module = model.get_submodule(operator.name) if operator.kind == "norm" else None
            if module is None or not _is_shared_norm(module):
                return "transformers"
        return None

    return kernel_of


def _is_shared_norm(module: nn.Module) -> bool:
    from jetrl.fusion.norm import _classes

    return type(module) in _classes.values()


def exact_graph(model: nn.Module, declared: PrecisionGraph) -> PrecisionGraph:
    """Give a converted model the shared rotary table, and return the graph of what it now runs.

    Raises UserError that names the first operator with another kernel than an exact flow prescribes.
    """
    share_rotary_table(model)
    graph = kernels.with_kernels(declared, trainer_kernels(model))
    for operator in graph.operators:
        wanted = kernels.EXACT.get(operator.kind)
        if operator.phase == "forward" and wanted and operator.definition != wanted:
            raise UserError(
                f"precision=unified_exact needs {wanted} for {operator.name}, and this trainer runs {operator.definition}; "
                f"use precision=unified_fp8"
            )
    return graph
