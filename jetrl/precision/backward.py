"""What training adds to a forward graph: saved tensors, gradients, dgrad and wgrad, optimizer and master weights."""

from functools import cached_property

from jetrl.precision.formats import FP32, LinearFormat, TensorFormat
from jetrl.precision.graph import Edge, Operator, PrecisionGraph
from jetrl.precision.wiring import UNKNOWN

LINEAR_KINDS = ("linear", "lm_head")
# Forward operators through which no gradient flows.
NO_GRADIENT = ("parameter", "quantizer", "rotary_table", "unclassified")
OPTIMIZER = "optimizer"

# Operands each kind keeps for its backward, besides a linear's x.
SAVED = {
    "norm": ("x",),
    "attention": ("q", "k", "v"),
    "activation": ("gate", "up"),
    "rotary": ("cos_sin",),
    "log_softmax": ("logits",),
    "router": ("x",),
    "experts": ("x", "routing"),
}


class BackwardWiring:
    """Adds the training-only operators and edges of `forward`.

    formats: name -> LinearFormat of every linear; carrier: format of gradients between operators; master: of what the
    optimizer owns.
    """

    def __init__(
        self,
        forward: PrecisionGraph,
        formats: dict[str, LinearFormat],
        carrier: TensorFormat,
        master: TensorFormat,
    ) -> None:
        self.forward, self.formats, self.carrier, self.master = forward, formats, carrier, master
        self.operators: list[Operator] = [Operator(OPTIMIZER, "optimizer", phase="update")]
        self.edges: list[Edge] = []

    def graph(self) -> PrecisionGraph:
        for operator in self.forward.operators:
            if operator.kind in LINEAR_KINDS:
                self._linear(operator)
            elif operator.kind == "parameter":
                self._add(OPTIMIZER, operator.name, "master", self.master, "update")
                for state in ("exp_avg", "exp_avg_sq"):
                    # FP32 whatever the master is: in BF16 the second moment would stand still (jetrl.optimizer).
                    self._add(OPTIMIZER, OPTIMIZER, f"{operator.name}.{state}", FP32, "update")
            elif operator.kind not in NO_GRADIENT:
                self._other(operator)
        operators = self.forward.operators + tuple(self.operators)
        return PrecisionGraph(operators, self.forward.edges + tuple(self.edges), dict(self.forward.meta))

    def _linear(self, operator: Operator) -> None:
        name, fmt = operator.name, self.formats[operator.name]
        dgrad = self._operator(f"{name}.dgrad", "dgrad", operator.shape)
        wgrad = self._operator(f"{name}.wgrad", "wgrad", operator.shape)
        producers = [producer for _, producer in self._incoming_gradients(name)]
        assert len(producers) <= 1, f"{name} has several readers: {producers}"
        # A linear of a layer that was not understood has no known reader.
        producer = producers[0] if producers else UNKNOWN
        self._operand(producer, dgrad, fmt.dy, f"{name}.dy_quantizer")
        self._operand(producer, wgrad, fmt.wgrad_dy, f"{name}.wgrad_dy_quantizer")
        # The forward's own operands, as they were consumed there: that copy is what is kept.
        weight, x = self.forward.edge_by_key[name, "weight"], self.forward.edge_by_key[name, "x"]
        self._add(weight.producer, dgrad, "weight", weight.format, "backward")
        quantizer = f"{name}.wgrad_x_quantizer"
        source = self._source_of_x(name)
        if fmt.wgrad_x.granularity == "none":
            # What fprop read, or, where that is quantized and wgrad is not, the tensor before its quantizer.
            self._add(source, wgrad, "x", fmt.wgrad_x, "saved")
        elif fmt.wgrad == "copy":
            # Made in the forward from the original, beside fprop's operand.
            self.operators.append(Operator(quantizer, "quantizer", (), "jetrl", "forward"))
            self._add(source, quantizer, "x", self.carrier, "forward")
            self._add(quantizer, wgrad, "x", fmt.wgrad_x, "saved")
        else:
            self._operator(quantizer, "quantizer", definition="jetrl")
            self._add(x.producer, quantizer, "x", x.format, "saved")
            self._add(quantizer, wgrad, "x", fmt.wgrad_x, "backward")
        parameter = self._parameter_of(name, "weight")
        self._add(wgrad, OPTIMIZER, f"{parameter}.grad from {name}", self.carrier, "update")
        if (name, "bias") in self.forward.edge_by_key:
            self._add(wgrad, OPTIMIZER, f"{name}.bias.grad from {name}", self.carrier, "update")

    def _other(self, operator: Operator) -> None:
        backward = self._operator(f"{operator.name}.backward", f"{operator.kind}_backward")
        for tensor, producer in self._incoming_gradients(operator.name):
            self._add(producer, backward, tensor, self.carrier, "backward")
        for tensor in SAVED.get(operator.kind, ()):
            edge = self.forward.edge_by_key[operator.name, tensor]
            self._add(edge.producer, backward, f"saved {tensor}", edge.format, "saved")
        if operator.kind == "attention":
            self._add(operator.name, backward, "saved out", self.carrier, "saved")
            self._add(operator.name, backward, "saved lse", FP32, "saved")
        for edge in self.forward.operands.get(operator.name, ()):
            if self.forward.operator_by_name[edge.producer].kind == "parameter":
                self._add(backward, OPTIMIZER, f"{edge.producer}.grad from {operator.name}", self.carrier, "update")

    def _operand(self, producer: str, gemm: str, fmt: TensorFormat, quantizer: str) -> None:
        """The gradient `dy` into one backward GEMM, through its quantizer where it has one."""
        if fmt.granularity == "none":
            self._add(producer, gemm, "dy", fmt, "backward")
            return
        self._operator(quantizer, "quantizer", definition="jetrl")
        self._add(producer, quantizer, "dy", self.carrier, "backward")
        self._add(quantizer, gemm, "dy", fmt, "backward")

    def _incoming_gradients(self, name: str) -> list[tuple[str, str]]:
        """(tensor name, producing backward operator) for every forward reader of `name`'s output."""
        result = []
        for edge in self._readers.get(name, ()):
            reader = edge.consumer
            if self.forward.operator_by_name[reader].kind == "quantizer":
                reader = reader.rsplit(".", 1)[0]
            kind = self.forward.operator_by_name[reader].kind
            suffix = "dgrad" if kind in LINEAR_KINDS else "backward"
            result.append((f"gradient from {reader} {edge.tensor}", f"{reader}.{suffix}"))
        return result

    @cached_property
    def _readers(self) -> dict[str, list[Edge]]:
        readers: dict[str, list[Edge]] = {}
        for edge in self.forward.edges:
            readers.setdefault(edge.producer, []).append(edge)
        return readers

    def _source_of_x(self, linear: str) -> str:
        """Who makes x before any quantizer."""
        producer = self.forward.edge_by_key[linear, "x"].producer
        if self.forward.operator_by_name[producer].kind == "quantizer":
            return self.forward.edge_by_key[producer, "x"].producer
        return producer

    def _parameter_of(self, linear: str, tensor: str) -> str:
        producer = self.forward.edge_by_key[linear, tensor].producer
        if self.forward.operator_by_name[producer].kind == "quantizer":
            return self.forward.edge_by_key[producer, tensor].producer
        return producer

    def _operator(self, name: str, kind: str, shape: tuple[int, ...] = (), definition: str = "") -> str:
        self.operators.append(Operator(name, kind, shape, definition, "backward"))
        return name

    def _add(self, producer: str, consumer: str, tensor: str, fmt: TensorFormat, phase: str) -> None:
        self.edges.append(Edge(producer, consumer, tensor, fmt, phase))
