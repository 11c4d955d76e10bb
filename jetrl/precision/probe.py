"""Records the operators that one forward really executes, in either engine, and compares them with a precision graph.

A dispatch mode sees every aten and custom op; module hooks say inside which module, and the trainer's fused decoder layers,
whose children are not called, name the operators that each step stands for (jetrl.fusion.trace). So a declared graph that differs
from what runs is found where it matters: in the formats that reached the GEMMs. log-softmax happens outside both models
and is not seen.
"""

import re
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from jetrl.fusion import trace
from jetrl.precision.formats import TensorFormat, format_of_dtype
from jetrl.precision.graph import Operator, PrecisionGraph

# Ops that multiply matrices, by the name after the namespace.
_GEMM = re.compile(
    r"(addmm|mm|bmm|baddbmm|matmul|linear|onednn_mm|onednn_scaled_mm|_?scaled_mm\w*|fp8_\w*mm\w*|fp8_gemm\w*|\w+_linear\w*)"
)
_ATTENTION = re.compile(r".*(attention|softmax).*")
# What a kind must have executed in its scope; None: any op will do (fused kernels have many names).
_EVIDENCE = {"embedding": None, "norm": None, "activation": None, "attention": _ATTENTION, "rotary": None}


@dataclass(frozen=True)
class Executed:
    """One op: the innermost module it ran in, its qualified name, dtypes of its tensor arguments, and FP8 facts.

    formats: for jetrl's GEMM, the formats of both operands, read off their scales.
    """

    scope: str
    op: str
    dtypes: tuple[str, ...]
    formats: tuple[TensorFormat, ...] = ()


class Probe(TorchDispatchMode):
    """Context manager around one forward of `model` (Hugging Face or vLLM, in this process and thread).

    with Probe(model) as probe:
        model(input_ids)
    differences = probe.differences(graph)
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.records: list[Executed] = []
        # Operator -> the scope of the step that computes it together with others.
        self.merged: dict[str, str] = {}
        self._stack: list[str] = []
        self._hooks: list = []

    def __enter__(self) -> "Probe":
        fused = tuple(f"{name}." for name, module in self.model.named_modules() if hasattr(module, "jetrl_steps"))
        for name, module in self.model.named_modules():
            if name and not name.startswith(fused):
                self._hooks.append(module.register_forward_pre_hook(lambda m, args, name=name: self._push(name)))
                self._hooks.append(module.register_forward_hook(lambda m, args, out: self._pop()))
        trace.listen(self)
        return super().__enter__()

    def __exit__(self, *exc) -> None:
        trace.listen(None)
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*exc)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        name = func._schema.name
        dtypes = tuple(str(t.dtype) for t in tensors)
        self.records.append(Executed(self._stack[-1] if self._stack else "", name, dtypes, _formats(name, args)))
        return out

    def _push(self, name: str) -> None:
        # A module that several layers share is registered under the first one's name.
        parent, _, leaf = name.rpartition(".")
        if self._stack and parent != self._stack[-1] and _layer(parent) not in (None, _layer(self._stack[-1])):
            name = f"{self._stack[-1]}.{leaf}"
        self._stack.append(name)

    def _pop(self) -> None:
        self._stack.pop()

    def enter(self, names: tuple[str, ...]) -> None:
        """trace.Listener: a fused step begins that computes these children of the layer it runs in."""
        layer = self._stack[-1]
        self.merged.update({f"{layer}.{name}": f"{layer}.{names[0]}" for name in names})
        self._stack.append(f"{layer}.{names[0]}")

    def leave(self) -> None:
        self._stack.pop()

    def differences(self, graph: PrecisionGraph) -> list[str]:
        """One sentence for everything that ran otherwise than `graph` declares; empty when they agree."""
        return Comparison(graph, self.records, self.merged).differences()


class Comparison:
    """Executed ops against a declared graph (its forward part)."""

    def __init__(self, graph: PrecisionGraph, records: list[Executed], merged: dict[str, str] | None = None) -> None:
        self.graph = graph.forward()
        self.by_scope: dict[str, list[Executed]] = {}
        for record in records:
            self.by_scope.setdefault(record.scope, []).append(record)
        self.storage = {m: group["name"] for group in self.graph.meta.get("merged", ()) for m in group["members"]}
        self.storage |= merged or {}

    def differences(self) -> list[str]:
        found, gemm_scopes, other_scopes = [], set(), set()
        for operator in self.graph.operators:
            if operator.kind in ("linear", "lm_head"):
                scope = self._linear_scope(operator)
                gemm_scopes.add(scope)
                found += self._linear(operator.name, scope)
            elif operator.kind in _EVIDENCE:
                found += self._evidence(operator)
                other_scopes.update(self._scopes(operator))
            elif operator.kind == "residual_add":
                found += self._residual(operator.name)
            if operator.kind in ("attention", "router", "experts"):
                gemm_scopes.update((operator.name, f"{operator.name}.attn"))
        return found + self._undeclared(gemm_scopes, other_scopes)

    def _linear_scope(self, operator: Operator) -> str:
        if operator.kind == "lm_head" and operator.name not in self.by_scope:
            return "logits_processor"  # vLLM computes logits there, without calling lm_head
        return self.storage.get(operator.name, operator.name)

    def _linear(self, name: str, scope: str) -> list[str]:
        declared = self.graph.linear_format(name)
        records = self.by_scope.get(scope, [])
        found = []
        for record in records:
            if record.op == "jetrl::gemm_nt":
                executed = record.formats
            elif _is_gemm(record):
                executed = tuple(_plain(dtype) for dtype in record.dtypes if dtype != "torch.int64")[-2:]
            else:
                continue
            found.append(executed)
        if not found:
            return [f"{name}: declared, but no matrix product ran in {scope}"]
        wanted = (declared.x, declared.weight)
        # An addmm lists the bias first; a weight rounded to FP32 carriers has one dtype, so only formats matter.
        return [
            f"{name}: declared x {wanted[0]}, weight {wanted[1]}; executed x {x}, weight {w}"
            for x, w in found
            if not _same((x, w), wanted)
        ]

    def _evidence(self, operator: Operator) -> list[str]:
        records = [r for scope in self._scopes(operator) for r in self.by_scope.get(scope, ())]
        pattern = _EVIDENCE[operator.kind]
        if not any(pattern is None or pattern.fullmatch(r.op) for r in records):
            return [f"{operator.name}: declared ({operator.kind}), but nothing of the kind ran in it"]
        if operator.kind == "attention":
            return self._attention_formats(operator.name, records)
        return []

    def _scopes(self, operator: Operator) -> tuple[str, ...]:
        if operator.kind == "rotary":
            parent = operator.name.removesuffix(".rotary")
            own = self.storage.get(operator.name, parent)
            return f"{parent}.rotary_emb", f"{parent}.rotary_emb.apply_rotary_emb", parent, own
        if operator.kind == "attention":
            return operator.name, f"{operator.name}.attn"
        return (self.storage.get(operator.name, operator.name),)

    def _attention_formats(self, name: str, records: list[Executed]) -> list[str]:
        """q, k and v reach attention in the declared dtypes (seen where one op takes all three)."""
        wanted = [self.graph.edge_by_key[name, t].format.dtype for t in "qkv"]
        for record in records:
            if "attention" in record.op and len(record.dtypes) >= 3:
                seen = [_plain(d).dtype if _plain(d) else d for d in record.dtypes[:3]]
                if seen != wanted:
                    return [f"{name}: declared q, k, v {wanted}; executed {seen} in {record.op}"]
        return []

    def _residual(self, name: str) -> list[str]:
        """An add in the decoder layer, or one fused into the norm behind it (jetrl's norms take a residual)."""
        layer, _, part = name.removesuffix(".residual_add").rpartition(".")
        readers = [e.consumer for e in self.graph.edges if e.producer == name]
        scopes = [layer, *(r.removesuffix(".x_quantizer") for r in readers)]
        ran = [r for scope in scopes for r in self.by_scope.get(scope, ()) if _adds(r)]
        return [] if ran else [f"{name}: declared, but no addition ran in {layer} or the norm behind it ({part})"]

    def _undeclared(self, gemm_scopes: set[str], other_scopes: set[str]) -> list[str]:
        """Matrix products and FP8 ops outside every declared linear and attention.

        other_scopes: of operators that jetrl computes as well (norms, activation, rotary), but with no product.
        """
        found = []
        for scope, records in self.by_scope.items():
            # A rotary table is made by an outer product, in FP32 on purpose.
            if scope in gemm_scopes or scope.endswith("rotary_emb"):
                continue
            ops = {r.op for r in records if _is_gemm(r) or "gemm" in r.op}
            if scope not in other_scopes:
                ops |= {r.op for r in records if r.op.startswith("jetrl::")}
            found += [
                f"{scope or 'outside every module'}: {op} ran, but no linear is declared there" for op in sorted(ops)
            ]
        return found


def _formats(name: str, args: tuple) -> tuple[TensorFormat, ...]:
    """Formats of x and of the weight that jetrl's GEMM read."""
    if name != "jetrl::gemm_nt":
        return ()
    return _scaled(*args[0:2]), _scaled(*args[2:4])


def _scaled(codes: torch.Tensor, scale: torch.Tensor) -> TensorFormat:
    """Granularity from the scales' shape; pow2 where no scale has a mantissa (a fluke with FP32 scales: 2**-23 each)."""
    granularity = "tile_1x128" if scale.shape[0] == codes.shape[0] else "block_128x128"
    pow2 = scale.device.type != "meta" and not bool((scale.view(torch.int32) & 0x7FFFFF).any())
    return TensorFormat("e4m3", granularity, "pow2" if pow2 else "fp32")


def _adds(record: Executed) -> bool:
    """A fused norm's tensors are x, residual and weight; without a residual there are two."""
    return "add" in record.op or (record.op.startswith("jetrl::rms_norm") and len(record.dtypes) == 3)


def _is_gemm(record: Executed) -> bool:
    return _GEMM.fullmatch(record.op.rpartition("::")[2]) is not None


def _plain(dtype: str) -> TensorFormat | None:
    try:
        return format_of_dtype(dtype)
    except ValueError:
        return None


def _same(executed: tuple, wanted: tuple[TensorFormat, TensorFormat]) -> bool:
    return len(executed) == 2 and tuple(executed) == wanted


def _layer(name: str) -> str | None:
    return next((part for part in name.split(".") if part.isdigit()), None)
