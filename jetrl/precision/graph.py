"""PrecisionGraph: the operators of a model, the tensors between them, and the format of each tensor.

Names are canonical (Hugging Face module paths) on both engines, so two graphs can be compared edge by edge. The graph is
also what drives the layers: convert() and the vLLM plug-in read each linear's format from `linear_format`.
"""

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property

from jetrl.precision.formats import LinearFormat, TensorFormat

# forward: both engines. saved: kept from forward for backward. backward: gradients and what dgrad and wgrad read.
# update: gradients into the optimizer, its state, and master weights out of it.
PHASES = ("forward", "saved", "backward", "update")


@dataclass(frozen=True)
class Operator:
    """One operator. `shape`: (out, in) of a linear or table, (size,) of a norm, (query heads, KV heads, head size) of attention.

    `definition` says whose arithmetic a quantizer follows ("jetrl", "vllm", ...): two quantizers with the same output
    format but another definition give other bytes. In a flow that demands equal bits it names every other operator's
    kernel too (kernels.py); elsewhere it is empty for them.
    """

    name: str
    kind: str
    shape: tuple[int, ...] = ()
    definition: str = ""
    phase: str = "forward"


@dataclass(frozen=True)
class Edge:
    """A tensor from `producer`, in `format`, read by `consumer` under the operand name `tensor`."""

    producer: str
    consumer: str
    tensor: str
    format: TensorFormat
    phase: str = "forward"

    @property
    def key(self) -> tuple[str, str]:
        """(consumer, tensor): unique in a graph, and the same on both engines."""
        return self.consumer, self.tensor


@dataclass(frozen=True)
class PrecisionGraph:
    """Operators by name and edges by (consumer, tensor), both unique and sorted.

    `meta` holds facts about the engine that are no part of the graph's identity (engine, assignment, merged storage,
    tensor-parallel size, unclassified modules, notes); `digest` leaves it out.
    """

    operators: tuple[Operator, ...]
    edges: tuple[Edge, ...]
    meta: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "operators", tuple(sorted(self.operators, key=lambda o: o.name)))
        object.__setattr__(self, "edges", tuple(sorted(self.edges, key=lambda e: e.key)))
        assert len(self.operator_by_name) == len(self.operators), "two operators share a name"
        assert len(self.edge_by_key) == len(self.edges), "two edges share (consumer, tensor)"

    @cached_property
    def operator_by_name(self) -> dict[str, Operator]:
        return {o.name: o for o in self.operators}

    @cached_property
    def edge_by_key(self) -> dict[tuple[str, str], Edge]:
        return {e.key: e for e in self.edges}

    @cached_property
    def operands(self) -> dict[str, list[Edge]]:
        """consumer -> its incoming edges of every phase."""
        result: dict[str, list[Edge]] = {}
        for edge in self.edges:
            result.setdefault(edge.consumer, []).append(edge)
        return result

    def linear_names(self) -> list[str]:
        """Canonical names of every linear layer, FP8 or not, in model order (lm_head last)."""
        return list(self._linear_names)

    @cached_property
    def _linear_names(self) -> list[str]:
        return sorted((o.name for o in self.operators if o.kind in ("linear", "lm_head")), key=model_order)

    def linear_format(self, name: str) -> LinearFormat | None:
        """Formats of the three GEMMs of linear `name`, or None when the graph has no such linear with both operands.

        A forward-only graph has no gradients: their formats are then those of the same recipe (jetrl's blockwise FP8
        where the forward is FP8, else unquantized).
        """
        operator = self.operator_by_name.get(name)
        if operator is None or operator.kind not in ("linear", "lm_head"):
            return None
        if (name, "x") not in self.edge_by_key or (name, "weight") not in self.edge_by_key:
            return None
        x, weight = self.edge_by_key[name, "x"].format, self.edge_by_key[name, "weight"].format
        if (f"{name}.dgrad", "dy") in self.edge_by_key:
            dy = self.edge_by_key[f"{name}.dgrad", "dy"].format
            wgrad_x = self.edge_by_key[f"{name}.wgrad", "x"].format
            wgrad_dy = self.edge_by_key[f"{name}.wgrad", "dy"].format
            return LinearFormat(x, weight, dy, wgrad_x, wgrad_dy, self._wgrad_kind(name, x, wgrad_x))
        if weight.granularity == "block_128x128":
            recipe = LinearFormat.fp8_blockwise(weight.scale_format)
            return LinearFormat(x, weight, recipe.dy, recipe.wgrad_x, recipe.wgrad_dy)
        plain = x if x.granularity == "none" else TensorFormat("bf16")
        return LinearFormat(x, weight, plain, plain, plain)

    def _wgrad_kind(self, name: str, x: TensorFormat, wgrad_x: TensorFormat) -> str:
        """One of formats.WGRAD_KINDS, from what wgrad reads and from when it was made."""
        if x.granularity == "none":
            return "requantize"  # nothing is quantized: the kinds do not differ
        if wgrad_x.granularity == "none":
            return "bf16"
        if wgrad_x.granularity == "block_128x128":
            return "blocks"
        return "copy" if self.edge_by_key[f"{name}.wgrad", "x"].phase == "saved" else "requantize"

    def fp8_linear_names(self) -> list[str]:
        """Canonical names of the linears whose forward runs in FP8, in model order."""
        return list(self._fp8_linear_names)

    @cached_property
    def _fp8_linear_names(self) -> list[str]:
        formats = {name: self.linear_format(name) for name in self._linear_names}
        return [name for name, fmt in formats.items() if fmt is not None and fmt.is_fp8]

    def forward(self) -> "PrecisionGraph":
        """The forward part alone: what a rollout's graph is compared with."""
        return PrecisionGraph(
            tuple(o for o in self.operators if o.phase == "forward"),
            tuple(e for e in self.edges if e.phase == "forward"),
            dict(self.meta),
        )

    def to_dict(self) -> dict:
        """Plain containers, ready for JSON; `from_dict` is its inverse."""
        return {
            "operators": [[o.name, o.kind, list(o.shape), o.definition, o.phase] for o in self.operators],
            "edges": [
                [
                    e.producer,
                    e.consumer,
                    e.tensor,
                    [e.format.dtype, e.format.granularity, e.format.scale_format],
                    e.phase,
                ]
                for e in self.edges
            ],
            "meta": self.meta,
        }

    @classmethod
    def from_dict(cls, data: dict) -> "PrecisionGraph":
        return cls(
            tuple(Operator(name, kind, tuple(shape), d, phase) for name, kind, shape, d, phase in data["operators"]),
            tuple(Edge(p, c, tensor, TensorFormat(*fmt), phase) for p, c, tensor, fmt, phase in data["edges"]),
            dict(data["meta"]),
        )

    def digest(self) -> str:
        """sha256 (hex) of the canonical JSON of operators and edges, without `meta`."""
        data = self.to_dict()
        del data["meta"]
        return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def model_order(name: str) -> tuple:
    """Sort key of canonical names: layers by number, names outside the layers last."""
    parts = name.split(".")
    number = next((int(p) for p in parts if p.isdigit()), None)
    return (number is None, number or 0, name)
