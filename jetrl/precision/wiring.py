"""From the parts of a decoder to the forward graph: which operator reads which tensor, in which format."""

from jetrl.precision.formats import FP32, TensorFormat
from jetrl.precision.graph import Edge, Operator, PrecisionGraph
from jetrl.precision.layout import Decoder, Experts, GatedMlp, Layer, Linear, Norm

# Producer of a tensor that no reading of the model could attribute to an operator.
UNKNOWN = "unclassified"


class ForwardWiring:
    """Collects operators and edges of one forward pass. `graph()` gives the result."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.operators: dict[str, Operator] = {}
        self.edges: list[Edge] = []

    def graph(self) -> PrecisionGraph:
        d = self.decoder
        self._operator(d.embedding, "embedding", d.embedding_shape)
        self._parameter(d.embedding, "weight", f"{d.embedding}.weight", d.embedding_shape)
        if d.layers:
            self._operator(d.rotary, "rotary_table")
        stream = d.embedding
        for layer in d.layers:
            stream = self._layer(layer, stream)
        if d.loose:
            # A layer that was not understood may do anything to the stream: never claim to know what comes out.
            stream = self._operator(UNKNOWN, UNKNOWN)
        for part in d.loose:
            self._norm(part, UNKNOWN) if isinstance(part, Norm) else self._linear(part, UNKNOWN)
        if d.final_norm is not None:
            stream = self._norm(d.final_norm, stream)
        if d.lm_head is not None:
            stream = self._linear(d.lm_head, stream, kind="lm_head")
            self._operator("log_softmax", "log_softmax")
            self._edge(stream, "log_softmax", "logits", d.carrier)
            self._operator("log_prob", "output")
            self._edge("log_softmax", "log_prob", "log_prob", FP32)
        return PrecisionGraph(tuple(self.operators.values()), tuple(self.edges), dict(d.meta))

    def _layer(self, layer: Layer, stream: str) -> str:
        c = self.decoder.carrier
        x = self._norm(layer.input_norm, stream)
        q, k, v = (self._linear(linear, x) for linear in (layer.q, layer.k, layer.v))
        q = self._norm(layer.q_norm, q) if layer.q_norm else q
        k = self._norm(layer.k_norm, k) if layer.k_norm else k
        rotary = self._operator(f"{layer.attention}.rotary", "rotary", layer.heads)
        self._edge(q, rotary, "q", c)
        self._edge(k, rotary, "k", c)
        self._edge(self.decoder.rotary, rotary, "cos_sin", self.decoder.cos_sin)
        attention = self._operator(layer.attention, "attention", layer.heads)
        self._edge(rotary, attention, "q", c)
        # As attention reads them: in the rollout they come out of the KV cache, so its format is theirs.
        self._edge(rotary, attention, "k", layer.kv)
        self._edge(v, attention, "v", layer.kv)
        stream = self._residual(f"{layer.attention}.residual_add", self._linear(layer.o, attention), stream)
        x = self._norm(layer.post_norm, stream)
        out = self._experts(layer.mlp, x) if isinstance(layer.mlp, Experts) else self._gated_mlp(layer.mlp, x)
        return self._residual(f"{layer.mlp_name}.residual_add", out, stream)

    def _gated_mlp(self, mlp: GatedMlp, x: str) -> str:
        gate, up = self._linear(mlp.gate, x), self._linear(mlp.up, x)
        activation = self._operator(mlp.activation, "activation", (mlp.gate.shape[0],))
        self._edge(gate, activation, "gate", self.decoder.carrier)
        self._edge(up, activation, "up", self.decoder.carrier)
        return self._linear(mlp.down, activation)

    def _experts(self, experts: Experts, x: str) -> str:
        c = self.decoder.carrier
        router = self._operator(experts.router, "router", experts.router_shape)
        self._edge(x, router, "x", c)
        self._parameter(router, "weight", f"{experts.router}.weight", experts.router_shape)
        name = self._operator(experts.name, "experts")
        self._edge(x, name, "x", experts.format)
        self._edge(router, name, "routing", c)
        for parameter, shape in experts.parameters:
            self._parameter(name, parameter.rsplit(".", 1)[-1], parameter, shape, experts.format)
        return name

    def _linear(self, linear: Linear, x: str, kind: str = "linear") -> str:
        name, fmt, c = linear.name, linear.format, self.decoder.carrier
        self._operator(name, kind, linear.shape)
        if fmt.x.granularity == "none":
            self._edge(x, name, "x", fmt.x)
        else:
            quantizer = self._operator(f"{name}.x_quantizer", "quantizer", definition=linear.quantizer)
            self._edge(x, quantizer, "x", c)
            self._edge(quantizer, name, "x", fmt.x)
        if fmt.weight.granularity == "none":
            self._parameter(name, "weight", linear.weight_name, linear.shape, fmt.weight)
        else:
            quantizer = self._operator(f"{name}.weight_quantizer", "quantizer", definition=linear.quantizer)
            self._parameter(quantizer, "weight", linear.weight_name, linear.shape, linear.source)
            self._edge(quantizer, name, "weight", fmt.weight)
        if linear.bias:
            self._parameter(name, "bias", f"{name}.bias", linear.shape[:1])
        return name

    def _norm(self, norm: Norm, x: str) -> str:
        self._operator(norm.name, "norm", (norm.size,))
        self._edge(x, norm.name, "x", self.decoder.carrier)
        self._parameter(norm.name, "weight", f"{norm.name}.weight", (norm.size,))
        return norm.name

    def _residual(self, name: str, x: str, residual: str) -> str:
        self._operator(name, "residual_add")
        self._edge(x, name, "x", self.decoder.carrier)
        self._edge(residual, name, "residual", self.decoder.carrier)
        return name

    def _parameter(
        self, consumer: str, tensor: str, parameter: str, shape: tuple[int, ...], fmt: TensorFormat | None = None
    ) -> None:
        """The parameter's own operator (once, also where two readers share it) and the edge to this reader."""
        self.operators.setdefault(parameter, Operator(parameter, "parameter", shape))
        self._edge(parameter, consumer, tensor, fmt or self.decoder.carrier)

    def _operator(self, name: str, kind: str, shape: tuple[int, ...] = (), definition: str = "") -> str:
        assert name not in self.operators, name
        self.operators[name] = Operator(name, kind, tuple(shape), definition)
        return name

    def _edge(self, producer: str, consumer: str, tensor: str, fmt: TensorFormat) -> None:
        self.edges.append(Edge(producer, consumer, tensor, fmt))
