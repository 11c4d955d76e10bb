"""One decoder layer as an SVG: rollout and training graphs overlaid, violated edges in red.

An edge that both graphs share is drawn once, green in FP8 and grey otherwise. A violated edge is red and carries both
formats. What only training has (dgrad, wgrad, tensors kept for backward) stands inside the boxes.
"""

from dataclasses import dataclass
from html import escape

from jetrl.precision.graph import Edge, PrecisionGraph
from jetrl.precision.render_table import short
from jetrl.precision.subgraph import Violation

WIDTH, BOX, COLUMNS = 1040, 280, (190, 520, 850)
LINE, PAD, GAP, TOP = 15, 9, 64, 92
RED, FP8, PLAIN, INK, MUTED = "#c62828", "#2e7d32", "#78909c", "#1c2733", "#5b6b78"
FONT = "font-family='DejaVu Sans, Helvetica, Arial, sans-serif'"

# Where operands arrive along the top of a box, by their number.
ARRIVALS = {1: (0.5,), 2: (0.2, 0.8), 3: (0.06, 0.5, 0.94)}

# Tensors kept for backward that a box names, in this order; the rotary table is shared by all layers.
KEPT_ORDER = ("x", "q", "k", "v", "out", "lse", "gate", "up", "routing")

# Names below the decoder layer, row by row.
ROWS = (
    ("input_layernorm",),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.q_norm", "self_attn.k_norm"),
    ("self_attn.rotary",),
    ("self_attn",),
    ("self_attn.o_proj",),
    ("self_attn.residual_add",),
    ("post_attention_layernorm",),
    ("mlp.gate", "mlp.gate_proj", "mlp.up_proj"),
    ("mlp.experts", "mlp.act_fn"),
    ("mlp.down_proj",),
    ("mlp.residual_add",),
)


@dataclass(frozen=True)
class Box:
    name: str
    x: int
    y: int
    height: int
    lines: tuple[tuple[str, str], ...]

    @property
    def left(self) -> int:
        return self.x - BOX // 2

    @property
    def bottom(self) -> int:
        return self.y + self.height


class LayerDrawing:
    """layer: canonical name of the decoder layer, e.g. `model.layers.0`."""

    def __init__(
        self, infer: PrecisionGraph, train: PrecisionGraph, violations: list[Violation], layer: str, title: str
    ) -> None:
        self.infer, self.train, self.layer, self.title = infer, train, layer, title
        self.violated = {(v.operator, v.tensor): v for v in violations}
        self.boxes: dict[str, Box] = {}
        self.parts: list[str] = []

    def svg(self) -> str:
        height = self._place()
        edges = [edge for name in self.boxes for edge in self._data_operands(name)]
        for edge in edges:
            self._draw_edge(edge)
        for box in self.boxes.values():
            self._draw_box(box)
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}'>"
            f"<rect width='{WIDTH}' height='{height}' fill='white'/>{_markers()}"
        )
        return "\n".join([head, *self._legend(), *self.parts, "</svg>\n"])

    def _place(self) -> int:
        """Put every operator of the layer on its row; returns the picture's height."""
        y = TOP
        for row in ROWS:
            names = [f"{self.layer}.{n}" for n in row if f"{self.layer}.{n}" in self.train.operator_by_name]
            if not names:
                continue
            height = 0
            for i, name in enumerate(names):
                x = COLUMNS[1] if len(names) == 1 else COLUMNS[i] if len(names) == 3 else _pair_column(row, i)
                box = Box(name, x, y, 0, self._lines(name))
                box = Box(name, x, y, 2 * PAD + LINE * len(box.lines), box.lines)
                self.boxes[name] = box
                height = max(height, box.height)
            y += height + GAP
        return y - GAP + 24

    def _lines(self, name: str) -> tuple[tuple[str, str], ...]:
        """(text, colour) lines of a box: name, weight, and what only training has."""
        operator = self.train.operator_by_name[name]
        lines = [(name.removeprefix(f"{self.layer}."), INK)]
        if operator.kind == "linear":
            fmt = self.train.linear_format(name)
            violation = self.violated.get((name, "weight"))
            if violation is None:
                lines.append((f"weight {short(fmt.weight)}", FP8 if fmt.is_fp8 else MUTED))
            else:
                theirs = self.infer.edge_by_key.get((name, "weight"))
                lines.append((f"weight: rollout {short(theirs.format) if theirs else 'absent'}", RED))
                lines.append((f"weight: training {short(fmt.weight)}", RED))
            lines.append((f"dgrad {short(fmt.dy)}, wgrad {short(fmt.wgrad_dy)}", MUTED))
            lines.append((f"kept for backward: x {short(fmt.x)}", MUTED))
        else:
            kept = {e.tensor.removeprefix("saved "): e for e in self.train.operands.get(f"{name}.backward", ())}
            kept = {t: short(kept[t].format) for t in KEPT_ORDER if t in kept and kept[t].phase == "saved"}
            if kept:
                lines.append((f"kept: {_shared_format(kept)}", MUTED))
        return tuple(lines)

    def _data_operands(self, name: str) -> list[Edge]:
        """Operands of `name` but parameters, in training's graph; an operand only the rollout has comes from there."""
        edges = {e.tensor: e for e in self.infer.operands.get(name, ()) if e.phase == "forward"}
        edges.update({e.tensor: e for e in self.train.operands.get(name, ()) if e.phase == "forward"})
        graph = self.train if name in self.train.operands else self.infer
        kinds = {"parameter", "rotary_table"}
        return [e for e in edges.values() if e.tensor != "weight" and _kind(graph, e.producer) not in kinds]

    def _draw_edge(self, edge: Edge) -> None:
        target = self.boxes[edge.consumer]
        # The residual comes in from the side.
        operands = [e for e in self._data_operands(edge.consumer) if e.tensor != "residual"]
        order = sorted(operands, key=self._source_x)
        position = order.index(edge) if edge in order else 0
        x2, y2 = int(target.left + BOX * ARRIVALS[len(order)][position]), target.y
        violation = self.violated.get((edge.consumer, edge.tensor))
        colour = RED if violation else FP8 if edge.format.granularity != "none" else PLAIN
        width = 3 if violation else 2
        source = self.boxes.get(self._source(edge))
        if edge.tensor == "residual":
            path, label = self._residual_path(source, target)
            anchor = "start"
        else:
            x1, y1 = (source.x, source.bottom) if source else (COLUMNS[1], TOP - 40)
            # Straight down past the rows between, then a bend in the last gap: nothing is crossed.
            bend = max(y1, y2 - GAP)
            middle = (bend + y2) // 2
            path = f"M{x1},{y1} L{x1},{bend} C{x1},{middle} {x2},{middle} {x2},{y2 - 4}"
            # On the side that the curve does not come from.
            label, anchor = ((x2 - 7, y2 - 12), "end") if x1 > x2 + 4 else ((x2 + 7, y2 - 12), "start")
        self.parts.append(
            f"<path d='{path}' fill='none' stroke='{colour}' stroke-width='{width}' marker-end='url(#{colour[1:]})'/>"
        )
        theirs = self.infer.edge_by_key.get(edge.key)
        texts = [f"{edge.tensor}: {short(edge.format)}"]
        if violation:
            texts = [f"rollout {short(theirs.format) if theirs else 'absent'}", f"training {short(edge.format)}"]
        # The middle one of three would run into its right neighbour's label.
        lift = 14 * len(texts) if len(order) == 3 and position == 1 else 0
        for i, text in enumerate(reversed(texts)):
            self.parts.append(_text(label[0], label[1] - lift - 13 * i, text, colour, 11, anchor))

    def _residual_path(self, source: Box | None, target: Box) -> tuple[str, tuple[int, int]]:
        """Round the left side of everything between the two operators."""
        x, y1 = 18, source.y + source.height // 2 if source else TOP - 40
        y2, start = target.y + target.height // 2, source.left if source else COLUMNS[1]
        label = (x + 8, y2 - 8)
        return (
            f"M{start},{y1} L{x + 12},{y1} Q{x},{y1} {x},{y1 + 12} L{x},{y2 - 12} Q{x},{y2} {x + 12},{y2} L{target.left - 4},{y2}",
            label,
        )

    def _source(self, edge: Edge) -> str:
        """The operator that computes a tensor: quantizers are drawn as the colour of their edge."""
        for graph in (self.train, self.infer):
            if _kind(graph, edge.producer) == "quantizer":
                return graph.edge_by_key[edge.producer, "x"].producer
        return edge.producer

    def _source_x(self, edge: Edge) -> int:
        source = self.boxes.get(self._source(edge))
        x = source.x if source else COLUMNS[1]
        return x if edge.tensor != "k" or source is None or not source.name.endswith("rotary") else x + 1

    def _draw_box(self, box: Box) -> None:
        red = any(operator == box.name for operator, _ in self.violated)
        stroke = RED if red else "#90a4ae"
        fill = "#fff5f5" if red else "#f5f8fa"
        self.parts.append(
            f"<rect x='{box.left}' y='{box.y}' width='{BOX}' height='{box.height}' rx='6' fill='{fill}' stroke='{stroke}'/>"
        )
        for i, (text, colour) in enumerate(box.lines):
            weight = "bold" if i == 0 else "normal"
            self.parts.append(
                _text(box.x, box.y + PAD + LINE * i + 11, text, colour, 13 if i == 0 else 11, "middle", weight)
            )

    def _legend(self) -> list[str]:
        parts = [_text(20, 24, self.title, INK, 16, weight="bold")]
        entries = (
            (FP8, "FP8, both graphs"),
            (PLAIN, "not quantized, both graphs"),
            (RED, "in the rollout but not in training"),
        )
        x = 20
        for colour, text in entries:
            parts.append(f"<line x1='{x}' y1='40' x2='{x + 26}' y2='40' stroke='{colour}' stroke-width='3'/>")
            parts.append(_text(x + 32, 44, text, INK, 12))
            x += 60 + 7 * len(text)
        return parts


def draw_layer(
    infer: PrecisionGraph, train: PrecisionGraph, violations: list[Violation], title: str, layer: str | None = None
) -> str:
    """SVG of one decoder layer; by default the first one with a violation, else the first."""
    return LayerDrawing(infer, train, violations, layer or _interesting_layer(train, violations), title).svg()


def _interesting_layer(train: PrecisionGraph, violations: list[Violation]) -> str:
    layers = [o.name.removesuffix(".self_attn") for o in train.operators if o.kind == "attention"]
    for v in violations:
        for layer in layers:
            if v.operator.startswith(f"{layer}."):
                return layer
    return min(layers, key=lambda name: [int(p) if p.isdigit() else 0 for p in name.split(".")]) if layers else ""


def _kind(graph: PrecisionGraph, name: str) -> str:
    operator = graph.operator_by_name.get(name)
    return operator.kind if operator is not None else ""


def _pair_column(row: tuple[str, ...], index: int) -> int:
    # Norms stand under their projections; a pair without a third column is centred.
    return COLUMNS[index] if row[0].endswith("q_norm") else (COLUMNS[1] - 165, COLUMNS[1] + 165)[index]


def _shared_format(formats: dict[str, str]) -> str:
    """`q bf16, k bf16, v bf16` as `q, k, v bf16`, while neighbours share a format."""
    result: list[list[str]] = []
    for name, fmt in formats.items():
        if result and result[-1][1] == fmt:
            result[-1][0] += f", {name}"
        else:
            result.append([name, fmt])
    return "; ".join(" ".join(entry) for entry in result)


def _markers() -> str:
    arrows = "".join(
        f"<marker id='{c[1:]}' viewBox='0 0 8 8' refX='6' refY='4' markerWidth='7' markerHeight='7' orient='auto' "
        f"markerUnits='userSpaceOnUse'><path d='M0,0 L8,4 L0,8 z' fill='{c}'/></marker>"
        for c in (RED, FP8, PLAIN)
    )
    return f"<defs>{arrows}</defs>"


def _text(x: int, y: int, text: str, colour: str, size: int, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f"<text x='{x}' y='{y}' {FONT} font-size='{size}' font-weight='{weight}' fill='{colour}' "
        f"text-anchor='{anchor}'>{escape(text)}</text>"
    )
