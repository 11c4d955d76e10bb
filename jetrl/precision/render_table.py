"""The check's answer as text: one table by operator kind, the verdict, the violations, what the flow saves."""

from dataclasses import dataclass

from jetrl.precision.estimate import Estimate
from jetrl.precision.formats import TensorFormat
from jetrl.precision.graph import PrecisionGraph

KIND_ORDER = (
    "embedding", "norm", "linear", "rotary", "attention", "activation", "router", "experts", "residual_add", "lm_head",
    "log_softmax", "unclassified",
)  # fmt: skip
HEADER = ("operator", "count", "rollout fprop", "train fprop", "dgrad", "wgrad", "saved B/token")
SHORT = {"tile_1x128": "1x128", "tile_128x1": "128x1", "block_128x128": "128x128"}


@dataclass(frozen=True)
class Row:
    """One line: operators of one kind whose formats are the same."""

    kind: str
    count: int
    rollout: str
    fprop: str
    dgrad: str
    wgrad: str
    saved: int | None


def short(fmt: TensorFormat) -> str:
    """e4m3 1x128, with the scale format where it is not FP32."""
    if fmt.granularity == "none":
        return fmt.dtype
    suffix = "" if fmt.scale_format == "fp32" else f" {fmt.scale_format}"
    return f"{fmt.dtype} {SHORT.get(fmt.granularity, fmt.granularity)}{suffix}"


def rows(infer: PrecisionGraph, train: PrecisionGraph, saved: dict[str, int]) -> list[Row]:
    """Rows in model order; `saved` per kind stands in the kind's first row."""
    groups: dict[tuple, int] = {}
    for operator in train.operators:
        if operator.kind in KIND_ORDER:
            key = (operator.kind, *_formats(operator.name, operator.kind, infer, train))
            groups[key] = groups.get(key, 0) + 1
    result, told = [], set()
    for key in sorted(groups, key=lambda k: (KIND_ORDER.index(k[0]), -groups[k])):
        kind = key[0]
        result.append(Row(kind, groups[key], *key[1:], saved=None if kind in told else saved.get(kind, 0)))
        told.add(kind)
    return result


def _formats(name: str, kind: str, infer: PrecisionGraph, train: PrecisionGraph) -> tuple[str, str, str, str]:
    if kind in ("linear", "lm_head"):
        mine, theirs = train.linear_format(name), infer.linear_format(name)
        rollout = "absent" if theirs is None else _pair(theirs.x, theirs.weight)
        return rollout, _pair(mine.x, mine.weight), _pair(mine.dy, mine.weight), _pair(mine.wgrad_dy, mine.wgrad_x)
    sides = [_inputs(graph, name) for graph in (infer, train)]
    gradients = [e.format for e in train.operands.get(f"{name}.backward", ()) if e.phase == "backward"]
    return *sides, short(gradients[0]) if gradients else "-", "-"


def _pair(a: TensorFormat, b: TensorFormat) -> str:
    if a == b:
        return short(a)
    return f"{short(a)} * {SHORT.get(b.granularity, b.granularity) if a.dtype == b.dtype else short(b)}"


def _inputs(graph: PrecisionGraph, name: str) -> str:
    formats = {short(e.format) for e in graph.operands.get(name, ()) if e.phase == "forward"}
    return ", ".join(sorted(formats)) or "-"


def table(lines: list[Row]) -> str:
    """Aligned text of the rows under a header."""
    cells = [HEADER]
    for row in lines:
        saved = "" if row.saved is None else f"{row.saved:,}"
        cells.append((row.kind, str(row.count), row.rollout, row.fprop, row.dgrad, row.wgrad, saved))
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADER))]
    right = {1, len(HEADER) - 1}
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def estimate_lines(e: Estimate) -> list[str]:
    """What the flow costs and saves, a line each."""
    return [
        f"parameters          {e.parameters / 1e9:.2f} billion"
        if e.parameters > 5e8
        else f"parameters          {e.parameters / 1e6:.2f} million",
        f"rollout weights     {size(e.rollout_weight_bytes)} (BF16: {size(e.rollout_weight_bytes_bf16)})",
        f"training state      {size(e.training_state_bytes)} over all GPUs (master, Adam, gradient)",
        f"KV cache            {size(e.kv_bytes_per_token)} a token",
        f"kept for backward   {size(e.saved_bytes_per_token)} a token (BF16: {size(e.saved_bytes_per_token_bf16)})"
        + (f"; {size(e.checkpointed_bytes_per_token)} with gradient checkpointing, as set" if e.checkpointed else ""),
        f"weight sync         {size(e.sync_bytes)}; as FP8 codes and scales {size(e.sync_bytes_fp8)}",
        f"FLOPs in FP8        {100 * e.fp8_flop_share:.0f} % of a training step's matrix products",
        f"estimated gain      decode {e.decode_gain:.2f}x, linear layers of the update {e.update_gain:.2f}x, "
        f"both {e.step_gain:.2f}x (GEMM and decode rates measured on one H200; nothing else is counted)",
        f"recommendation      {e.recommendation}",
    ]


def size(count: int) -> str:
    """Bytes for people, in powers of 1000."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"
