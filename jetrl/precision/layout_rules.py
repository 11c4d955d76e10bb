"""Block layout of one engine's FP8 weights: no 128x128 block may be shared by two ranks or by two logical matrices."""

from dataclasses import replace

from jetrl.precision.graph import PrecisionGraph, model_order
from jetrl.precision.tensor_parallel import BLOCK, ShardedLinear, working_sizes
from jetrl.precision.violation import Violation

TP_KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"
EXCLUDE_KEY = "flow.rollout.exclude"
QUANTIZATION_KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm.quantization"
# What vLLM's decoders run as one GEMM, so with one format.
_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Column-parallel matrices are cut along rows, the others along columns (vLLM's ColumnParallel and RowParallel layers).
_CUT_ALONG_COLUMNS = ("o_proj", "down_proj")


def with_tensor_parallel(graph: PrecisionGraph, size: int) -> PrecisionGraph:
    """The same graph on `size` tensor-parallel ranks: what a declared graph must be checked for."""
    return replace(graph, meta={**graph.meta, "tensor_parallel": size})


def layout_violations(graph: PrecisionGraph, violated: frozenset[str] = frozenset()) -> list[Violation]:
    """Interior shard edges that cut a block, blocks that span two matrices, and merges of unlike matrices.

    violated: linears already reported for an operand; a merge with one of them is unlike because of that.
    """
    return _cut_blocks(graph) + _spanning_blocks(graph) + _mixed_merges(graph, violated)


def _cut_blocks(graph: PrecisionGraph) -> list[Violation]:
    tp = graph.meta.get("tensor_parallel", 1)
    sharded = {name: part for name in graph.fp8_linear_names() if (part := _sharded(graph, name)) is not None}
    broken = {name: part for name, part in sharded.items() if not part.blocks_stay_whole(tp)}
    if not broken:
        return []
    sizes = ", ".join(map(str, working_sizes(list(sharded.values()), 64)))
    found = []
    for name, part in broken.items():
        shard = part.shard(tp)
        cut = f"its {part.size} {_axis(name)} do not divide" if shard is None else f"{shard} {_axis(name)} a rank"
        rollout = f"cut at tensor-parallel size {tp} ({cut})"
        found.append(Violation(name, "weight", rollout, f"whole blocks of {BLOCK}", TP_KEY, f"use one of {sizes}"))
    return found


def _sharded(graph: PrecisionGraph, name: str) -> ShardedLinear | None:
    """How vLLM cuts linear `name`; None for a linear outside attention and MLP, or without blocks."""
    parent, _, leaf = name.rpartition(".")
    if graph.linear_format(name).weight.granularity != "block_128x128":
        return None
    rows, columns = graph.operator_by_name[name].shape
    attention = graph.operator_by_name.get(parent)
    heads = 0
    if attention is not None and attention.kind == "attention":
        heads = attention.shape[1] if leaf in ("k_proj", "v_proj") else attention.shape[0]
    return ShardedLinear(name, columns if leaf in _CUT_ALONG_COLUMNS else rows, heads)


def _axis(name: str) -> str:
    return "columns" if name.rpartition(".")[2] in _CUT_ALONG_COLUMNS else "rows"


def _spanning_blocks(graph: PrecisionGraph) -> list[Violation]:
    """A merged projection quantized as one matrix: a member that does not end on a block edge shares its last block."""
    found = []
    for storage in graph.meta.get("merged", ()):
        members, rows = storage["members"], storage["rows"]
        fmt = graph.linear_format(members[0])
        if storage["blocks_per_member"] or fmt is None or fmt.weight.granularity != "block_128x128":
            continue
        for i, (name, count) in enumerate(zip(members[:-1], rows[:-1], strict=True)):
            if sum(rows[: i + 1]) % BLOCK:
                rollout = f"{count} rows inside {storage['name']}, whose last block it shares with {members[i + 1]}"
                advice = "set it to jetrl, which pads every logical matrix to whole blocks"
                found.append(Violation(name, "weight", rollout, "in blocks of its own", QUANTIZATION_KEY, advice))
    return found


def _mixed_merges(graph: PrecisionGraph, violated: frozenset[str]) -> list[Violation]:
    """A rollout whose flow gives the matrices of one merged projection different formats: vLLM cannot run it."""
    found = []
    names = set(graph.linear_names()) if graph.meta.get("side") == "rollout" else set()
    for first in sorted((n for n in names if n.rpartition(".")[2] in ("q_proj", "gate_proj")), key=model_order):
        parent, _, leaf = first.rpartition(".")
        group = next(members for members in _MERGED if members[0] == leaf)
        members = [f"{parent}.{member}" for member in group if f"{parent}.{member}" in names]
        formats = {name: fmt.weight for name in members if (fmt := graph.linear_format(name)) is not None}
        if len(set(formats.values())) > 1 and violated.isdisjoint(members):
            shown = ", ".join(f"{name.rpartition('.')[2]} {fmt}" for name, fmt in formats.items())
            advice = f"keep all of {', '.join(group)} of this layer unquantized, or none"
            found.append(
                Violation(first, "weight", f"merged with unlike ones ({shown})", "free to differ", EXCLUDE_KEY, advice)
            )
    return found
