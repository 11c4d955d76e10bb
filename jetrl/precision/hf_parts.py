"""Reads the parts of a decoder off a live Hugging Face causal LM (real or meta tensors).

Nothing is decided by architecture name: a module is what its type and its place say it is. What neither tells is listed
as unclassified, and a layer with such a module is not drawn, because its wiring would be a guess.
"""

from collections.abc import Callable

from torch import nn

from jetrl.precision.formats import LinearFormat, TensorFormat
from jetrl.precision.layout import Decoder, Experts, GatedMlp, Layer, Linear, Norm

# Children that a pre-norm decoder layer and its parts may have; any other makes the layer "not understood".
LAYER_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_CHILDREN = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
MLP_CHILDREN = {"gate_proj", "up_proj", "down_proj", "act_fn"}
MOE_CHILDREN = {"gate", "experts"}
REQUIRED_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}

FormatOf = Callable[[str, nn.Module], Linear]


class HuggingFaceParts:
    """model: the causal LM. make_linear: (canonical name, nn.Linear) -> Linear with its formats."""

    def __init__(self, model: nn.Module, make_linear: FormatOf, carrier: TensorFormat, kv: TensorFormat) -> None:
        self.model, self.make_linear, self.carrier, self.kv = model, make_linear, carrier, kv
        self.names = {id(module): name for name, module in model.named_modules()}
        self.claimed: set[str] = set()

    def decoder(self, master: TensorFormat, meta: dict) -> Decoder:
        embedding = self.model.get_input_embeddings()
        head = self.model.get_output_embeddings()
        embedding_name = self._claim(self.names[id(embedding)])
        lm_head = None
        if head is not None:
            name = self._claim(self.names[id(head)])
            tied = head.weight is embedding.weight
            shape = tuple(head.weight.shape)
            plain = LinearFormat.unquantized(self.carrier)
            parameter = f"{embedding_name}.weight" if tied else ""
            lm_head = Linear(name, shape, plain, head.bias is not None, source=self.carrier, parameter=parameter)
        layers, rotary = [], ""
        for name, module in self.model.named_modules():
            if is_rotary(module):
                rotary = rotary or self._claim(name)
            if "self_attn" in dict(module.named_children()):
                layers.append(self._layer(name, module))
        final_norm = self._final_norm()
        understood = tuple(layer for layer in layers if layer is not None)
        loose: tuple = ()
        if len(understood) != len(layers) or not layers:
            understood, loose = (), self._loose()
        return Decoder(
            embedding_name,
            tuple(embedding.weight.shape),
            rotary,
            understood,
            final_norm,
            lm_head,
            loose=loose,
            unclassified=self._unclassified(),
            carrier=self.carrier,
            cos_sin=self.carrier,
            master=master,
            meta=meta,
        )

    def _layer(self, name: str, module: nn.Module) -> Layer | None:
        children = dict(module.named_children())
        attention = children["self_attn"]
        parts, mlp = dict(attention.named_children()), children.get("mlp")
        if set(children) != LAYER_CHILDREN or not REQUIRED_ATTENTION <= set(parts) <= ATTENTION_CHILDREN:
            return None
        mlp_parts = self._mlp(f"{name}.mlp", mlp)
        norms = {n: self._norm(f"{name}.{n}", children[n]) for n in ("input_layernorm", "post_attention_layernorm")}
        linears = {n: self._linear(f"{name}.self_attn.{n}", parts[n]) for n in sorted(REQUIRED_ATTENTION)}
        if mlp_parts is None or None in norms.values() or None in linears.values():
            return None
        q_norm, k_norm = (self._norm(f"{name}.self_attn.{n}", parts.get(n)) for n in ("q_norm", "k_norm"))
        if ("q_norm" in parts and q_norm is None) or ("k_norm" in parts and k_norm is None):
            return None
        head_size = attention.head_dim
        return Layer(
            name=name,
            attention=f"{name}.self_attn",
            heads=(linears["q_proj"].shape[0] // head_size, linears["k_proj"].shape[0] // head_size, head_size),
            input_norm=norms["input_layernorm"],
            post_norm=norms["post_attention_layernorm"],
            q=linears["q_proj"],
            k=linears["k_proj"],
            v=linears["v_proj"],
            o=linears["o_proj"],
            mlp=mlp_parts,
            mlp_name=f"{name}.mlp",
            q_norm=q_norm,
            k_norm=k_norm,
            kv=self.kv,
        )

    def _mlp(self, name: str, module: nn.Module | None) -> GatedMlp | Experts | None:
        children = {} if module is None else dict(module.named_children())
        if set(children) == MLP_CHILDREN:
            linears = [self._linear(f"{name}.{n}", children[n]) for n in ("gate_proj", "up_proj", "down_proj")]
            if None in linears or list(children["act_fn"].children()):
                return None
            return GatedMlp(*linears, activation=self._claim(f"{name}.act_fn"))
        if set(children) == MOE_CHILDREN and hasattr(children["gate"], "weight"):
            prefix, experts = self._claim(f"{name}.experts"), children["experts"]
            for n, _ in experts.named_modules(prefix=prefix):
                self._claim(n)
            shapes = tuple((f"{prefix}.{n}", tuple(p.shape)) for n, p in experts.named_parameters())
            router = self._claim(f"{name}.gate")
            return Experts(router, tuple(children["gate"].weight.shape), prefix, shapes, self.carrier)
        return None

    def _linear(self, name: str, module: nn.Module | None) -> Linear | None:
        if not isinstance(module, nn.Linear):
            return None
        self._claim(name)
        return self.make_linear(name, module)

    def _norm(self, name: str, module: nn.Module | None) -> Norm | None:
        if module is None or not is_norm(module):
            return None
        self._claim(name)
        return Norm(name, module.weight.shape[0])

    def _final_norm(self) -> Norm | None:
        base = getattr(self.model, self.model.base_model_prefix, None)
        norm = getattr(base, "norm", None)
        return self._norm(self.names[id(norm)], norm) if norm is not None else None

    def _loose(self) -> tuple[Linear | Norm, ...]:
        """Every linear and norm outside embedding, lm_head and final norm, claimed or not by a layer that failed."""
        fixed = {id(self.model.get_input_embeddings()), id(self.model.get_output_embeddings())}
        base = getattr(self.model, self.model.base_model_prefix, None)
        fixed.add(id(getattr(base, "norm", None)))
        found = []
        for name, module in self.model.named_modules():
            if id(module) not in fixed:
                part = self._linear(name, module) or self._norm(name, module)
                found += [part] if part is not None else []
        return tuple(found)

    def _unclassified(self) -> tuple[str, ...]:
        """Leaf modules, and modules with parameters of their own, that nothing claimed."""
        result = []
        for name, module in self.model.named_modules():
            owns = next(module.parameters(recurse=False), None) is not None
            leaf = next(module.children(), None) is None
            if (owns or leaf) and name not in self.claimed and not is_rotary(module):
                result.append(f"{name} ({type(module).__name__})")
        return tuple(result)

    def _claim(self, name: str) -> str:
        self.claimed.add(name)
        return name


def is_norm(module: nn.Module) -> bool:
    """An RMS norm with one gain vector (there is no common class to test for)."""
    parameters = [name for name, _ in module.named_parameters(recurse=False)]
    return type(module).__name__.endswith("RMSNorm") and parameters == ["weight"] and module.weight.dim() == 1


def is_rotary(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")
