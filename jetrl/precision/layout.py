"""What a builder reads off a live decoder-only model, engine-neutral: the parts, their sizes and their formats.

Both builders fill these records; `wiring` turns them into operators and edges. So the two engines can differ in what
was found in them, never in how a graph is drawn from it.
"""

from dataclasses import dataclass, field

from jetrl.precision.formats import BF16, FP32, LinearFormat, TensorFormat


@dataclass(frozen=True)
class Linear:
    """One logical weight matrix.

    shape: (out, in). quantizer: whose arithmetic ("jetrl", "vllm", ...), unused when unquantized.
    source: what the weight quantizer reads. parameter: name of the weight (the embedding's where tied).
    """

    name: str
    shape: tuple[int, int]
    format: LinearFormat
    bias: bool = False
    quantizer: str = "jetrl"
    source: TensorFormat = BF16
    parameter: str = ""

    @property
    def weight_name(self) -> str:
        return self.parameter or f"{self.name}.weight"


@dataclass(frozen=True)
class Norm:
    name: str
    size: int


@dataclass(frozen=True)
class Experts:
    """A mixture-of-experts block: router (out = experts, in = hidden) and the experts' stacked matrices."""

    router: str
    router_shape: tuple[int, int]
    name: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    format: TensorFormat = BF16


@dataclass(frozen=True)
class GatedMlp:
    gate: Linear
    up: Linear
    down: Linear
    activation: str


@dataclass(frozen=True)
class Layer:
    """One pre-norm decoder layer: norm, attention, residual add, norm, MLP or experts, residual add."""

    name: str
    attention: str
    heads: tuple[int, int, int]
    input_norm: Norm
    post_norm: Norm
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    mlp: GatedMlp | Experts
    mlp_name: str
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    kv: TensorFormat = BF16

    def linears(self) -> list[Linear]:
        mlp = [self.mlp.gate, self.mlp.up, self.mlp.down] if isinstance(self.mlp, GatedMlp) else []
        return [self.q, self.k, self.v, self.o, *mlp]


@dataclass(frozen=True)
class Decoder:
    """A whole model.

    `loose`: linears and norms of layers whose wiring could not be read off, so that what feeds them is unknown;
    `unclassified`: names of the modules that no rule covers. Where one layer is not understood, all are loose.
    """

    embedding: str
    embedding_shape: tuple[int, int]
    rotary: str
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    lm_head: Linear | None
    loose: tuple[Linear | Norm, ...] = ()
    unclassified: tuple[str, ...] = ()
    carrier: TensorFormat = BF16
    cos_sin: TensorFormat = BF16
    master: TensorFormat = FP32
    meta: dict = field(default_factory=dict)
