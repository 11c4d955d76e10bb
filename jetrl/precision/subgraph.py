"""check(infer, train): is the rollout's graph a subgraph of training's forward graph, and if not, at which edges?"""

import re
from dataclasses import dataclass

from jetrl.precision.graph import Edge, PrecisionGraph, model_order
from jetrl.precision.kernels import EXACT
from jetrl.precision.layout_rules import layout_violations
from jetrl.precision.patterns import layer_index
from jetrl.precision.violation import Violation


def check(infer: PrecisionGraph, train: PrecisionGraph) -> list[Violation]:
    """Every edge of `infer` that training's forward does not have in the same format, and every broken block layout.

    infer: a rollout's graph (forward). train: a training graph, or its forward part. An empty list proves
    G_infer is a subgraph of G_train-forward: same operators, same operands, same producers, same formats, and weight
    blocks that coincide. Violations come in model order.
    """
    infer, train = infer.forward(), train.forward()
    found = [v for edge in infer.edges if (v := _check_edge(edge, infer, train)) is not None]
    found += _missing_operands(infer, train)
    found += _differing_operators(infer, train)
    found.sort(key=lambda v: (model_order(v.operator), v.tensor))
    return found + layout_violations(infer, frozenset(v.operator for v in found)) + layout_violations(train)


def unclassified(graph: PrecisionGraph) -> list[str]:
    """Modules that a builder could not classify: a check says nothing about them."""
    return list(graph.meta.get("unclassified", ()))


@dataclass(frozen=True)
class _Side:
    """One side of a compared edge, in words."""

    graph: PrecisionGraph
    edge: Edge | None

    def __str__(self) -> str:
        if self.edge is None:
            return "absent"
        definition = _definition(self.graph, self.edge)
        if definition:
            return f"{self.edge.format} by {definition}'s quantizer"
        return str(self.edge.format)


def _check_edge(edge: Edge, infer: PrecisionGraph, train: PrecisionGraph) -> Violation | None:
    twin = train.edge_by_key.get(edge.key)
    if twin is None:
        consumer = infer.operator_by_name.get(edge.consumer)
        if consumer is not None and consumer.kind == "quantizer" and edge.consumer not in train.operator_by_name:
            # Implied by the operand behind this quantizer, which is reported there, once.
            return None
        return _violation(edge, infer, train, None, "")
    if edge.format != twin.format:
        return _violation(edge, infer, train, twin, "")
    if _definition(infer, edge) != _definition(train, twin):
        return _violation(edge, infer, train, twin, "")
    if edge.producer != twin.producer:
        return _violation(edge, infer, train, twin, f" from {edge.producer}", f" from {twin.producer}")
    return None


def _violation(
    edge: Edge,
    infer: PrecisionGraph,
    train: PrecisionGraph,
    twin: Edge | None,
    infer_note: str = "",
    train_note: str = "",
) -> Violation:
    key, advice = _fix(edge, infer, train, twin)
    rollout = f"{_Side(infer, edge)}{infer_note}"
    training = f"{_Side(train, twin)}{train_note}"
    return Violation(edge.consumer, edge.tensor, rollout, training, key, advice)


def _missing_operands(infer: PrecisionGraph, train: PrecisionGraph) -> list[Violation]:
    """Operands that training's operator reads and the rollout's operator of the same name does not."""
    found = []
    for edge in train.edges:
        if edge.consumer in infer.operator_by_name and edge.key not in infer.edge_by_key:
            fmt = str(_Side(train, edge))
            advice = "load the same checkpoint and architecture in both engines"
            found.append(Violation(edge.consumer, edge.tensor, "absent", fmt, "actor_rollout_ref.model.path", advice))
    return found


def _differing_operators(infer: PrecisionGraph, train: PrecisionGraph) -> list[Violation]:
    """Operators of one name that are of another kind or size on the two sides, or run another kernel in an exact flow."""
    found = []
    for operator in infer.operators:
        twin = train.operator_by_name.get(operator.name)
        if twin is None:
            continue
        if (operator.kind, operator.shape) != (twin.kind, twin.shape):
            sides = [f"{o.kind} of shape {list(o.shape)}" for o in (operator, twin)]
            advice = "load the same checkpoint and architecture in both engines"
            found.append(Violation(operator.name, "shape", *sides, "actor_rollout_ref.model.path", advice))
        elif operator.kind in EXACT and operator.definition != twin.definition:
            sides = [o.definition or "whatever kernel the engine picks" for o in (operator, twin)]
            advice = "let both engines run the exact flow, or use precision=unified_fp8, which allows kernels to differ"
            found.append(Violation(operator.name, "kernel", *sides, "precision", advice))
    return found


def _definition(graph: PrecisionGraph, edge: Edge) -> str:
    """Of a quantizer. Another operator's kernel is compared once, at that operator, and not at every reader of its output."""
    producer = graph.operator_by_name.get(edge.producer)
    return producer.definition if producer is not None and producer.kind == "quantizer" else ""


def _fix(edge: Edge, infer: PrecisionGraph, train: PrecisionGraph, twin: Edge | None) -> tuple[str, str]:
    """(config key, what to do with it) for one violated edge."""
    if _definition(infer, edge) not in ("", "jetrl"):
        return (
            "actor_rollout_ref.rollout.engine_kwargs.vllm.quantization",
            "set it to jetrl and remove vLLM's own quantization (actor_rollout_ref.rollout.quantization)",
        )
    consumer = infer.operator_by_name.get(edge.consumer)
    kind = consumer.kind if consumer is not None else ""
    if (
        kind == "attention"
        and edge.tensor in ("k", "v")
        and edge.format != infer.edge_by_key[edge.consumer, "q"].format
    ):
        return "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype", "set it to auto, or leave it out"
    if kind in ("linear", "quantizer") and edge.tensor in ("x", "weight") and twin is not None:
        quantized = [e.format.granularity != "none" for e in (edge, twin)]
        if all(quantized):
            if edge.format.granularity == twin.format.granularity:
                return "flow.rollout.scale_format", f"set it to {twin.format.scale_format}, as training has it"
            return "flow.rollout.linear", "use one recipe on both sides"
        if any(quantized):
            return _selection_key(edge.consumer, infer, train, quantized[0])
    return (
        "actor_rollout_ref.rollout.dtype",
        "give both engines one compute dtype (the trainer's is fsdp_config.mixed_precision.param_dtype)",
    )


def _selection_key(name: str, infer: PrecisionGraph, train: PrecisionGraph, rollout_is_fp8: bool) -> tuple[str, str]:
    """Why exactly one side quantizes linear `name`: its exclusions, first or last layers, or its whole assignment."""
    sides = {"rollout": infer.meta.get("assignment"), "train": train.meta.get("assignment")}
    kept_by, other = ("train", "rollout") if rollout_is_fp8 else ("rollout", "train")
    reason = (train if rollout_is_fp8 else infer).meta.get("kept_unquantized", {}).get(name, "")
    found = re.match(r"flow\.\w+\.(\w+)=", reason)
    if not (train if rollout_is_fp8 else infer).fp8_linear_names():
        return f"flow.{kept_by}.linear", "set it to fp8, as the other side is"
    if found is None or None in sides.values():
        return (
            f"flow.{kept_by}.exclude",
            f"leave this layer out on both sides, or on neither ({kept_by} keeps it unquantized)",
        )
    value = sides[kept_by][found[1]]
    index = layer_index(name)
    where = f" (layer {index})" if index is not None else ""
    return f"flow.{other}.{found[1]}", f"set it to {value}, as flow.{kept_by} has it{where}"
